"""The life of requests: admission, figures, prefix reuse, STOP, limits, bad lines, embeddings, nonfinite."""

import struct
from base64 import b64decode
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.native.conftest import StartDecoder
from tests.native.decoder_process import DecoderProcess, prompt_of
from tests.tiny_model import VOCAB_SIZE, build


def test_ready_and_info_announce_what_the_decoder_can_do(decoder: DecoderProcess) -> None:
    assert decoder.ready == "READY 1024 stop slots=8"
    assert decoder.info["vocab"] == str(VOCAB_SIZE)
    assert decoder.info["model"] == "ringfence-tiny"
    assert decoder.info["backend"] == "cpu"
    assert decoder.info["kv_cells"] == "8192"
    assert decoder.info["logprobs"] == "20"
    assert all(decoder.info[key] == "1" for key in ("grammar", "logit_bias", "embeddings", "resume"))
    assert decoder.info["engine"].startswith("ringfence-")
    assert decoder.info["load"] == "100"


def test_a_request_answers_in_the_order_of_the_protocol(start_decoder: StartDecoder) -> None:
    decoder = start_decoder("--ubatch", "16")
    answer = decoder.generate(3, prompt_of(1, 40))
    assert [line.split()[0] for line in answer.lines] == ["PP", "PP", "PP", "REUSED", "T", "T", "T", "DONE"]
    assert [words[:2] for words in answer.words("PP")] == [["16", "40"], ["32", "40"], ["40", "40"]]
    generated, prompt_tokens, prompt_ms, decode_ms, finish, *rest = answer.done
    assert (generated, prompt_tokens, finish) == ("3", "40", "length")
    assert float(prompt_ms) > 0 and float(decode_ms) > 0
    assert rest == ["0", "0", "0", "0", "0", "0", "0", "0", "40", "0"]


def test_the_next_turn_of_a_conversation_reads_only_what_is_new(start_decoder: StartDecoder) -> None:
    decoder = start_decoder("--slots", "3")
    prompt = prompt_of(1, 200)
    first = decoder.generate(20, prompt)
    decoder.generate(5, prompt_of(2, 100))
    turn = decoder.generate(5, [*prompt, *first.tokens, 50, 51, 52])
    held = 200 + 19  # the last token was sent, not computed
    assert turn.words("RESUME") == turn.words("REUSED") == [[str(held)]]
    assert (turn.reused, turn.prompt_read) == (held, 4)


def test_at_least_one_prompt_token_is_read_again(start_decoder: StartDecoder) -> None:
    decoder = start_decoder()
    prompt = prompt_of(1, 50)
    first = decoder.generate(10, prompt)
    second = decoder.generate(10, prompt)
    assert (second.reused, second.prompt_read) == (49, 1)
    assert second.tokens == first.tokens


@pytest.mark.parametrize("options", [(), ("--kv-cells", "4096")], ids=["separate", "shared"])
def test_a_prefix_held_by_a_busy_slot_is_copied(
    start_decoder: StartDecoder, exact_model: Path, options: tuple[str, ...]
) -> None:
    prefix = prompt_of(1, 300)
    alone = start_decoder("--slots", "1", "--exact", model=exact_model).generate(20, [*prefix, 60]).tokens
    decoder = start_decoder("--slots", "2", "--exact", *options, model=exact_model)
    busy = decoder.begin(600, prefix)
    decoder.wait_for(busy, "T")
    answer = decoder.generate(20, [*prefix, 60])
    assert answer.reused == 300
    assert answer.tokens == alone
    decoder.send(f"STOP {busy}")
    assert decoder.answer(busy).finish == "cancel"


def test_interleaved_conversations_with_one_system_prompt_keep_their_own_slots(start_decoder: StartDecoder) -> None:
    decoder = start_decoder("--slots", "4")
    system = prompt_of(9, 100)
    talks = [[*system, *prompt_of(20 + i, 30)] for i in range(4)]
    for turn in range(4):
        for i, talk in enumerate(talks):
            answer = decoder.generate(10, talk)
            if turn > 0:
                assert answer.prompt_read <= 12
            elif i > 0:
                assert answer.reused == 100
            talk += [*answer.tokens, *prompt_of(turn, 10)]


def test_stop_ends_a_stream_with_its_true_figures(decoder: DecoderProcess) -> None:
    rid = decoder.begin(900, prompt_of(3, 20))
    decoder.wait_for(rid, "T", 10)
    decoder.send(f"STOP {rid}")
    answer = decoder.answer(rid)
    assert answer.finish == "cancel"
    assert int(answer.done[0]) == len(answer.tokens) < 900


