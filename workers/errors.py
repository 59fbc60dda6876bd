"""What can go wrong with a turn, by cause. Each carries data; the HTTP status and text are made in server/errors.py."""

from dataclasses import dataclass


class RingfenceError(Exception):
    """Root of the errors that a caller of the pool may see."""


@dataclass(frozen=True, slots=True)
class Overloaded(RingfenceError):
    """The queue is full; `retry_after_s` is computed from measured throughput. `bound` names the limit reached."""

    bound: str
    limit: int
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class NoWorkers(RingfenceError):
    """No worker can serve, and the caller asked not to wait; `reasons` has one entry per worker."""

    reasons: tuple[str, ...]
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class DeadlineExceeded(RingfenceError):
    """The request waited longer than its deadline and was never sent to a decoder."""

    waited_s: float


@dataclass(frozen=True, slots=True)
class DecoderRefused(RingfenceError):
    """The decoder answered ERR to this request; `text` is its own message."""

    text: str


@dataclass(frozen=True, slots=True)
class EngineFailed(RingfenceError):
    """The decoder answered ERR for a reason of its own, not the request's; `text` is its message."""

    worker: int
    text: str


@dataclass(frozen=True, slots=True)
class NonFinite(RingfenceError):
    """The decoder produced NaN for this request, twice."""


@dataclass(frozen=True, slots=True)
class PoisonRequest(RingfenceError):
    """The request was running when `deaths` decoders died, and is not given another."""

    deaths: int


@dataclass(frozen=True, slots=True)
class WorkerLost(RingfenceError):
    """Worker or decoder died, and the request can't go on elsewhere."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class SlowClient(RingfenceError):
    """Tokens were not taken in time; the generation was stopped."""

    stalled_s: float


@dataclass(frozen=True, slots=True)
class PromptTooLong(RingfenceError):
    """The prompt does not fit the context of any worker."""

    prompt_tokens: int
    context: int


@dataclass(frozen=True, slots=True)
class Unsupported(RingfenceError):
    """The decoder has not announced what the request needs (`capability`: grammar, logprobs, logit_bias, embeddings)."""

    capability: str


@dataclass(frozen=True, slots=True)
class ShuttingDown(RingfenceError):
    """The server is stopping and takes nothing new, or its drain limit has passed."""
