"""One request on its way through the pool, as its caller sees it: one stream of tokens and one result.

A turn grows a list of token ids; nothing is allocated per token beyond the list's own entry. A consumer remembers how many
it has taken and waits for more, so one that is slower than the decoder gets several at once, and one that never comes
costs at most max_new entries. The turn may move to another decoder when its own dies; the list just goes on.

    turn = pool.submit(request, reservation)
    try:
        seen = 0
        while (count := await turn.wait(seen)) > seen:
            use(turn.ids[seen:count]); seen = count
        turn.raise_for_error(); turn.result
    finally:
        turn.cancel()          # harmless once it has ended

One writer: only the pool, in its event loop, calls the methods below the line.
"""

import asyncio
import time
from collections.abc import Callable
from enum import StrEnum

from workers.errors import RingfenceError
from workers.request import GenerationRequest, TurnResult


class TurnState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class Turn:
    """A request's life. `ids`, `logprobs` and `alternatives` are parallel; the latter two stay empty unless asked for."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.state = TurnState.QUEUED
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.alternatives: list[list[tuple[int, float]]] = []
        self.result: TurnResult | None = None
        self.error: RingfenceError | None = None
        self.embedding: bytes = b""
        self.worker: int | None = None  # the worker that runs it, or ran it last
        self.moves = 0
        self.submitted_s = time.monotonic()
        self.started_s: float | None = None  # first given to a worker
        self.first_token_s: float | None = None
        self.ended_s: float | None = None
        self.prefilled = 0  # prompt tokens in the decoder's cache so far
        self.is_cancelled = False
        self._waiter: asyncio.Future[None] | None = None
        self._canceller: Callable[[Turn], None] | None = None

    def __repr__(self) -> str:
        return (
            f"Turn(id={self.request.id!r}, state={self.state}, worker={self.worker}, tokens={len(self.ids)}, "
            f"moves={self.moves}, error={self.error!r})"
        )

    @property
    def has_ended(self) -> bool:
        return self.state is TurnState.ENDED

    @property
    def queue_ms(self) -> float:
        """Time spent waiting for a worker until now, or until it started."""
        until = self.started_s if self.started_s is not None else self.ended_s or time.monotonic()
        return (until - self.submitted_s) * 1000

    async def wait(self, seen: int) -> int:
        """Wait for more than `seen` tokens, and return how many there are; `seen` itself when the turn has ended.

        One waiter at a time.
        """
        while len(self.ids) <= seen and self.state is not TurnState.ENDED:
            await self._woken()
        return len(self.ids)

    async def wait_ended(self) -> None:
        """Wait for the end, whatever comes before it."""
        while self.state is not TurnState.ENDED:
            await self._woken()

    def raise_for_error(self) -> None:
        """Raise what the turn ended with, if it did not end well."""
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """The caller wants no more. Queued: it leaves the queue at once. Running: its decoder is told to stop."""
        if self.is_cancelled or self.state is TurnState.ENDED:
            return
        self.is_cancelled = True
        if self._canceller is not None:
            self._canceller(self)

    async def _woken(self) -> None:
        if self._waiter is not None:
            raise RuntimeError(f"{self!r} already has a waiter; a turn is consumed by one task.")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # ---- the pool's side -------------------------------------------------------------------------------------------

    def on_cancel(self, canceller: "Callable[[Turn], None]") -> None:
        self._canceller = canceller

    def start(self, worker: int, now_s: float) -> None:
        self.state = TurnState.RUNNING
        self.worker = worker
        if self.started_s is None:
            self.started_s = now_s
        self.wake()

    def requeue(self) -> None:
        """The turn lost its decoder, and will go on elsewhere."""
        self.state = TurnState.QUEUED
        self.moves += 1

    def end(self, *, result: TurnResult | None = None, error: RingfenceError | None = None) -> None:
        if self.state is TurnState.ENDED:
            return
        self.state = TurnState.ENDED
        self.result = result
        self.error = error
        self.ended_s = time.monotonic()
        self._canceller = None
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
