"""The decoder protocol: what is sent, what is accepted, and that nothing else gets through."""

import array
import struct
from base64 import b64encode

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from native.protocol import (
    LEAST_LOGPROB,
    NO_REQUEST,
    Answer,
    AnswerParser,
    Dialect,
    DoneFields,
    DoneFinish,
    Encoder,
    Info,
    Kind,
    LineReader,
    ProtocolViolation,
    Ready,
    UnsupportedDialect,
    choose_dialect,
    encode_ids,
    parse_ready,
    unsupported,
)
from native.sampling import SamplingOptions

EVERYTHING = Info().add(b"INFO logprobs=5 grammar=1 logit_bias=1 embeddings=1 resume=1")
TOKEN_IDS = st.integers(0, 2**31 - 1)
RIDS = st.integers(0, 2**32 - 1)


def tagged(line: bytes, vocabulary: int = 32_000) -> Answer:
    return AnswerParser(Dialect.TAGGED, vocabulary).parse(line)


def solo(line: bytes, vocabulary: int = 32_000) -> Answer:
    return AnswerParser(Dialect.SOLO, vocabulary).parse(line)


# ---- the start ---------------------------------------------------------------------------------------------------


def test_info_lines_add_up_and_unknown_keys_are_kept() -> None:
    info = Info().add(b"INFO vocab=32000 model=a=b.gguf later=x").add(b"INFO load=40 kv_cells=8192 logprobs=20")
    assert (info.vocabulary, info.model, info.kv_cells, info.logprobs, info.load_percent) == (
        32_000,
        "a=b.gguf",
        8192,
        20,
        40,
    )
    assert info.values["later"] == "x"


def test_absent_and_odd_figures_of_info_are_zero() -> None:
    info = Info().add(b"INFO vocab=many kv_cells=-4 load=400 logprobs=\xd9\xa3 batch_slots=")
    assert (info.vocabulary, info.kv_cells, info.load_percent, info.logprobs, info.batch_slots) == (0, 0, 100, 0, 0)
    assert not (info.grammar or info.logit_bias or info.embeddings or info.resume)
    assert (info.model, info.backend, info.engine) == ("", "", "")


def test_a_line_that_is_no_info_is_not_added() -> None:
    with pytest.raises(ProtocolViolation):
        Info().add(b"INFORMATION a=b")


@pytest.mark.parametrize(
    ("line", "ready"),
    [
        (b"READY 4096 stop", Ready(4096, frozenset({"stop"}))),
        (b"READY 4096 stop slots=4", Ready(4096, frozenset({"stop"}), 4)),
        (b"READY 1 slots=1 stop later", Ready(1, frozenset({"stop", "later"}), 1)),
        (b"READY 4096", Ready(4096, frozenset())),
    ],
)
def test_ready_tells_context_flags_and_slots(line: bytes, ready: Ready) -> None:
    assert parse_ready(line) == ready


