"""Stop strings and characters across token borders (B67, B68), on piece tables made up here."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.detokenizer import Detokenizer, PieceTable, StopStrings


def splits(data: bytes, parts: int) -> Iterator[list[bytes]]:
    """Every way to cut `data` into that many pieces, none empty."""
    for cuts in combinations(range(1, len(data)), parts - 1):
        borders = [0, *cuts, len(data)]
        yield [data[start:end] for start, end in pairwise(borders)]


def run(
    pieces: Sequence[bytes], stops: Sequence[str] = (), *, batch: int = 1, has_offsets: bool = False
) -> tuple[str, Detokenizer]:
    """All the text, and the detokenizer after it."""
    output = Detokenizer(PieceTable(pieces), stops, has_offsets=has_offsets)
    ids = range(len(pieces))
    text = "".join(output.push(ids[start : start + batch]) for start in range(0, len(ids), batch))
    return text + output.finish(), output


def expected(pieces: Sequence[bytes], stops: Sequence[str]) -> tuple[str, str | None]:
    """The rules, said plainly: the stop string that is complete first, and of those that end there the longest."""
    text = b"".join(pieces).decode("utf-8", "replace")
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("stop", ["STOP", "\n\n", "停止", "né"])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5])
def test_stop_string_is_found_however_its_bytes_are_split(stop: str, parts: int) -> None:
    before, after = "Grüße, ", " never seen"
    for middle in splits(stop.encode(), parts):
        pieces = [before.encode(), *middle, after.encode()]
        for batch in (1, 2, len(pieces)):
            text, output = run(pieces, [stop], batch=batch)
            assert text == before
            assert output.stopped == stop
            assert output.tokens_used == 1 + len(middle)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5])
def test_text_with_a_stop_string_inside_is_cut_however_it_is_split(parts: int) -> None:
    for pieces in splits("aé STOP東z".encode(), parts):
        text, output = run(pieces, ["STOP"])
        assert (text, output.stopped) == ("aé ", "STOP")


def test_stop_string_inside_one_token_hides_what_follows_it() -> None:
    text, output = run([b"one", b" two STOP three", b" four"], ["STOP"])
    assert (text, output.tokens_used) == ("one two ", 2)


@pytest.mark.parametrize("batch", [1, 3, 100])
@pytest.mark.parametrize("stops", [["STOP", "STOPPED"], ["STOPPED", "STOP"]])
def test_of_a_stop_string_and_its_prefix_the_prefix_counts(stops: list[str], batch: int) -> None:
    text, output = run([b"x ", b"ST", b"OP", b"PED", b" y"], stops, batch=batch)
    assert (text, output.stopped, output.tokens_used) == ("x ", "STOP", 3)


@pytest.mark.parametrize("batch", [1, 100])
def test_stop_string_that_is_complete_first_counts_even_inside_another(batch: int) -> None:
    text, output = run([b"a", b"b", b"c", b"d"], ["abcd", "bc"], batch=batch)
    assert (text, output.stopped, output.tokens_used) == ("a", "bc", 3)


def test_of_stop_strings_that_end_together_the_longest_counts() -> None:
    text, output = run([b"xab", b"c"], ["c", "abc", "bc"])
    assert (text, output.stopped) == ("x", "abc")


@pytest.mark.parametrize("batch", [1, 100])
@pytest.mark.parametrize(
    ("pieces", "stops"),
    [
        ([b"STO", b"RE"], ["STOP"]),
        ([b"ST", b"ST", b"O", b"STO"], ["STOP"]),
        ([b"aab", b"aac"], ["aabaaa"]),
        ([b"\n", b"x\n", b"y"], ["\n\n"]),
        (["停".encode(), "車".encode()], ["停止"]),
        (["停".encode(), b"\xe6\xad"], ["停止"]),
    ],
)
def test_near_miss_is_given_in_full(pieces: list[bytes], stops: list[str], batch: int) -> None:
    text, output = run(pieces, stops, batch=batch)
    assert text == b"".join(pieces).decode("utf-8", "replace")
    assert output.stopped is None


def test_near_miss_is_released_as_soon_as_it_is_one() -> None:
    output = Detokenizer(PieceTable([b"say STO", b"RE", b" it"]), ["STOP"])
    assert output.push([0]) == "say "
    assert output.push([1]) == "STORE"
    assert output.push([2]) == " it"


def test_near_miss_at_the_end_is_released_by_finish() -> None:
    output = Detokenizer(PieceTable([b"say STO"]), ["STOP"])
    assert output.push([0]) == "say "
    assert output.finish() == "STO"
    assert output.finish() == ""


def test_overlapping_beginnings_hold_only_what_may_still_match() -> None:
    output = Detokenizer(PieceTable([b"aa", b"a", b"b"]), ["aab"])
    assert output.push([0]) == ""
    assert output.push([1]) == "a"
    assert output.push([2]) == ""
    assert output.stopped == "aab"


def test_pushes_after_a_stop_string_add_and_count_nothing() -> None:
    output = Detokenizer(PieceTable([b"STOP", b"more"]), ["STOP"])
    output.push([0])
    assert (output.push([1]), output.finish(), output.tokens_used) == ("", "", 1)


CHARACTERS = {
    "family emoji joined by ZWJ": "👩‍👩‍👧‍👦",
    "flag": "🇩🇪",
    "skin tone": "👋🏽",
    "CJK": "漢字かな",
    "combining marks": "e\u0301n\u0303",
    "astral CJK": "𠀋",
    "keycap": "1\ufe0f\u20e3",
    "Devanagari": "क्षि",
}


@pytest.mark.parametrize("text", CHARACTERS.values(), ids=CHARACTERS.keys())
@pytest.mark.parametrize("stops", [[], ["never"], ["\ufe0f-", "👩‍👩‍👧‍👧", "\u0301\u0301"]])
@pytest.mark.parametrize("batch", [1, 2])
def test_characters_survive_every_split_of_their_bytes(text: str, stops: list[str], batch: int) -> None:
    for parts in (2, 3):
        for pieces in splits(text.encode(), parts):
            assert run(pieces, stops, batch=batch)[0] == text
    single_bytes = [bytes([byte]) for byte in text.encode()]
    assert run(single_bytes, stops, batch=batch)[0] == text


@pytest.mark.parametrize("text", CHARACTERS.values(), ids=CHARACTERS.keys())
def test_character_is_sent_with_the_token_that_completes_it(text: str) -> None:
    data = text.encode()
    output = Detokenizer(PieceTable([bytes([byte]) for byte in data]))
    sent = ""
    for place in range(len(data)):
        sent += output.push([place])
        assert sent == data[: place + 1].decode("utf-8", "ignore")


@pytest.mark.parametrize("kept", [1, 2, 3])
@pytest.mark.parametrize("stops", [[], ["STOP"]])
def test_character_cut_off_by_the_end_is_one_replacement_character(kept: int, stops: list[str]) -> None:
    data = b"ok " + "🙂".encode()[:kept]
    assert run([data], stops)[0] == "ok \ufffd"
    assert run([bytes([byte]) for byte in data], stops)[0] == "ok \ufffd"


def test_character_cut_off_after_a_held_near_miss_keeps_the_order() -> None:
    assert run([b"STO", b"\xf0\x9f"], ["STOP"])[0] == "STO\ufffd"


@pytest.mark.parametrize(
    "data", [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x80", b"\xe6x", b"\xf0\x9f\xe6\x97\xa5"]
)
def test_invalid_bytes_become_replacement_characters_the_same_way_in_any_batch(data: bytes) -> None:
    whole = run([b"a" + data + b"z"])[0]
    assert run([b"a", *(bytes([byte]) for byte in data), b"z"])[0] == whole
    assert "\ufffd" in whole
    whole.encode()  # no lone surrogates


def test_id_beyond_the_table_is_an_empty_piece() -> None:
    for stops in ([], ["STOP"]):
        output = Detokenizer(PieceTable([b"a", b"b"]), stops)
        assert output.push([0, 2, 1]) + output.push([99]) + output.finish() == "ab"
        assert output.tokens_used == 4


def test_offsets_are_the_characters_before_each_token() -> None:
    text, output = run(["é".encode(), b"\xe6", b"\x97\xa5!", b"", b"x"], has_offsets=True)
    assert text == "é日!x"
    assert output.text_offsets == [0, 1, 1, 3, 3]
    assert output.released == 5


def test_tokens_are_released_with_their_text() -> None:
    output = Detokenizer(PieceTable([b"a", b"S", b"T", b"x", b"ST", b"OP"]), ["STOP"], has_offsets=True)
    seen = []
    for token in range(6):
        output.push([token])
        seen.append(output.released)
    assert seen == [1, 1, 1, 4, 4, 4]
    assert output.stopped == "STOP"


def test_token_that_begins_before_the_stop_string_is_released() -> None:
    output = Detokenizer(PieceTable([b"a", b"b ST", b"OP"]), ["STOP"], has_offsets=True)
    output.push([0, 1])
    assert output.released == 1
    output.push([2])
    assert output.released == 2


def test_repr_tells_what_is_held() -> None:
    output = Detokenizer(PieceTable([b"ST\xf0"]), ["STOP"])
    output.push([0])
    assert "held='ST'" in repr(output)
    assert r"tail=b'\xf0'" in repr(output)


def test_automaton_steps_once_per_character_of_an_adversarial_text() -> None:
    stop = "a" * 255 + "b"
    automaton = StopStrings([stop])
    state = 0
    for _ in range(10_000):
        state = automaton.step(state, "a")
    assert automaton.held[state] == 255
    assert automaton.ends[automaton.step(state, "b")] == 256


FRAGMENTS = [
    b"a",
    b"b",
    b"ab",
    b"",
    b"\xe6",
    b"\x97\xa5",
    "日".encode(),
    "🙂".encode(),
    b"\xf0\x9f",
    b"\x99\x82",
    b"\xff",
]
BATCHES = st.lists(st.lists(st.sampled_from(range(len(FRAGMENTS))), max_size=5), max_size=12)
STOPS = st.lists(st.text("ab日🙂\ufffd", min_size=1, max_size=4), max_size=4)


@settings(max_examples=250, deadline=None)
@given(batches=BATCHES, stops=STOPS, has_offsets=st.booleans())
def test_pushes_joined_equal_the_output_at_once(batches: list[list[int]], stops: list[str], has_offsets: bool) -> None:
    table = PieceTable(FRAGMENTS)
    pieces = [FRAGMENTS[token] for batch in batches for token in batch]
    output = Detokenizer(table, stops, has_offsets=has_offsets)
    text = "".join(output.push(batch) for batch in batches) + output.finish()
    assert (text, output.stopped) == expected(pieces, stops)
    if output.stopped is None:
        assert output.tokens_used == len(pieces)
        assert not has_offsets or output.released == len(pieces)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.sampled_from(range(len(FRAGMENTS))), max_size=25), stops=STOPS)
def test_tokens_used_ends_with_the_token_that_completes_the_stop_string(ids: list[int], stops: list[str]) -> None:
    at_once = Detokenizer(PieceTable(FRAGMENTS), stops)
    at_once.push(ids)
    one_by_one = Detokenizer(PieceTable(FRAGMENTS), stops)
    for token in ids:
        if one_by_one.stopped is None:
            one_by_one.push([token])
    assert at_once.tokens_used == one_by_one.tokens_used
    assert at_once.stopped == one_by_one.stopped


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=8))
def test_any_bytes_in_any_pieces_are_decoded_as_python_decodes_them_whole(data: bytes, cuts: list[int]) -> None:
    borders = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in pairwise(borders)]
    assert run(pieces)[0] == data.decode("utf-8", "replace")