def test_stop_ends_the_reading_of_a_prompt(start_decoder: StartDecoder) -> None:
    decoder = start_decoder("--ubatch", "8", "--context", "4096")
    rid = decoder.begin(10, prompt_of(3, 4000))
    decoder.wait_for(rid, "PP")
    decoder.send(f"STOP {rid}")
    answer = decoder.answer(rid)
    assert answer.finish == "cancel"
    assert answer.tokens == []
    assert 0 < answer.prompt_read < 4000
    assert decoder.generate(1, prompt_of(3, 4000)).reused == answer.prompt_read  # what was read is kept


def test_stop_of_an_unknown_request_is_ignored(decoder: DecoderProcess) -> None:
    decoder.send("STOP 4111111111")
    assert decoder.generate(2, prompt_of(1, 5)).finish == "length"


def test_a_request_beyond_the_slots_is_refused_as_busy(start_decoder: StartDecoder) -> None:
    decoder = start_decoder("--slots", "1")
    running = decoder.begin(1000, prompt_of(1, 10))
    decoder.wait_for(running, "T")
    assert decoder.generate(5, prompt_of(2, 10)).error == "busy"
    decoder.send(f"STOP {running}")
    assert decoder.answer(running).finish == "cancel"
    assert decoder.generate(5, prompt_of(2, 10)).finish == "length"


def test_a_stream_goes_on_while_a_long_prompt_is_read(start_decoder: StartDecoder) -> None:
    decoder = start_decoder("--slots", "2")
    streaming = decoder.begin(3000, prompt_of(1, 10))
    decoder.wait_for(streaming, "T")
    reading = decoder.begin(1, prompt_of(2, 2000))
    order: list[tuple[int, str]] = []
    while not order or order[-1] != (reading, "DONE"):
        rid, text = decoder.read_answer_line()
        order.append((rid, text.split()[0]))
    assert order.count((streaming, "T")) >= order.count((reading, "PP")) - 1
    assert order.count((reading, "PP")) >= 2000 / 256
    decoder.send(f"STOP {streaming}")
    decoder.answer(streaming)


def test_idle_slots_filled_between_running_ones_change_nothing(start_decoder: StartDecoder, exact_model: Path) -> None:
    prompts = [prompt_of(40 + i, 30 + i) for i in range(5)]
    plain, filled = (
        start_decoder("--slots", "5", "--exact", "--fill-gaps", str(most), model=exact_model) for most in (0, 5)
    )
    outputs = []
    for decoder in (plain, filled):
        rids = [decoder.begin(400 if i % 2 == 0 else 20, prompt) for i, prompt in enumerate(prompts)]
        outputs.append([decoder.answer(rid).tokens for rid in rids])
        again = decoder.generate(20, [*prompts[1], *outputs[-1][1]])
        assert again.reused == len(prompts[1]) + 19
        outputs[-1].append(again.tokens)
    assert outputs[0] == outputs[1]


def test_a_full_context_ends_a_generation_with_length(start_decoder: StartDecoder) -> None:
    decoder = start_decoder("--context", "64")
    answer = decoder.generate(100, prompt_of(1, 60))
    assert answer.finish == "length"
    assert len(answer.tokens) == 5
    assert len(decoder.generate(100, prompt_of(2, 63)).tokens) == 2
    assert decoder.generate(100, prompt_of(2, 64)).error.startswith("context: ")


