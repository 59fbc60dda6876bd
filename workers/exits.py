"""Why a process ended, in words an operator can act on, from its status and its last lines."""

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_ASSERTIONS = ("GGML_ASSERT", "Assertion", "terminate called", "assert(")
_CUDA = ("CUDA error", "cudaError", "HIP error", "ROCm error", "device-side assert")
_MEMORY = ("out of memory", "bad_alloc", "failed to allocate", "cudaErrorMemoryAllocation", "Cannot allocate memory")


class ExitKind(StrEnum):
    CLEAN = "clean"
    OUT_OF_MEMORY = "out_of_memory"
    CUDA_ERROR = "cuda_error"
    ASSERTION = "assertion"
    SIGNAL = "signal"
    FAILED = "failed"  # an exit code other than 0
    HANG = "hang"
    KILLED = "killed"  # SIGKILL or SIGTERM from outside, and no sign of the kernel's out-of-memory killer
    STOPPED = "stopped"  # SIGSTOP from outside, for which we ended it
    BROKEN = "broken"  # it said itself that it can't go on

    @property
    def place(self) -> int:
        """Its number on a board."""
        return list(ExitKind).index(self)


@dataclass(frozen=True, slots=True)
class Exit:
    """A classified end. `is_external`: somebody else ended it, and nothing that it ran is to blame."""

    kind: ExitKind
    text: str

    @property
    def is_external(self) -> bool:
        return self.kind in (ExitKind.KILLED, ExitKind.STOPPED)

    def __str__(self) -> str:
        return self.text


STOPPED = Exit(ExitKind.STOPPED, "stopped from outside (SIGSTOP)")


def classify(status: int, lines: Sequence[str], *, oom_kills: int = 0) -> Exit:
    """Name an end. status: as subprocess gives it (negative: signal). oom_kills: that the kernel did meanwhile."""
    last = next((line for line in reversed(lines) if line.strip()), "")
    told = f"; last line: {last[:200]}" if last else ""
    if status == -signal.SIGKILL and oom_kills > 0:
        return Exit(ExitKind.OUT_OF_MEMORY, f"killed by the kernel for want of memory (SIGKILL){told}")
    if status in (-signal.SIGKILL, -signal.SIGTERM):
        return Exit(ExitKind.KILLED, f"killed from outside by {signal.Signals(-status).name}{told}")
    if status == 0:
        return Exit(ExitKind.CLEAN, f"exited by itself with code 0{told}")
    how = f"died of {_signal_name(-status)}" if status < 0 else f"exited with code {status}"
    return Exit(_kind_from(lines) or (ExitKind.SIGNAL if status < 0 else ExitKind.FAILED), f"{how}{told}")


def _kind_from(lines: Sequence[str]) -> ExitKind | None:
    for words, kind in (
        (_MEMORY, ExitKind.OUT_OF_MEMORY),
        (_CUDA, ExitKind.CUDA_ERROR),
        (_ASSERTIONS, ExitKind.ASSERTION),
    ):
        if any(word.lower() in line.lower() for line in lines for word in words):
            return kind
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def oom_kills() -> int:
    """Processes that the kernel has killed for want of memory so far: in our cgroup, or on the machine where it has no count.

    Another container's are not ours: a SIGKILL taken for an out-of-memory kill would blame the turns it ended.
    """
    own = _counter(_cgroup() / "memory.events")
    return _counter(Path("/proc/vmstat")) or 0 if own is None else own


def _counter(path: Path) -> int | None:
    try:
        text = path.read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), None)


def _cgroup() -> Path:
    try:
        name = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
    except OSError:
        name = ""
    return Path("/sys/fs/cgroup") / name.lstrip("/")


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal (state T; a debugger's t is not meant)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    at = stat.rfind(b")") + 2
    return stat[at : at + 1] == b"T"


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, 0 when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0.0
    fields = stat[stat.rfind(b")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
