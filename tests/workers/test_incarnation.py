"""Spawning a worker process with too few descriptors, at every step of it: all or nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shm.layout import Layout
from shm.slots import SlotResult
from tests.fakes.stage import Stage, until
from tests.workers.running import descriptors, pool_settings
from workers import session
from workers.incarnation import Incarnation, Lease
from workers.watchdog import _look


class NobodyHears:
    """An owner that is told nothing."""

    def on_end(self, lease: Lease, result: SlotResult | None) -> None:
        raise AssertionError

    def on_board(self) -> None:
        raise AssertionError

    def on_exit(self) -> None:
        raise AssertionError

    def on_fault(self, reason: str) -> None:
        raise AssertionError

    def on_stderr(self, line: str) -> None:
        raise AssertionError


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


async def test_a_spawn_that_runs_out_of_descriptors_anywhere_leaves_nothing(stage: Stage) -> None:
    settings = pool_settings(stage).workers[0]
    layout = Layout(slots=1, context=64)
    before, fds = children(), set(os.listdir("/proc/self/fd"))
    failures = 0
    while True:
        try:
            with descriptors(failures):
                incarnation = Incarnation.spawn(NobodyHears(), settings, layout, epoch=failures + 1)
            break
        except OSError:
            failures += 1
        assert children() == before
        assert set(os.listdir("/proc/self/fd")) == fds
    assert failures > 8, "every step was the one that failed once"
    session.kill(incarnation.pid)
    assert incarnation.reap() == -signal.SIGKILL
    incarnation.close()
    assert set(os.listdir("/proc/self/fd")) == fds


def test_a_session_that_can_not_be_looked_at_is_not_taken_for_empty() -> None:
    leader = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    try:
        with descriptors(0), pytest.raises(OSError, match="Too many open files"):
            session.members(leader.pid)
        with descriptors(0):
            assert _look(leader.pid) == ("", 0), "the watchdog's look goes on too"
    finally:
        session.kill(leader.pid)
        leader.wait()
    until(lambda: not session.members(leader.pid), what="its end")
