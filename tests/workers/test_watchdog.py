"""Verdicts of the watchdog, from what one look shows."""

import os
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest

from shm.board import BoardSnapshot, Word, WorkerState
from tests.fakes.stage import until
from workers.watchdog import HEARTBEAT_LIMIT_S, MARGIN_S, Lag, Limits, Observation, Watchdog, observe

LIMITS = Limits(hang_limit_s=20.0, prefill_rate=50.0, memory_limit_bytes=1000)
FINE = {
    "is_stopped": False,
    "memory_bytes": 10,
    "owed": 1,
    "prompt_tokens": 100,
    "heartbeat_age_s": 0.5,
    "progress_age_s": 0.5,
}


def look(**changes: Any) -> Observation:
    return Observation(**{**FINE, **changes})


def judged(*looks: Observation, limits: Limits = LIMITS) -> list[str]:
    dog = Watchdog(limits)
    verdicts = [dog.judge(seen) for seen in looks]
    return ["" if verdict is None else verdict.reason for verdict in verdicts]


def test_a_busy_worker_that_moves_is_left_alone() -> None:
    assert judged(look(), look(), look()) == ["", "", ""]


@pytest.mark.parametrize("age", ["heartbeat_age_s", "progress_age_s"])
def test_an_idle_worker_is_never_hung(age: str) -> None:
    assert judged(look(owed=0, **{age: 1e6})) == [""]


def test_a_stopped_worker_is_judged_at_the_second_look_also_when_idle() -> None:
    first, second = judged(look(is_stopped=True, owed=0), look(is_stopped=True, owed=0))
    assert first == ""
    assert "SIGSTOP" in second


def test_a_worker_that_goes_on_after_a_stop_is_left_alone() -> None:
    stopped, running = look(is_stopped=True), look()
    assert judged(stopped, running, stopped, running) == ["", "", "", ""]


def test_a_verdict_says_whether_it_was_a_stop_or_a_hang() -> None:
    dog = Watchdog(LIMITS)
    dog.judge(look(is_stopped=True))
    stopped = dog.judge(look(is_stopped=True))
    hung = Watchdog(LIMITS).judge(look(heartbeat_age_s=100.0))
    fat = Watchdog(LIMITS).judge(look(memory_bytes=2000))
    assert stopped and hung and fat
    assert [(v.is_stopped, v.is_hang) for v in (stopped, hung, fat)] == [(True, False), (False, True), (False, False)]


@pytest.mark.parametrize("owed", [0, 1])
def test_too_much_memory_ends_it_busy_or_idle(owed: int) -> None:
    assert "memory" in judged(look(memory_bytes=1001, owed=owed))[0]
    assert judged(look(memory_bytes=1000, owed=owed)) == [""]


def test_without_a_memory_limit_nobody_uses_too_much() -> None:
    assert judged(look(memory_bytes=1 << 50), limits=Limits(hang_limit_s=20.0, prefill_rate=50.0)) == [""]


@pytest.mark.parametrize(
    ("hang_limit_s", "age_s", "is_hung"),
    [
        (20.0, HEARTBEAT_LIMIT_S, False),
        (20.0, HEARTBEAT_LIMIT_S + 0.1, True),
        (1.0, 1.0 + MARGIN_S, False),
        (1.0, 1.0 + MARGIN_S + 0.1, True),
    ],
)
def test_a_loop_that_does_not_turn_is_hung(hang_limit_s: float, age_s: float, is_hung: bool) -> None:
    limits = Limits(hang_limit_s=hang_limit_s, prefill_rate=50.0)
    assert bool(judged(look(heartbeat_age_s=age_s), limits=limits)[0]) is is_hung


@pytest.mark.parametrize(
    ("prompt_tokens", "age_s", "is_hung"),
    [
        (0, 3 * 20 + MARGIN_S, False),
        (0, 3 * 20 + MARGIN_S + 0.1, True),
        (5000, 3 * (20 + 100) + MARGIN_S, False),
        (5000, 3 * (20 + 100) + MARGIN_S + 0.1, True),
        (1_000_000, 3 * (20 + 32768 / 50) + MARGIN_S + 0.1, True),
    ],
)
def test_no_progress_is_borne_longer_for_longer_prompts(prompt_tokens: int, age_s: float, is_hung: bool) -> None:
    assert bool(judged(look(prompt_tokens=prompt_tokens, progress_age_s=age_s))[0]) is is_hung


def test_a_round_that_comes_late_is_told_and_the_next_one_is_not() -> None:
    lag = Lag(0.5)
    assert [lag.is_late(now) for now in (100.0, 100.5, 101.2, 111.2, 111.7)] == [False, False, False, True, False]


def board(**changes: int) -> BoardSnapshot:
    fields = {word.name.lower(): 0 for word in Word if word is not Word.STATE}
    return BoardSnapshot(state=WorkerState.READY, **{**fields, **changes})


def observed(pid: int, *, oldest_s: float = 100.0, now_ns: int = 60_000_000_000, **words: int) -> Observation:
    return observe(pid, 0, board(**words), owed=1, prompt_tokens=5, oldest_s=oldest_s, now_ns=now_ns)


def test_progress_is_as_old_as_the_oldest_lease_when_that_is_younger() -> None:
    seen = observed(os.getpid(), oldest_s=3.0, progress_ns=10_000_000_000, heartbeat_ns=59_000_000_000)
    assert (seen.heartbeat_age_s, seen.progress_age_s) == (1.0, 3.0)


def test_a_clock_read_before_the_boards_gives_no_negative_age() -> None:
    assert observed(os.getpid(), heartbeat_ns=61_000_000_000).heartbeat_age_s == 0.0


def test_a_stopped_process_is_seen_and_so_is_its_memory() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert observed(child.pid).memory_bytes > 0
        assert not observed(child.pid).is_stopped
        child.send_signal(signal.SIGSTOP)
        until(lambda: observed(child.pid).is_stopped, what="the stop seen")
    finally:
        child.kill()
        child.communicate()
    assert observed(child.pid).memory_bytes == 0


@pytest.mark.parametrize("error", [psutil.NoSuchProcess(1), psutil.ZombieProcess(1), psutil.AccessDenied(1)])
@pytest.mark.parametrize("call", ["status", "memory_info"])
def test_whatever_psutil_raises_a_look_goes_on(monkeypatch: pytest.MonkeyPatch, call: str, error: Exception) -> None:
    def refuse(_process: object) -> None:
        raise error

    monkeypatch.setattr(psutil._pslinux.Process, call, refuse)
    seen = observed(os.getpid())
    assert not seen.is_stopped
