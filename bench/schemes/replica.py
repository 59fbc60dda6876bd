"""One decoder of a scheme: its pipes, a reader thread that queues its lines, a lock for turns, and what it said last.

Whoever holds `lock` may call begin, read, drain and stream. That is all the lock protects: nothing here stops a
caller from letting go of it while lines of its turn are still to come. That is each scheme's business, and the
subject of the contracts.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Generator, Sequence

from bench.schemes.messages import BROKEN_ENGINE, DecoderBroken, Pipes, Request, Statistics, TurnFailed

READY_LIMIT_S = 30.0
STOP_GRACE_S = 2.0
STOP_TRIES = 5


class Replica:
    """A decoder process as threads see it."""

    def __init__(self, pipes: Pipes) -> None:
        self.lock = threading.Lock()
        self.last_statistics: Statistics | None = None
        self.held: list[int] = []  # the prompt that the router believes to be in this decoder's cache
        self.is_broken = False
        self._pipes = pipes
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._is_closed = False
        self._reader = threading.Thread(target=self._read_lines, name="reader", daemon=True)
        self._reader.start()
        while not self._receive(READY_LIMIT_S).startswith(b"READY"):
            pass

    def begin(self, request: Request) -> None:
        """Write this turn's GEN."""
        if self.is_broken:
            raise DecoderBroken("the decoder failed in an earlier turn")
        self.last_statistics = None
        self._send(request.gen_line())

    def read(self, request: Request) -> int | Statistics:
        """The next token of the turn, or its statistics when it is over; raises TurnFailed on ERR."""
        while True:
            line = self._receive()
            if line.startswith(b"T "):
                return int(line[2:])
            if line.startswith((b"DONE", b"ERR")):
                return self._settle(line, request)

    def drain(self, request: Request) -> Statistics:
        """Stop the running turn and read up to its own end; raises TurnFailed if that end is an error."""
        self._send(b"STOP\n")
        for _ in range(STOP_TRIES):
            try:
                while True:
                    line = self._receive(STOP_GRACE_S)
                    if line.startswith((b"DONE", b"ERR")):
                        return self._settle(line, request)
            except queue.Empty:
                self._send(b"STOP\n")  # it may have been read before the GEN was picked up
        self.is_broken = True
        raise DecoderBroken("the decoder does not end a stopped turn")

    def stream(self, request: Request) -> Generator[int, None, None]:
        """The turn as a child iterator. Closing it early drains the turn; dropping it does so when it is collected."""
        self.begin(request)
        is_over = False
        try:
            while True:
                answer = self._read_or_end(request)
                if isinstance(answer, int):
                    yield answer
                    continue
                is_over = True
                if isinstance(answer, TurnFailed):
                    raise answer
                return
        finally:
            if not is_over and not self._is_closed:
                self.drain(request)

    def close(self) -> None:
        """End the decoder by closing its stdin, and the reader by the end of file that follows."""
        self._is_closed = True
        try:
            self._pipes.stdin.close()
        except OSError:
            pass
        self._reader.join(5.0)

    def _read_or_end(self, request: Request) -> int | Statistics | TurnFailed:
        try:
            return self.read(request)
        except TurnFailed as error:
            return error

    def _settle(self, line: bytes, request: Request) -> Statistics:
        if line.startswith(b"ERR"):
            if line.startswith(BROKEN_ENGINE):
                self.is_broken = True
                raise DecoderBroken(line[4:].decode())
            raise TurnFailed(line[4:].decode())
        statistics = Statistics.parse(line)
        self.last_statistics = statistics
        self.held = [] if statistics.finish == "nonfinite" else request.prompt
        return statistics

    def _send(self, line: bytes) -> None:
        try:
            self._pipes.stdin.write(line)
            self._pipes.stdin.flush()
        except (OSError, ValueError) as error:
            self.is_broken = True
            raise DecoderBroken("the decoder's stdin is closed") from error

    def _receive(self, timeout_s: float | None = None) -> bytes:
        line = self._lines.get(timeout=timeout_s)
        if line is None:
            self._lines.put(None)
            self.is_broken = True
            raise DecoderBroken("the decoder's stdout has ended")
        return line

    def _read_lines(self) -> None:
        try:
            with self._pipes.stdout as stdout:
                for line in stdout:
                    self._lines.put(line.rstrip(b"\r\n"))
        except OSError:
            pass
        self._lines.put(None)


class Replicas:
    """Chooses a replica: a free one that holds the start of the prompt, else a free one in turn, else any in turn."""

    def __init__(self, pipes: Sequence[Pipes]) -> None:
        self._all = [Replica(pair) for pair in pipes]
        self._rotation = itertools.count()

    def choose(self, prompt: list[int]) -> Replica:
        usable = [replica for replica in self._all if not replica.is_broken]
        if not usable:
            raise DecoderBroken("every decoder has failed")
        free = [replica for replica in usable if not replica.lock.locked()] or usable
        turn = next(self._rotation) % len(free)
        rotated = free[turn:] + free[:turn]
        return max(rotated, key=lambda replica: self._held_tokens(replica, prompt))

    def close(self) -> None:
        for replica in self._all:
            replica.close()

    @staticmethod
    def _held_tokens(replica: Replica, prompt: list[int]) -> int:
        held = replica.held
        if not held or held[0] != prompt[0]:
            return 0
        return len(held) if prompt[: len(held)] == held else 0