def test_shared_cells_give_way_to_the_older_request(start_decoder: StartDecoder) -> None:
    decoder = start_decoder("--slots", "3", "--context", "512", "--kv-cells", "512")
    assert decoder.generate(1, prompt_of(5, 200)).finish == "length"  # left behind as cache, dropped for what follows
    older = decoder.begin(150, prompt_of(1, 300))
    decoder.wait_for(older, "T")
    newer = decoder.begin(10, prompt_of(2, 300))
    assert decoder.answer(newer).error.startswith("kv: ")
    assert decoder.answer(older).finish == "length"
    assert decoder.generate(10, prompt_of(3, 400)).finish == "length"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("GEN 4000000000 0 1,2", "max_new"),
        ("GEN 4000000000 -5 1,2", "max_new"),
        ("GEN 4000000000 99999999999999999999 1,2", "max_new"),
        ("GEN 4000000000 5 1,2,", "ids"),
        ("GEN 4000000000 5 1,,2", "ids"),
        ("GEN 4000000000 5 1, 2", "ids"),
        ("GEN 4000000000 5 ", "ids"),
        ("GEN 4000000000 5", "ids"),
        ("GEN 4000000000", "max_new"),
        ("GEN 4000000000 5 1,x", "ids"),
        ("GEN 4000000000 5 -1", "ids"),
        (f"GEN 4000000000 5 {VOCAB_SIZE}", "ids"),
        ("GEN 4000000000 5 99999999999999", "ids"),
        ("GEN 4000000000 5 colour=red 1,2", "unknown key"),
        ("GEN 4000000000 5 temperature=nan 1,2", "temperature"),
        ("GEN 4000000000 5 temperature=-1 1,2", "temperature"),
        ("GEN 4000000000 5 temperature=1x 1,2", "temperature"),
        ("GEN 4000000000 5 top_p=1.5 1,2", "top_p"),
        ("GEN 4000000000 5 top_k=-3 1,2", "top_k"),
        ("GEN 4000000000 5 seed=-1 1,2", "seed"),
        ("GEN 4000000000 5 logprobs=21 1,2", "logprobs"),
        ("GEN 4000000000 5 resume=3 1,2", "resume"),
        ("GEN 4000000000 5 logit_bias=5 1,2", "logit_bias"),
        (f"GEN 4000000000 5 logit_bias={VOCAB_SIZE}:1 1,2", "logit_bias"),
        ("GEN 4000000000 5 logit_bias=5:inf 1,2", "logit_bias"),
        ("GEN 4000000000 5 grammar=%% 1,2", "grammar"),
        ("EMB 4000000000 ", "ids"),
        ("EMB 4000000000 1,a", "ids"),
        ("GEN 4000000000 5 " + ",".join(["1"] * 2000), "context"),
        ("GEN 4000000000 5 " + "1" * 5_000_000, "line"),
    ],
)
def test_a_bad_command_is_refused_with_its_reason(decoder: DecoderProcess, line: str, error: str) -> None:
    decoder.send(line)
    rid, text = decoder.read_answer_line()
    assert rid == 4_000_000_000
    assert text.startswith(f"ERR {error}")


@pytest.mark.parametrize(
    "line", ["", "hello", "GEN", "GEN x 5 1", "GEN -1 5 1", "GEN 99999999999 5 1", "STOP", "\x00\xff"]
)
def test_a_line_without_a_request_id_is_ignored(decoder: DecoderProcess, line: str) -> None:
    decoder.send(line)
    assert decoder.generate(2, prompt_of(1, 5)).finish == "length"


def test_a_carriage_return_at_the_end_of_a_command_is_stripped(decoder: DecoderProcess) -> None:
    decoder.send("GEN 4000000001 2 7,8,9\r")
    assert decoder.answer(4_000_000_001).finish == "length"


def test_embeddings_have_length_one_and_depend_on_the_prompt_alone(decoder: DecoderProcess) -> None:
    def embedding(rid: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        answer = decoder.answer(rid)
        assert answer.finish == "stop"
        assert answer.done[1] == "150"
        data = b64decode(answer.words("E")[0][0])
        return np.array(struct.unpack(f"<{len(data) // 4}f", data), np.float32)

    alone = embedding(decoder.embed(prompt_of(1, 150)))
    streaming = decoder.begin(900, prompt_of(5, 10))
    beside = embedding(decoder.embed(prompt_of(1, 150)))
    other = embedding(decoder.embed(prompt_of(2, 150)))
    decoder.send(f"STOP {streaming}")
    decoder.answer(streaming)
    assert alone.shape == (62,)
    assert np.linalg.norm(alone) == pytest.approx(1, abs=1e-5)
    assert np.array_equal(alone, beside)
    assert float(alone @ other) < 0.99


def test_nan_logits_end_the_request_as_nonfinite_and_drop_the_caches(
    start_decoder: StartDecoder, tmp_path: Path
) -> None:
    model = build(tmp_path / "broken.gguf")
    weights = next(t for t in gguf.GGUFReader(model).tensors if t.name == "output_norm.weight")
    with model.open("r+b") as file:
        file.seek(weights.data_offset)
        file.write(struct.pack("<f", float("nan")))
    decoder = start_decoder(model=model)
    first = decoder.generate(5, prompt_of(1, 30))
    assert (first.finish, first.tokens) == ("nonfinite", [])
    assert decoder.generate(5, prompt_of(1, 30)).reused == 0
