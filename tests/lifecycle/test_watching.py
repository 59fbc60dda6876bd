"""What is seen of processes: zombies are dead, and strangers are let alone (B35). Errors of psutil: tests/workers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL

import pytest

from shm.board import Board
from shm.layout import Layout
from shm.segment import Segment
from tests.fakes.stage import until
from workers import session
from workers.watchdog import observe


@pytest.fixture
def canary() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def board() -> Iterator[Board]:
    segment = Segment.create(Layout(slots=1, context=64), epoch=1)
    yield Board(segment)
    segment.close()


def test_a_zombie_is_no_member_of_its_session_and_counts_no_memory(board: Board) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    try:
        assert session.members(process.pid) == [process.pid]
        process.send_signal(SIGKILL)  # and nobody reaps it
        until(lambda: session.members(process.pid) == [])
        assert Path(f"/proc/{process.pid}/stat").exists()
        seen = observe(process.pid, 0, board.snapshot(), owed=0, prompt_tokens=0, oldest_s=0.0, now_ns=0)
        assert seen.memory_bytes == 0
    finally:
        process.wait()


def test_a_session_that_is_gone_has_no_members_whoever_lives_now(canary: subprocess.Popen[bytes]) -> None:
    """The canary's number stands for a recycled one: it leads no session, so nothing is signalled for it."""
    assert session.members(canary.pid) == []
    assert session.kill(canary.pid) == []
    assert canary.poll() is None