@pytest.mark.parametrize(
    "line", [b"READY", b"READY stop", b"READY 0 stop", b"READY -5 stop", b"READY 9 stop slots=0", b"READYY 5 stop", b""]
)
def test_a_bad_ready_is_a_violation(line: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        parse_ready(line)


def test_the_dialect_follows_from_info_and_ready() -> None:
    one_batch_slot = Info().add(b"INFO batch_slots=1")
    assert choose_dialect(Info(), parse_ready(b"READY 8 stop")) is Dialect.SOLO
    assert choose_dialect(one_batch_slot, parse_ready(b"READY 8 stop")) is Dialect.SOLO
    assert choose_dialect(Info(), parse_ready(b"READY 8 stop slots=1")) is Dialect.TAGGED


def test_batch_slots_are_refused_with_the_remedy() -> None:
    with pytest.raises(UnsupportedDialect, match="start strata without batch slots"):
        choose_dialect(Info().add(b"INFO batch_slots=2"), parse_ready(b"READY 8 stop"))


def test_a_decoder_that_cannot_be_stopped_is_refused() -> None:
    with pytest.raises(UnsupportedDialect, match="stop"):
        choose_dialect(Info(), parse_ready(b"READY 8 slots=2"))


# ---- commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (SamplingOptions(), b""),
        (SamplingOptions(temperature=0.5, top_p=0.9, min_p=0.1), b"temperature=0.5 top_p=0.9 min_p=0.1 "),
        (SamplingOptions(temperature=1e-05, seed=7), b"temperature=1e-05 seed=7 "),
        (SamplingOptions(penalty_repeat=1.1), b"penalty_repeat=1.1 penalty_last_n=64 "),
        (
            SamplingOptions(penalty_freq=0.5, penalty_present=-0.5, penalty_last_n=9),
            b"penalty_freq=0.5 penalty_present=-0.5 penalty_last_n=9 ",
        ),
        (SamplingOptions(penalty_last_n=9), b""),
        (SamplingOptions(logit_bias=((9, -1.5), (4, 2.0))), b"logit_bias=4:2.0,9:-1.5 "),
        (SamplingOptions(logprobs=0), b"logprobs=0 "),
        (SamplingOptions(logprobs=99), b"logprobs=5 "),
        (SamplingOptions(grammar="root ::= [ab]\n"), b"grammar=" + b64encode(b"root ::= [ab]\n") + b" "),
        (SamplingOptions(top_k=0), b"top_k=0 "),
        (SamplingOptions(top_k=200), b"top_k=200 "),
    ],
)
def test_only_keys_that_say_something_are_sent(options: SamplingOptions, words: bytes) -> None:
    assert Encoder(Dialect.TAGGED, EVERYTHING).generate_head(7, 16, options) == b"GEN 7 16 " + words


@pytest.mark.parametrize(("top_k", "sent"), [(0, 64), (1, 1), (64, 64), (65, 64), (5000, 64)])
def test_strata_is_sent_a_top_k_that_its_kernel_has(top_k: int, sent: int) -> None:
    head = Encoder(Dialect.SOLO, Info()).generate_head(7, 16, SamplingOptions(top_k=top_k))
    assert head == b"GEN 16 top_k=%d " % sent


def test_keys_that_the_decoder_has_not_announced_are_not_sent() -> None:
    options = SamplingOptions(logit_bias=((1, 1.0),), logprobs=3, grammar="root ::= 1")
    assert Encoder(Dialect.TAGGED, Info()).generate_head(7, 16, options, resume=4) == b"GEN 7 16 "
    assert (
        Encoder(Dialect.TAGGED, EVERYTHING).generate_head(7, 16, SamplingOptions(), resume=4) == b"GEN 7 16 resume=4 "
    )


def test_stop_and_embed_carry_the_request_id_only_when_tagged() -> None:
    assert Encoder(Dialect.TAGGED, EVERYTHING).stop(4294967295) == b"STOP 4294967295\n"
    assert Encoder(Dialect.TAGGED, EVERYTHING).embed_head(3) == b"EMB 3 "
    assert Encoder(Dialect.SOLO, Info()).stop(3) == b"STOP\n"


@pytest.mark.parametrize(
    ("options", "info", "missing"),
    [
        (SamplingOptions(), Info(), None),
        (SamplingOptions(grammar="x", logprobs=1), Info(), "grammar"),
        (SamplingOptions(logprobs=0), Info(), "logprobs"),
        (SamplingOptions(logprobs=6), EVERYTHING, "logprobs"),
        (SamplingOptions(logit_bias=((1, 1.0),)), Info(), "logit_bias"),
        (SamplingOptions(grammar="x", logprobs=5, logit_bias=((1, 1.0),)), EVERYTHING, None),
    ],
)
def test_what_a_request_needs_and_the_decoder_lacks_has_a_name(
    options: SamplingOptions, info: Info, missing: str | None
) -> None:
    assert unsupported(options, info) == missing


