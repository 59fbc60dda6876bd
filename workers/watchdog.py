"""Whether a worker must be ended, judged from what can be seen of it. Pure, but for `observe`.

A pidfd tells of a death at once; here is what it can't tell. In this order:

    stopped     worker in state T at two looks in a row: somebody sent SIGSTOP
    memory      worker and decoder together above the limit
    hung        work is owed, and the loop's heartbeat is older than `heartbeat_limit_s`, or neither a token nor prefill moved
                for longer than the worker itself allows its decoder (then the worker should have acted, and did not)

An idle worker is never hung. Its decoder is the worker's own business (keeper.py, conversation.py): silence limits that grow with
the prompt, a stopped decoder, CPU time.

The watchdog looks at itself first: when its own round comes late (the machine or this process was stopped), every age it
could compute is wrong, and that round judges nobody.
"""

from dataclasses import dataclass

import psutil

from shm.board import BoardSnapshot

HEARTBEAT_LIMIT_S = 10.0  # the loop ticks once a second
MARGIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What one look at a worker showed. Ages in seconds."""

    is_stopped: bool
    memory_bytes: int
    owed: int  # turns leased to it
    prompt_tokens: int  # the longest prompt among them
    heartbeat_age_s: float
    progress_age_s: float  # since its last progress, or since the oldest lease if that is later


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    hang_limit_s: float
    prefill_rate: float
    memory_limit_bytes: int = 0
    heartbeat_limit_s: float = HEARTBEAT_LIMIT_S


@dataclass(frozen=True, slots=True)
class Verdict:
    reason: str
    is_stopped: bool = False
    is_hang: bool = False


class Watchdog:
    """Judges one worker, look after look. One per incarnation."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._was_stopped = False

    def __repr__(self) -> str:
        return f"Watchdog(limits={self._limits}, was_stopped={self._was_stopped})"

    def judge(self, seen: Observation) -> Verdict | None:
        """The verdict, or None to let it live."""
        limits = self._limits
        was_stopped, self._was_stopped = self._was_stopped, seen.is_stopped
        if seen.is_stopped and was_stopped:
            return Verdict("stopped from outside (SIGSTOP)", is_stopped=True)
        if limits.memory_limit_bytes and seen.memory_bytes > limits.memory_limit_bytes:
            used, allowed = seen.memory_bytes >> 20, limits.memory_limit_bytes >> 20
            return Verdict(f"uses {used} MiB of memory; the limit is {allowed} MiB")
        if not seen.owed:
            return None
        if seen.heartbeat_age_s > min(limits.heartbeat_limit_s, limits.hang_limit_s + MARGIN_S):
            return Verdict(f"its loop has not moved for {seen.heartbeat_age_s:.1f} s", is_hang=True)
        allowed_s = 3 * (limits.hang_limit_s + min(seen.prompt_tokens, 32768) / limits.prefill_rate) + MARGIN_S
        if seen.progress_age_s > allowed_s:
            return Verdict(f"neither a token nor prefill for {seen.progress_age_s:.1f} s", is_hang=True)
        return None


class Lag:
    """How late the watchdog's own rounds come."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._last_s: float | None = None

    def is_late(self, now: float) -> bool:
        """Whether so much time passed since the last round that this process must have been stopped or starved."""
        last, self._last_s = self._last_s, now
        return last is not None and now - last > 3 * self._interval_s + 0.5


def observe(
    pid: int, decoder_pid: int, board: BoardSnapshot, *, owed: int, prompt_tokens: int, oldest_s: float, now_ns: int
) -> Observation:
    """Look at a worker. A process that vanishes meanwhile is no error here: its pidfd tells."""
    status, memory = _look(pid)
    return Observation(
        is_stopped=status == psutil.STATUS_STOPPED,
        memory_bytes=memory + (_look(decoder_pid)[1] if decoder_pid else 0),
        owed=owed,
        prompt_tokens=prompt_tokens,
        heartbeat_age_s=max(0.0, (now_ns - board.heartbeat_ns) / 1e9),
        progress_age_s=max(0.0, min((now_ns - board.progress_ns) / 1e9, oldest_s)),
    )


def _look(pid: int) -> tuple[str, int]:
    """State and resident bytes of a process; nothing for one that can't be seen."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return process.status(), process.memory_info().rss
    except (psutil.Error, OSError):
        return "", 0
