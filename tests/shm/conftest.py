"""A segment and the other process that shares it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shm.layout import Layout
from shm.segment import Segment

PEER = Path(__file__).with_name("peer.py")
EPOCH = 11


class Peer:
    """A process started with the segment's descriptor (tests/shm/peer.py)."""

    def __init__(self, segment: Segment, role: str) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-E", str(PEER), role, str(segment.fd), str(segment.epoch)],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            pass_fds=[segment.fd],
            bufsize=0,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def poke(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b".")

    def end(self) -> str:
        """Let it end, and return what it wrote to stderr."""
        assert self.process.stdin is not None and self.process.stderr is not None
        self.process.stdin.close()
        text = self.process.stderr.read().decode()
        self.process.wait(10)
        return text

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture
def segment() -> Iterator[Segment]:
    """A segment of two slots and the smallest ring."""
    made = Segment.create(Layout(slots=2, context=64, ring_records=64, options_bytes=1024), epoch=EPOCH)
    yield made
    made.close()


@pytest.fixture
def start_peer(segment: Segment) -> Iterator[Callable[[str], Peer]]:
    with ExitStack() as stack:

        def start(role: str) -> Peer:
            peer = Peer(segment, role)
            stack.callback(peer.close)
            return peer

        yield start


@pytest.fixture
def open_fds() -> Callable[[], int]:
    return lambda: len(os.listdir("/proc/self/fd"))