def test_embeddings_need_an_announcement() -> None:
    assert unsupported(SamplingOptions(), Info(), is_embedding=True) == "embeddings"
    assert unsupported(SamplingOptions(), EVERYTHING, is_embedding=True) is None


@given(st.lists(TOKEN_IDS, min_size=1))
def test_ids_are_encoded_alike_from_every_kind_of_sequence(ids: list[int]) -> None:
    expected = ",".join(map(str, ids)).encode()
    assert encode_ids(ids) == encode_ids(tuple(ids)) == expected
    assert encode_ids(array.array("i", ids)) == encode_ids(np.array(ids, np.int32)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ids", [[], [-1], [1.0], [1.5], ["1"], [None], [True], [[1]], [{}], [1, float("nan")], [object()], "12"]
)
def test_what_is_no_list_of_ids_is_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="id"):
        encode_ids(ids)


# ---- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (b"T 5 #7", (Kind.TOKEN, 7, 5, None, None)),
        (b"T 31999 #4294967295", (Kind.TOKEN, 4294967295, 31999, None, None)),
        (b"T 5 -0.25 #7", (Kind.TOKEN, 7, 5, -0.25, ())),
        (b"T 5 -0.25 5:-0.25,9:-1.5e0 #7", (Kind.TOKEN, 7, 5, -0.25, ((5, -0.25), (9, -1.5)))),
        (b"T 5 -inf #7", (Kind.TOKEN, 7, 5, LEAST_LOGPROB, ())),
        (b"T 5 0.0000001 #7", (Kind.TOKEN, 7, 5, 0.0, ())),
        (b"RESUME 12 #7", (Kind.RESUME, 7, 12, 0, None)),
        (b"PP 128 512 40.5 3160.1 #7", (Kind.PREFILL, 7, 128, 512, (40.5, 3160.1))),
        (b"PP 128 512 0 inf #7", (Kind.PREFILL, 7, 128, 512, (0.0, 0.0))),
        (b"PP 128 512 #7", (Kind.PREFILL, 7, 128, 512, (0.0, 0.0))),
        (b"REUSED 3 #7", (Kind.REUSED, 7, 3, 0, None)),
        (b"ERR busy #7", (Kind.ERROR, 7, False, 0, "busy")),
        (b"ERR no #1 in list #2 of 3 #7", (Kind.ERROR, 7, False, 0, "no #1 in list #2 of 3")),
        (b"ERR room #12b", (Kind.ERROR, NO_REQUEST, False, 0, "room #12b")),
        (b"ERR a#7", (Kind.ERROR, NO_REQUEST, False, 0, "a#7")),
        (b"ERR #7", (Kind.ERROR, 7, False, 0, "")),
        (b"ERR \xff #7", (Kind.ERROR, 7, False, 0, "\ufffd")),
        (b"ERR verify: timed out at layer 3 #7", (Kind.ERROR, 7, True, 0, "verify: timed out at layer 3")),
        (b"E AACAPwAAAEA= #7", (Kind.EMBEDDING, 7, 2, 0, struct.pack("<2f", 1, 2))),
        (b"STAT kv=5 cells=9 odd", (Kind.STAT, NO_REQUEST, 0, 0, {"kv": "5", "cells": "9", "odd": ""})),
        (b"INFO load=5", (Kind.INFO, NO_REQUEST, 0, 0, {"load": "5"})),
        (b"", (Kind.IGNORED, NO_REQUEST, 0, 0, None)),
        (b"TOKEN 5 #7", (Kind.IGNORED, NO_REQUEST, 0, 0, None)),
        (b"t 5 #7", (Kind.IGNORED, NO_REQUEST, 0, 0, None)),
    ],
)
def test_tagged_answers_are_read(line: bytes, answer: Answer) -> None:
    parser = AnswerParser(Dialect.TAGGED, 32_000)
    assert parser.parse(line) == answer
    assert parser.parse(line) == answer  # now from what it remembers


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (b"T 5", (Kind.TOKEN, 0, 5, None, None)),
        (b"RESUME 12", (Kind.RESUME, 0, 12, 0, None)),
        (b"PP 128 512 40 3160", (Kind.PREFILL, 0, 128, 512, (40.0, 3160.0))),
        (b"ERR full #7", (Kind.ERROR, 0, False, 0, "full #7")),
        (b"ERR verify batch: an earlier window never finished", (Kind.ERROR, 0, True, 0)),
    ],
)
def test_solo_answers_are_read(line: bytes, answer: Answer) -> None:
    parser = AnswerParser(Dialect.SOLO, 32_000)
    assert parser.parse(line)[: len(answer)] == answer
    assert parser.parse(line)[: len(answer)] == answer


