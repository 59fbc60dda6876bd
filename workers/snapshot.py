"""Readings of the pool for health, status and metrics: frozen, taken at one moment, safe to keep."""

from dataclasses import dataclass

from shm.board import BoardSnapshot, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What the decoders announced (their INFO lines). logprobs: alternatives per token, 0 for none."""

    logprobs: int = 0
    grammar: bool = False
    logit_bias: bool = False
    embeddings: bool = False
    resume: bool = False
    vocabulary: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """One worker. `state` and `reason` are the supervisor's judgement; `board` is the worker's own word."""

    index: int
    device: str
    state: WorkerState
    reason: str  # why it is not ready, or empty
    is_serving: bool  # takes new turns now
    is_cordoned: bool
    incarnation: int
    pid: int
    decoder_pid: int
    capacity: int
    running: int
    restarts: int
    progress_age_s: float | None
    heartbeat_age_s: float | None
    last_error: str
    info: str
    memory_bytes: int
    board: BoardSnapshot | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    requests: int  # waiting
    tokens: int  # prompt tokens waiting
    reserved: int  # reservations held by requests that are being tokenised
    request_limit: int
    token_limit: int
    oldest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounters:
    """Totals since the server started; none ever decreases, whatever worker dies."""

    submitted: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    rejected: int = 0  # refused at the door: Overloaded
    expired: int = 0  # deadline passed in the queue
    moved: int = 0
    poisoned: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    stale_records: int = 0  # ring records of generations that were over
    ring_faults: int = 0
    worker_deaths: int = 0
    worker_hangs: int = 0
    decoder_deaths: int = 0
    slow_clients: int = 0
    nonfinite: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSnapshot:
    workers: tuple[WorkerSnapshot, ...]
    queue: QueueSnapshot
    counters: PoolCounters
    running: int
    capacity: int  # turns that READY workers run at once
    context: int  # of the READY workers, the largest; of the settings while none is
    capabilities: Capabilities
    is_draining: bool
    uptime_s: float
    tokens_per_s: float  # measured over the last seconds
