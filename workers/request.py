"""A request for a generation and its result, as the pool takes and gives them."""

from collections.abc import Sequence
from enum import IntEnum, StrEnum

import msgspec

from native.sampling import SamplingOptions


class RequestKind(IntEnum):
    GENERATE = 0
    EMBED = 1


class FinishReason(StrEnum):
    """Why a turn ended well. `cancel` is the end of a turn that its own caller cancelled."""

    STOP = "stop"
    LENGTH = "length"
    CANCEL = "cancel"


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One turn to run. prompt: token ids, not empty. max_new: at least 1. deadline_s: time it may wait for a worker."""

    id: str
    prompt: Sequence[int]
    max_new: int
    sampling: SamplingOptions = SamplingOptions()
    kind: RequestKind = RequestKind.GENERATE
    deadline_s: float = 600.0


class TurnResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a turn cost, for this request alone. Counts in tokens, times in milliseconds.

    prompt_tokens counts the caller's prompt, cached_tokens those of them that the (first) decoder had kept, generated
    every token once however often the turn moved; moves is how many times it went on in another decoder.
    """

    finish: FinishReason
    worker: int
    prompt_tokens: int
    cached_tokens: int
    generated: int
    queue_ms: float
    prompt_ms: float
    decode_ms: float
    drafts_accepted: int = 0
    drafts_offered: int = 0
    moves: int = 0
