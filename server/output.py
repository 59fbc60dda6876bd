"""The text of one turn as it comes, and its figures once it is over. Streamed and whole answers both read this, so
they can't differ.

    while not output.is_over:
        text = await output.next()      # may be empty
    await output.settle()
    output.finish_reason, output.completion_tokens, output.timings()
"""

import asyncio
import time

from server.detokenizer import Detokenizer
from server.schemas import Timings
from workers.request import FinishReason, TurnResult
from workers.turn import Turn

SETTLE_S = 0.25  # a stop string was found: the decoder's own figures are waited for this long


class Output:
    """Follows one turn. echo: text that goes before the turn's own. first_token_s: when its first token came, in
    monotonic seconds."""

    __slots__ = (
        "_seen",
        "detokenizer",
        "echo",
        "finish_reason",
        "first_token_s",
        "index",
        "is_over",
        "last_token_s",
        "turn",
    )

    def __init__(self, turn: Turn, detokenizer: Detokenizer, *, index: int = 0, echo: str = "") -> None:
        self.turn = turn
        self.detokenizer = detokenizer
        self.index = index
        self.echo = echo
        self.is_over = False
        self.finish_reason = ""
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self._seen = 0

    def __repr__(self) -> str:
        return f"Output(index={self.index}, tokens={self._seen}, finish={self.finish_reason!r}, turn={self.turn!r})"

    async def next(self) -> str:
        """Wait for tokens or the end, and return the text they add. Raises what the turn ended with.

        All tokens that have come meanwhile are taken at once: a slow client gets fewer, larger pieces.
        """
        turn = self.turn
        count = await turn.wait(self._seen)
        if count > self._seen:
            text = self.detokenizer.push(turn.ids[self._seen : count])
            if self._seen == 0:
                self.first_token_s = time.monotonic()
            self._seen = count
            if self.detokenizer.stopped is not None:
                self._end("stop")
                turn.cancel()
            return text
        turn.raise_for_error()
        self._end(self._reason())
        return self.detokenizer.finish()

    async def settle(self) -> None:
        """After a stop string: give the decoder a moment to report what the turn cost. Else nothing is waited for."""
        if self.turn.has_ended:
            return
        try:
            async with asyncio.timeout(SETTLE_S):
                await self.turn.wait_ended()
        except TimeoutError:
            pass

    @property
    def prompt_tokens(self) -> int:
        return len(self.turn.request.prompt)

    @property
    def completion_tokens(self) -> int:
        """Tokens up to the one that completed a stop string; else all of them."""
        return self.detokenizer.tokens_used

    @property
    def cached_tokens(self) -> int:
        return self.turn.result.cached_tokens if self.turn.result is not None else 0

    def timings(self) -> Timings:
        """What the turn cost: the decoder's own figures, or ours where it did not report in time."""
        result = self.turn.result or self._measured()
        read = max(0, result.prompt_tokens - result.cached_tokens)
        generated = self.completion_tokens
        timings = Timings(
            cache_n=result.cached_tokens,
            prompt_n=read,
            prompt_ms=round(result.prompt_ms, 3),
            prompt_per_token_ms=_ratio(result.prompt_ms, read),
            prompt_per_second=_ratio(read * 1000, result.prompt_ms),
            predicted_n=generated,
            predicted_ms=round(result.decode_ms, 3),
            predicted_per_token_ms=_ratio(result.decode_ms, generated),
            predicted_per_second=_ratio(generated * 1000, result.decode_ms),
            queue_ms=round(result.queue_ms, 3),
            worker=result.worker,
            moves=result.moves,
        )
        if result.drafts_offered:
            timings.draft_n = result.drafts_offered
            timings.draft_n_accepted = result.drafts_accepted
        return timings

    def _end(self, reason: str) -> None:
        self.is_over = True
        self.finish_reason = reason
        self.last_token_s = time.monotonic()

    def _reason(self) -> str:
        result = self.turn.result
        if result is None or result.finish is FinishReason.CANCEL:
            raise RuntimeError(f"{self.turn!r} was cancelled by nobody who reads it")
        return "length" if result.finish is FinishReason.LENGTH else "stop"

    def _measured(self) -> TurnResult:
        """Figures by our own clock."""
        turn = self.turn
        started_s = turn.started_s or turn.submitted_s
        first_s = self.first_token_s or started_s
        return TurnResult(
            finish=FinishReason.CANCEL,
            worker=turn.worker or 0,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=0,
            generated=self.completion_tokens,
            queue_ms=turn.queue_ms,
            prompt_ms=(first_s - started_s) * 1000,
            decode_ms=((self.last_token_s or first_s) - first_s) * 1000,
            moves=turn.moves,
        )


def _ratio(amount: float, divisor: float) -> float:
    return round(amount / divisor, 3) if divisor > 0 else 0.0