@pytest.mark.parametrize(
    "line",
    [
        b"T", b"T ", b"T #7", b"T 5", b"T 32000 #7", b"T -1 #7", b"T +5 #7", b"T 5_0 #7", b"T  5 #7", b"T 5  #7",
        b"T 5 #7 ", b"T 5 #", b"T 5 # 7", b"T 5 #-7", b"T 5 #4294967296", b"T 5 #99999999999", b"T 5 nan #7",
        b"T 5 0.5 #7", b"T 5 -1 6 #7", b"T 5 -1 6:-1,,7:-2 #7", b"T 5 -1 6:-1:2 #7", b"T 5 -1 32000:-1 #7",
        b"T 5 -1 6:-1 8 #7", b"T \xd9\xa3 #7", b"T 5.0 #7", b"T 0x5 #7", b"T 5\t#7", b"T 12345678901 #7",
        b"T 5 -_1 #7", b"RESUME #7", b"RESUME x #7", b"RESUME 5000000000 #7", b"REUSED -1 #7", b"PP 5 #7",
        b"PP a b #7", b"PP 1 2 x #7", b"DONE #7", b"DONE 1 2 3 4 #7", b"DONE 1 2 3 4 eos #7", b"DONE 1 2 3 4 stop",
        b"DONE x 2 3 4 stop #7", b"DONE 1 2 3 4 stop x #7", b"E #7", b"E !!!! #7", b"E AAAA #7", b"E AACAPwAAAEA #7",
        b"ERR x #4294967296",
    ],
)  # fmt: skip
def test_an_answer_that_is_not_quite_one_is_a_violation(line: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        tagged(line)


@pytest.mark.parametrize("line", [b"T 5 #7", b"T 5 ", b"T 32000", b"DONE 1 2 3 4 stop #7", b"RESUME 5 #7"])
def test_a_solo_answer_has_no_tag(line: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        solo(line)


def test_done_without_its_later_fields_has_zeros_there() -> None:
    fields = DoneFields(12, 400, 10.5, 88.0, DoneFinish.STOP)
    assert solo(b"DONE 12 400 10.5 88 stop") == (Kind.DONE, 0, 12, 400, fields)
    assert tagged(b"DONE 12 400 10.5 88 stop 3 4 #7")[4] == DoneFields(12, 400, 10.5, 88.0, DoneFinish.STOP, 3, 4)


def test_done_takes_all_fields_and_ignores_what_follows_them() -> None:
    fields = DoneFields(1, 2, 3.0, 4.0, DoneFinish.NONFINITE, 6, 7, 8, 9, 10, 11, 12, 13.5, 14, 15)
    assert solo(b"DONE 1 2 3 4 nonfinite 6 7 8 9 10 11 12 13.5 14 15 16 later")[4] == fields


def test_an_unknown_vocabulary_still_bounds_ids_to_31_bits() -> None:
    assert solo(b"T 2147483647", vocabulary=0)[2] == 2**31 - 1
    with pytest.raises(ProtocolViolation):
        solo(b"T 2147483648", vocabulary=0)


def test_a_violation_tells_the_reason_and_the_start_of_the_line() -> None:
    with pytest.raises(ProtocolViolation) as caught:
        tagged(b"T " + b"9" * 5000 + b" #7")
    assert len(caught.value.excerpt) == 120
    assert "token id" in caught.value.reason


def test_a_parser_remembers_a_bounded_number_of_words() -> None:
    parser = AnswerParser(Dialect.TAGGED, 10)
    for rid in range(20_000):
        parser.parse(b"T %d #%d" % (rid % 10, rid))
        parser.parse(b"T %02d #%d" % (rid % 10, rid))
    assert len(parser._tokens) <= 10
    assert len(parser._rids) <= 4096


@given(TOKEN_IDS, RIDS)
def test_tokens_come_through_unchanged(token: int, rid: int) -> None:
    assert tagged(b"T %d #%d" % (token, rid), vocabulary=0) == (Kind.TOKEN, rid, token, None, None)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1), RIDS)
