"""C as a thread prototype: one thread per decoder alone touches its pipe, and each request has a bounded channel.

    caller --Request--> inbox --> owner thread --GEN--> decoder
    caller <--channel (bounded)-- owner thread <--T, DONE-- decoder

A caller that leaves sets its cancel flag; the owner sees it at the next line, stops the turn and reads up to its
DONE. Timed by bench.transport; the contracts do not run over it.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Sequence

from bench.schemes.messages import DecoderBroken, Pipes, Request, Statistics, TurnFailed

CHANNEL_TOKENS = 64
FULL_RETRY_S = 0.05


class ChannelTurn:
    """A request and the channel in which its owner thread answers."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._channel: queue.Queue[int | Statistics | TurnFailed] = queue.Queue(CHANNEL_TOKENS)
        self._statistics: Statistics | None = None
        self._is_over = False

    def tokens(self) -> ChannelTurn:
        return self

    def statistics(self) -> Statistics | None:
        return self._statistics

    def __iter__(self) -> ChannelTurn:
        return self

    def __next__(self) -> int:
        if self._is_over:
            raise StopIteration
        answer = self._channel.get()
        if isinstance(answer, int):
            return answer
        self._is_over = True
        if isinstance(answer, TurnFailed):
            raise answer
        self._statistics = answer
        raise StopIteration

    def close(self) -> None:
        """Leave the turn: what still comes is read and dropped up to its end."""
        self.request.cancelled.set()
        while not self._is_over:
            try:
                next(self)
            except (StopIteration, TurnFailed):
                return

    def push(self, answer: int | Statistics | TurnFailed) -> None:
        """By the owner thread: wait for room, or drop tokens once the caller has left."""
        while True:
            try:
                self._channel.put(answer, timeout=FULL_RETRY_S)
                return
            except queue.Full:
                if self.request.cancelled.is_set() and isinstance(answer, int):
                    return


class Owner:
    """The one thread that touches a decoder's pipes."""

    def __init__(self, pipes: Pipes) -> None:
        self.inbox: queue.Queue[ChannelTurn | None] = queue.Queue()
        self._pipes = pipes
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="owner", daemon=True)
        self._thread.start()
        if not self._is_ready.wait(30.0):
            raise DecoderBroken("the decoder did not get ready")

    def close(self) -> None:
        self.inbox.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        with self._pipes.stdin, self._pipes.stdout as stdout:
            for line in stdout:
                if line.startswith(b"READY"):
                    break
            self._is_ready.set()
            while (turn := self.inbox.get()) is not None:
                if turn.request.cancelled.is_set():
                    turn.push(TurnFailed("cancelled while queued"))
                    continue
                self._serve(turn)

    def _serve(self, turn: ChannelTurn) -> None:
        self._send(turn.request.gen_line())
        is_stopped = False
        for line in self._pipes.stdout:
            if line.startswith(b"T "):
                turn.push(int(line[2:]))
            elif line.startswith(b"DONE"):
                turn.push(Statistics.parse(line))
                return
            elif line.startswith(b"ERR"):
                turn.push(TurnFailed(line[4:].decode().rstrip()))
                return
            if turn.request.cancelled.is_set() and not is_stopped:
                is_stopped = True
                self._send(b"STOP\n")
        turn.push(DecoderBroken("the decoder's stdout has ended"))

    def _send(self, line: bytes) -> None:
        self._pipes.stdin.write(line)
        self._pipes.stdin.flush()


class ThreadsC:
    def __init__(self, pipes: Sequence[Pipes]) -> None:
        self._owners = [Owner(pair) for pair in pipes]
        self._rotation = itertools.cycle(self._owners)
        self._choosing = threading.Lock()

    def turn(self, request: Request) -> ChannelTurn:
        turn = ChannelTurn(request)
        with self._choosing:
            owner = next(self._rotation)
        owner.inbox.put(turn)
        return turn

    def close(self) -> None:
        for owner in self._owners:
            owner.close()
