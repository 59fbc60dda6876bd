"""What can go wrong with a turn, by cause. Each carries data; the HTTP status and text are made in server/errors.py.

Not frozen: contextlib and friends set `__traceback__` on exceptions. Compared by identity, like other exceptions.
"""

from dataclasses import dataclass


class RingfenceError(Exception):
    """Root of the errors that a caller of the pool may see."""


@dataclass(eq=False)
class Overloaded(RingfenceError):
    """The queue is full; `retry_after_s` is computed from measured throughput. `bound` names the limit reached."""

    bound: str
    limit: int
    retry_after_s: float


@dataclass(eq=False)
class NoWorkers(RingfenceError):
    """No worker can serve, and the caller asked not to wait; `reasons` has one entry per worker."""

    reasons: tuple[str, ...]
    retry_after_s: float


@dataclass(eq=False)
class DeadlineExceeded(RingfenceError):
    """No worker took the request within its deadline, at first or after it lost one. `waited_s`: since it was submitted."""

    waited_s: float


@dataclass(eq=False)
class DecoderRefused(RingfenceError):
    """The decoder answered ERR to this request; `text` is its own message."""

    text: str


@dataclass(eq=False)
class EngineFailed(RingfenceError):
    """The decoder answered ERR for a reason of its own, not the request's; `text` is its message."""

    worker: int
    text: str


@dataclass(eq=False)
class NonFinite(RingfenceError):
    """The decoder produced NaN for this request, twice."""


@dataclass(eq=False)
class PoisonRequest(RingfenceError):
    """The request was running when `deaths` decoders died, and is not given another."""

    deaths: int


@dataclass(eq=False)
class WorkerLost(RingfenceError):
    """Worker or decoder died, and the request can't go on elsewhere."""

    worker: int
    reason: str


@dataclass(eq=False)
class SlowClient(RingfenceError):
    """Tokens were not taken in time; the generation was stopped."""

    stalled_s: float


@dataclass(eq=False)
class PromptTooLong(RingfenceError):
    """The prompt does not fit the context of any worker."""

    prompt_tokens: int
    context: int


@dataclass(eq=False)
class Unsupported(RingfenceError):
    """The decoder has not announced what the request needs (`capability`: grammar, logprobs, logit_bias, embeddings)."""

    capability: str


@dataclass(eq=False)
class ShuttingDown(RingfenceError):
    """The server is stopping and takes nothing new, or its drain limit has passed."""
