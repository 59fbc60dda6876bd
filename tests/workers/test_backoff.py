"""Delays between starts, by the clock that the caller brings."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.backoff import Backoff


class NoJitter(random.Random):
    def random(self) -> float:
        return 0.0


def make(**changes: float) -> Backoff:
    values = {"first_s": 0.5, "cap_s": 60.0, "stable_after_s": 60.0, **changes}
    return Backoff(**values, deaths_limit=5, jitter=NoJitter())  # type: ignore[arg-type]


def test_the_delay_doubles_up_to_the_cap() -> None:
    backoff = make(cap_s=10.0)
    assert [backoff.died(now) for now in range(8)] == [0.5, 1, 2, 4, 8, 10, 10, 10]


def test_a_thousand_deaths_do_not_overflow() -> None:
    backoff = make()
    assert [backoff.died(float(now)) for now in range(1000)][-1] == 60.0


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_jitter_takes_at_most_a_quarter(seed: int, deaths: int) -> None:
    plain, jittered = make(), make()
    jittered.jitter = random.Random(seed)
    for now in range(deaths):
        full, delay = plain.died(now), jittered.died(now)
        assert 0.75 * full <= delay <= full


def test_brief_successes_do_not_end_the_row() -> None:
    backoff = make()
    delays = []
    for life in range(5):
        backoff.ready(100.0 * life)
        delays.append(backoff.died(100.0 * life + 59.0))
    assert delays == [0.5, 1, 2, 4, 8]
    assert backoff.is_exhausted


def test_a_long_life_begins_the_row_anew() -> None:
    backoff = make()
    for now in range(4):
        backoff.died(now)
    backoff.ready(10.0)
    assert backoff.died(70.0) == 0.5
    assert backoff.deaths == 1


def test_time_before_the_first_ready_is_no_life() -> None:
    backoff = make()
    backoff.died(0.0)
    assert backoff.died(10_000.0) == 1.0


@pytest.mark.parametrize(("deaths", "is_exhausted"), [(0, False), (4, False), (5, True), (50, True)])
def test_it_counts_as_failed_after_the_limit(deaths: int, is_exhausted: bool) -> None:
    backoff = make()
    for now in range(deaths):
        backoff.died(now)
    assert backoff.is_exhausted is is_exhausted


def test_it_settles_once_the_present_life_is_long_enough() -> None:
    backoff = make()
    for now in range(6):
        backoff.died(now)
    assert not backoff.settle(1000.0), "it is not even up"
    backoff.ready(1000.0)
    assert not backoff.settle(1059.0)
    assert backoff.settle(1060.0)
    assert not backoff.is_exhausted
    assert not backoff.settle(1061.0), "nothing is left to forget"


def test_forgiving_ends_the_row() -> None:
    backoff = make()
    for now in range(9):
        backoff.died(now)
    backoff.forgive()
    assert not backoff.is_exhausted
    assert backoff.died(10.0) == 0.5
