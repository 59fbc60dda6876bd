"""The bench of chaos can fail: what is lost, doubled or foreign in an answer is found and named."""

from __future__ import annotations

import pytest

from bench.chaos.answers import Answer
from bench.chaos.comparison import Difference, compare
from bench.chaos.recorded import ModelCall
from bench.chaos.scripted import BASE, SPAN, EchoCall, letters
from bench.chaos.verdict import Tally, Verdict
from tests.fakes.echo import echo_prompt, expected

DUE = [letters(token) for token in expected(echo_prompt(7, 40), 50, base=BASE, span=SPAN)]
USAGE = {"prompt_tokens": 40, "completion_tokens": 50}


@pytest.mark.parametrize(
    ("came", "difference"),
    [
        (DUE, Difference()),
        ([*DUE[:20], *DUE[21:]], Difference(lost=1)),
        (DUE[:-3], Difference(lost=3)),
        (DUE[3:], Difference(lost=3)),
        ([*DUE[:20], *DUE[17:]], Difference(duplicated=3)),
        ([*DUE, DUE[-1]], Difference(duplicated=1)),
        ([*DUE[:20], "zz", *DUE[21:]], Difference(foreign=1)),
        ([*DUE, "zz"], Difference(foreign=1)),
        ([], Difference(lost=50)),
    ],
)
def test_tokens_that_went_wrong_are_counted(came: list[str], difference: Difference) -> None:
    assert compare(came, DUE) == difference


def call() -> EchoCall:
    return EchoCall(echo_prompt(7, 40), 50)


def answer(**values: object) -> Answer:
    fields = {"id": "cmpl-1", "text": "".join(DUE), "finish": "length", "usage": USAGE, **values}
    return Answer(**fields)  # type: ignore[arg-type]


def test_the_right_answer_has_no_fault() -> None:
    assert call().judge(answer()) == Verdict(50)


@pytest.mark.parametrize(
    "values",
    [
        {"finish": "stop"},
        {"usage": {**USAGE, "completion_tokens": 51}},
        {"fault": "the stream has no end"},
        {"text": "".join(DUE[:-1])},
    ],
)
def test_each_kind_of_bad_answer_makes_the_run_bad(values: dict[str, object]) -> None:
    bad = answer(**values)
    tally = Tally()
    tally.add("bad", bad, call().judge(bad))
    assert not tally.is_lossless
    assert len(tally.faults) == 1


def test_an_id_used_twice_is_a_fault() -> None:
    tally = Tally()
    for _ in range(2):
        tally.add("echo", answer(), Verdict(50))
    assert tally.failed == 1


@pytest.mark.parametrize(("gap", "ties"), [(0.0009, 1), (0.0011, 0)])
def test_a_first_difference_is_a_tie_only_between_equal_logits(gap: float, ties: int) -> None:
    recorded = Answer(text="ab", finish="length", usage=USAGE, tokens=[(b"a", -1.0), (b"b", -2.0)])
    recorded.tops = [{b"a": -1.0, b"x": -1.0 - gap}, {b"b": -2.0}]
    judged = ModelCall("q", {}, is_streamed=False, recorded=recorded).judge(
        Answer(text="xy", finish="length", usage=USAGE, tokens=[(b"x", -1.001), (b"y", -3.0)])
    )
    assert judged.ties == ties
    assert bool(judged.difference) is not bool(ties)
