"""A real server as a process of its own: started, asked, signalled, and followed to the last of its descendants.

Every process that comes of it is found by a mark in its environment, orphans too, whatever session they went to.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from bench.chaos import wire

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 120.0
STOP_LIMIT_S = 60.0
_MARK = "CHAOS_MARK"
_TAIL_LINES = 30
_LISTENING = re.compile(r"event=listening url=http://127\.0\.0\.1:(\d+)")


class ServerFailed(Exception):
    """The server did not start, or ended by itself; the text has the end of its log."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A process of the server's: it is this one only while its start time is the same."""

    pid: int
    started_s: float
    is_zombie: bool
    command: str


class Served:
    """A server. Use it as a context manager: leaving it ends everything that came of it."""

    def __init__(self, log: Path, options: Mapping[str, Any], *, prefix: Sequence[str] = ()) -> None:
        """options: configuration keys. prefix: a command that runs the server's (`setpriv ...`)."""
        self.log = log
        self.port = 0
        self._mark = secrets.token_hex(8)
        self._command = [*prefix, sys.executable, "-m", "server.cli", "serve", "--port", "0", *_words(options)]
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"Served(pid={self.pid}, port={self.port}, log={str(self.log)!r})"

    def __enter__(self) -> Served:
        try:
            self.start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it, and wait until it listens (its workers may still be loading). Raises ServerFailed."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RINGFENCE_")}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                env={**environment, _MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        until = time.monotonic() + START_LIMIT_S
        while (match := _LISTENING.search(self.text())) is None:
            if self.exit_code() is not None or time.monotonic() > until:
                raise ServerFailed(f"the server does not listen (exit code {self.exit_code()}):\n{self.tail()}")
            time.sleep(0.01)
        self.port = int(match[1])

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        return "\n".join(self.text().splitlines()[-_TAIL_LINES:])

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def exit_code(self) -> int | None:
        """The exit code once it has ended; negative for a signal."""
        return None if self._process is None else self._process.poll()

    def wait(self, limit_s: float = STOP_LIMIT_S) -> int:
        """Its exit code, once it ends. Raises subprocess.TimeoutExpired."""
        assert self._process is not None
        return self._process.wait(limit_s)

    def end(self) -> None:
        """SIGKILL to it and to everything that came of it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for seen in self.descendants():
            kill(seen)

    # ---- what it is made of ----------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """The body of /status."""
        _, _, body = await wire.fetch(self.port, "/status")
        status: dict[str, Any] = body
        return status

    def descendants(self) -> list[Seen]:
        """Every process that carries the mark, the server left out, and the zombies among its children."""
        found: dict[int, Seen] = {}
        for process in psutil.process_iter():
            if process.pid not in (self.pid, os.getpid()) and self._is_marked(process.pid):
                _note(found, process)
        try:
            for process in psutil.Process(self.pid).children(recursive=True):
                _note(found, process)
        except psutil.NoSuchProcess:
            pass
        return list(found.values())

    def owns(self, pid: int) -> bool:
        """Whether a living process is the server's: it carries the mark, or descends from it (within its exec it shows
        no environment)."""
        if pid <= 0 or pid == self.pid:
            return False
        try:
            return self._is_marked(pid) or self.pid in (parent.pid for parent in psutil.Process(pid).parents())
        except psutil.NoSuchProcess:
            return False

    def descriptors(self, pid: int = 0) -> dict[str, int]:
        """Open descriptors of the server, or of one of its processes, counted by kind."""
        counts: dict[str, int] = {}
        folder = f"/proc/{pid or self.pid}/fd"
        for name in os.listdir(folder):
            try:
                kind = re.sub(r"\d+", "N", os.readlink(f"{folder}/{name}"))
            except OSError:
                continue
            counts[kind] = counts.get(kind, 0) + 1
        return counts

    def _is_marked(self, pid: int) -> bool:
        try:
            return f"{_MARK}={self._mark}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False


def kill(seen: Seen, number: signal.Signals = signal.SIGKILL) -> bool:
    """Signal this very process, or nobody. False when it is gone."""
    try:
        pidfd = os.pidfd_open(seen.pid)
    except ProcessLookupError:
        return False
    try:
        if psutil.Process(seen.pid).create_time() != seen.started_s:
            return False
        signal.pidfd_send_signal(pidfd, number)
        return True
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
    finally:
        os.close(pidfd)


def see(pid: int) -> Seen | None:
    """A process as it is now."""
    found: dict[int, Seen] = {}
    try:
        _note(found, psutil.Process(pid))
    except psutil.NoSuchProcess:
        pass
    return found.get(pid)


def _note(found: dict[int, Seen], process: psutil.Process) -> None:
    try:
        with process.oneshot():
            is_zombie = process.status() == psutil.STATUS_ZOMBIE
            command = "" if is_zombie else " ".join(process.cmdline())[:200]
            found[process.pid] = Seen(process.pid, process.create_time(), is_zombie, command)
    except psutil.NoSuchProcess:
        pass


def _words(options: Mapping[str, Any]) -> list[str]:
    """Options of the command line: true and false as --flag and --no-flag."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words
