"""What bench.http, bench.prefix and bench.interference make of their measurements. No times are asserted."""

from __future__ import annotations

import numpy as np
import pytest

from bench.http import LOADS, Report, Round, Target, calls_of, compare, stream_counts, targets_of
from bench.http_client import Answer, Trace
from bench.interference import split_gaps
from bench.models import Words
from bench.prefix import InfiniteCache


def answer(sent_ms: float, *text_ms: float, tokens: int | None = None) -> Answer:
    return Answer(0, sent_ms, text_ms[-1], np.array(text_ms), len(text_ms), tokens or len(text_ms), 3, 0)


def rounds(*seconds: float, first_ms: float = 1.0) -> list[Round]:
    """100 tokens each."""
    return [
        Round(Trace([answer(0.0, first_ms, 9.0, tokens=100)], each, 0.1, 1, 0), {"server": 0.01}) for each in seconds
    ]


def test_the_ratio_of_rates_is_the_median_of_the_rounds_ratios() -> None:
    report = Report("tiny", LOADS["tiny"], 3)
    mine, others = rounds(1.0, 1.0, 50.0, first_ms=1.0), rounds(2.0, 2.0, 2.0, first_ms=2.0)
    compare(report, 8, {"ringfence": mine, "llama-server": others})
    assert report.rate_ratios == {8: {"llama-server": 2.0}}
    assert report.first_ratios == {8: {"llama-server": 0.5}}
    assert report.figures[8]["ringfence"].cpu_us == {"server": 100.0}
    assert targets_of(report) == [
        Target("tokens/s to llama-server", 8, 1.5, True, 2.0),
        Target("TTFT p50 to llama-server", 8, 0.7, False, 0.5),
    ]
    assert all(target.is_met for target in targets_of(report))


def test_a_target_without_a_measurement_is_missed() -> None:
    report = Report("demo", LOADS["demo"], 1)
    compare(report, 4, {"ringfence": rounds(1.0)})
    assert [target.ratio for target in targets_of(report)] == [None, None]
    assert not any(target.is_met for target in targets_of(report))
    report.batched = {4: 100.0}
    assert [target.ratio for target in targets_of(report)] == [None, 1.0]


def test_tokens_that_came_together_had_no_gap() -> None:
    assert answer(0.0, 1.0, 3.0, 8.0, tokens=6).gaps_ms.tolist() == [2.0, 5.0, 0.0, 0.0, 0.0]
    assert answer(0.5, 2.0).first_ms == 1.5


def test_each_request_has_a_prompt_of_its_own() -> None:
    calls = calls_of(LOADS["tiny"], 8, Words(1))
    assert len(calls) == 8 * LOADS["tiny"].requests_for(8)
    assert len({call.body["prompt"] for call in calls}) == len(calls)
    assert {call.connection for call in calls} == set(range(8))


def test_stream_counts_are_numbers_in_range() -> None:
    assert stream_counts("1,8,32") == (1, 8, 32)
    for text in ("0", "1,500"):
        with pytest.raises(Exception, match="256"):
            stream_counts(text)


def test_gaps_are_split_by_the_windows_that_they_touch() -> None:
    streams = [answer(0, 1, 2, 3, 4, 5, 6), answer(0, 1.5, 3.5, 5.5, 9.5)]
    normal, beside = split_gaps(streams, [(2.5, 3.2)])
    assert normal.tolist() == [1.0, 1.0, 1.0, 2.0]  # only while both run
    assert beside.tolist() == [1.0, 1.0, 2.0]


def test_the_infinite_cache_knows_the_longest_prefix_of_all_sequences() -> None:
    cache = InfiniteCache()
    cache.hold([1, 2, 3, 4])
    cache.hold([1, 2, 9])
    assert cache.known([1, 2, 3, 7]) == 3
    assert cache.known([1, 2, 9]) == 2  # the last token is always read
    assert cache.known([5, 6]) == 0
