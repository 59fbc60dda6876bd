"""The vocabulary of a GGUF: tokenising any text, pieces, threads, files that are none."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.detokenizer import Detokenizer
from server.tokenizer import RUN_LIMIT, Tokenizer, TokenizerError, TooManyTokens
from tests import tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(tiny_model.build(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture
def with_splitter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Tokenizer]:
    """The tiny model, told to split texts as the named family of models does."""

    def load(name: str) -> Tokenizer:
        original = gguf.GGUFWriter.add_tokenizer_pre
        monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_pre", lambda writer, _: original(writer, name))
        return Tokenizer.load(tiny_model.build(tmp_path / f"{name}.gguf"))

    return load


def test_facts_of_the_model_are_read(tiny: Tokenizer) -> None:
    assert (tiny.vocabulary, tiny.bos, tiny.eos) == (tiny_model.VOCAB_SIZE, tiny_model.BOS, tiny_model.EOS)
    assert tiny.eog == {tiny_model.EOS, tiny_model.IM_END}
    assert tiny.adds_bos
    assert tiny.chat_template == tiny_model.CHAT_TEMPLATE
    assert tiny.context_train == 4096
    assert tiny.model_name == "ringfence-tiny"
    assert tiny.metadata["general.architecture"] == "llama"


def test_text_is_encoded_with_bos_only_if_asked(tiny: Tokenizer) -> None:
    assert tiny.encode("hi")[0] == tiny_model.BOS
    assert tiny.encode("hi", add_special=False) == tiny.encode("hi")[1:]
    assert tiny.encode("") == [tiny_model.BOS]
    assert tiny.encode("", add_special=False) == []


def test_special_tokens_in_a_text_count_only_if_asked(tiny: Tokenizer) -> None:
    text = "<|im_start|>user"
    assert tiny.encode(text, parse_special=True)[1] == tiny_model.IM_START
    assert tiny_model.IM_START not in tiny.encode(text)
    assert tiny.decode(tiny.encode(text, add_special=False)) == text


def test_special_tokens_show_nothing_in_an_output_and_their_text_on_request(tiny: Tokenizer) -> None:
    for token in range(len(tiny_model.SPECIALS)):
        assert tiny.piece(token) == b""
        assert tiny.table[token] == b""
        assert tiny.piece(token, special=True) == tiny_model.SPECIALS[token].encode()
    assert tiny.decode([tiny_model.BOS, tiny_model.FIRST_BYTE + ord("a")]) == "<s>a"
    assert tiny.decode([tiny_model.BOS, tiny_model.FIRST_BYTE + ord("a")], special=False) == "a"


def test_table_has_the_bytes_of_every_token(tiny: Tokenizer) -> None:
    assert len(tiny.table) == tiny.vocabulary
    assert [tiny.piece(tiny_model.FIRST_BYTE + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert tiny.table.texts[tiny_model.FIRST_BYTE + 0xE6] is None


def test_any_int_has_a_piece(tiny: Tokenizer) -> None:
    assert [tiny.piece(token) for token in (-1, -(2**40), tiny.vocabulary, 2**40)] == [b"", b"", b"", b""]


@pytest.mark.parametrize(
    ("text", "read_as"),
    [
        ("a\0b", "a\0b"),
        ("\ud800", "\ufffd"),
        ("x\udc00y", "x\ufffdy"),
        ("\ud83d\ude42", "🙂"),
        ("\ufeff\u200b", "\ufeff\u200b"),
    ],
)
def test_odd_text_is_read_by_a_rule(tiny: Tokenizer, text: str, read_as: str) -> None:
    assert tiny.decode(tiny.encode(text, add_special=False)) == read_as


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=()), max_size=60), parse_special=st.booleans())
def test_any_text_comes_back_from_its_tokens(tiny: Tokenizer, text: str, parse_special: bool) -> None:
    readable = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert tiny.decode(tiny.encode(text, add_special=False, parse_special=parse_special)) == readable


def test_encoding_in_many_threads_equals_encoding_in_one(tiny: Tokenizer) -> None:
    texts = [f"request {number}: " + "naïve 東京 words " * number for number in range(1, 60)]
    alone = [tiny.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as threads:
        for _ in range(3):
            assert list(threads.map(tiny.encode, texts)) == alone


@pytest.mark.parametrize("splitter", ["gpt-2", "gpt-4o", "tekken", "deepseek-llm", "bloom", "default"])
@pytest.mark.parametrize("unit", ["a", " ", "東", "1", "!", "\n"])
def test_long_run_of_one_character_does_not_kill_the_process(
    with_splitter: Callable[[str], Tokenizer], splitter: str, unit: str
) -> None:
    text = unit * 50_000
    tokenizer = with_splitter(splitter)
    ids = tokenizer.encode(text)
    assert ids.count(tiny_model.BOS) == 1
    assert tokenizer.decode(ids[1:]) == text


@pytest.mark.parametrize("place", range(RUN_LIMIT - 12, RUN_LIMIT + 2))
def test_seam_of_a_long_run_cuts_no_special_token_and_no_character(tiny: Tokenizer, place: int) -> None:
    with_special = "a" * place + "<|im_end|>" + "b" * RUN_LIMIT
    assert tiny.encode(with_special, parse_special=True).count(tiny_model.IM_END) == 1
    with_characters = "a" * place + "東京🙂" + "b" * RUN_LIMIT
    assert tiny.decode(tiny.encode(with_characters, add_special=False)) == with_characters


def test_ordinary_long_text_has_no_seams(tiny: Tokenizer) -> None:
    words = [" the", " quick", " brown", " fox"] * 1000
    word_by_word = [token for word in words for token in tiny.encode(word, add_special=False)]
    assert tiny.encode("".join(words), add_special=False) == word_by_word


def test_short_text_is_what_the_event_loop_may_encode(tiny: Tokenizer) -> None:
    assert tiny.is_short("hello")
    assert not tiny.is_short("hello " * 10_000)


def test_output_of_the_model_is_detokenised_to_its_text(tiny: Tokenizer) -> None:
    ids = [*tiny.encode("Once upon a time 東京", add_special=False), tiny_model.EOS]
    output = Detokenizer(tiny.table)
    assert "".join(output.push([token]) for token in ids) + output.finish() == "Once upon a time 東京"


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04 no model", b"GGUF\x03\0\0\0" + bytes(16)])
def test_file_that_is_no_model_is_refused_with_a_remedy(
    tmp_path: Path, content: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match=r"bad\.gguf can't be read as a GGUF .*Check"):
        Tokenizer.load(path)
    assert capfd.readouterr() == ("", "")


def test_missing_file_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="is not a file"):
        Tokenizer.load(tmp_path / "absent.gguf")


def test_model_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "none.gguf"), "llama")
    tiny_model.add_hyperparameters(writer, layers=1, width=64, heads=4, hidden=64, context=128)
    writer.add_tokenizer_model("none")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(TokenizerError, match=r"none\.gguf"):
        Tokenizer.load(tmp_path / "none.gguf")


@pytest.mark.parametrize("text", ["!" * 50, "!" * 9_000])  # the second is tokenised in parts
def test_a_text_of_more_tokens_than_the_limit_is_counted_and_not_made(tiny: Tokenizer, text: str) -> None:
    ids = tiny.encode(text)
    assert len(ids) == len(text) + 1
    assert tiny.encode(text, limit=len(ids)) == ids
    with pytest.raises(TooManyTokens) as caught:
        tiny.encode(text, limit=len(ids) - 1)
    assert caught.value.count == len(ids)


def test_steps_joined_are_the_whole(tiny: Tokenizer) -> None:
    text = "ab!" * 20_000
    steps = list(tiny.encode_in_steps(text, add_special=True, parse_special=True))
    assert len(steps) > 2 and [token for step in steps for token in step] == tiny.encode(text, parse_special=True)