def test_embeddings_come_through_unchanged(values: list[float], rid: int) -> None:
    data = struct.pack(f"<{len(values)}f", *values)
    assert tagged(b"E %s #%d" % (b64encode(data), rid)) == (Kind.EMBEDDING, rid, len(values), 0, data)


@given(st.text(alphabet=st.characters(exclude_characters="\n\r", codec="utf-8")), RIDS)
def test_error_texts_come_through_unchanged(text: str, rid: int) -> None:
    assert tagged(b"ERR %s #%d" % (text.encode(), rid)) == (Kind.ERROR, rid, False, 0, text)


WORDS = st.sampled_from(
    [b"T", b"PP", b"DONE", b"RESUME", b"REUSED", b"ERR", b"E", b"STAT", b"INFO", b"#7", b"stop", b"1", b""]
)


@given(
    st.binary() | st.lists(WORDS | st.binary(max_size=4)).map(b" ".join),
    st.sampled_from([Dialect.SOLO, Dialect.TAGGED]),
)
def test_no_bytes_raise_anything_but_a_violation(line: bytes, dialect: Dialect) -> None:
    parser = AnswerParser(dialect, 100)
    try:
        kind, rid, *_ = parser.parse(line)
    except ProtocolViolation:
        return
    assert kind in Kind
    assert rid == NO_REQUEST or 0 <= rid < 2**32


@given(st.binary() | st.lists(st.sampled_from([b"READY", b"5", b"stop", b"slots=2"])).map(b" ".join))
def test_no_start_line_raises_anything_but_a_violation(line: bytes) -> None:
    for read in (parse_ready, Info().add):
        try:
            read(line)
        except ProtocolViolation:
            pass


# ---- lines -------------------------------------------------------------------------------------------------------


def fed(pieces: list[bytes], limit_bytes: int) -> tuple[list[bytes], int]:
    reader = LineReader(limit_bytes)
    lines = [line for piece in pieces for line in reader.feed(piece)]
    return lines, reader.too_long


@given(st.lists(st.sampled_from([b"\n", b"\r", b"ab", b"x" * 9, b"y" * 30])).map(b"".join), st.data())
def test_the_borders_of_reads_do_not_change_the_lines(stream: bytes, data: st.DataObject) -> None:
    borders = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    pieces = [stream[a:b] for a, b in zip([0, *borders], [*borders, len(stream)], strict=True)]
    lines, too_long = fed(pieces, 20)
    raw = stream.split(b"\n")
    assert lines == [line.removesuffix(b"\r") for line in raw[:-1] if len(line) <= 20]
    assert too_long == sum(len(line) > 20 for line in raw)


def test_a_line_without_end_is_held_only_up_to_the_limit() -> None:
    reader = LineReader(limit_bytes=1000)
    for _ in range(100):
        assert reader.feed(b"z" * 99) == []
        assert reader.pending_bytes <= 1000
    assert reader.feed(b"\nT 5\nT") == [b"T 5"]
    assert reader.too_long == 1
    assert reader.feed(b" 6\r\n") == [b"T 6"]
