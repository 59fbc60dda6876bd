"""What a pool is told at its start. Values come from the server's configuration; the meanings are here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One worker process and its decoder. Sent to the worker as JSON on its command line."""

    index: int
    decoder_command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()  # added to the decoder's: the device variable
    cores: tuple[int, ...] = ()  # CPU affinity of the decoder, empty for all
    device: str = "cpu"
    start_limit_s: float = 900.0  # silence allowed before READY
    hang_limit_s: float = 300.0  # silence allowed with work owed
    prefill_rate: float = 50.0  # prompt tokens per second that a silent decoder is granted before its first line
    stop_grace_s: float = 2.0  # STOP is sent again when no DONE came within it
    stall_limit_s: float = 60.0  # a full ring is borne this long before its turns are stopped
    kill_grace_s: float = 5.0  # QUIT or SIGTERM, then SIGKILL
    backoff_first_s: float = 0.5
    backoff_cap_s: float = 60.0
    stable_after_s: float = 60.0
    deaths_limit: int = 5  # deaths in a row after which the worker is cordoned
    engine_failures_limit: int = 3  # engine-class ERR in a row after which the decoder is replaced
    unload_idle_s: float = 0.0  # 0: never


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """The pool: its workers, the shared memory of each, and every bound it keeps."""

    workers: tuple[WorkerSettings, ...]
    slots: int = 4  # request slots of each worker
    context: int = 4096  # longest prompt plus output in tokens
    ring_records: int = 4096
    queue_requests: int = 256
    queue_tokens: int = 1_048_576
    wait_for_workers_s: float = 0.0  # with no worker serving a new request is refused at once, or waits this long
    end_ids: tuple[int, ...] = ()  # end-of-generation tokens: a turn whose last token is one needs no continuation
    poison_limit: int = 2  # decoders that a request may cost
    memory_limit_bytes: int = 0  # of worker and decoder together, 0: none
    worker_start_limit_s: float = 30.0  # for the worker process itself, until its board lives
    watchdog_interval_s: float = 0.5
    incidents_dir: str = ""
    incidents_kept: int = 50
    incidents_with_content: bool = False
