"""The servers under test, as processes of their own: ringfence, llama-server, or one that runs already.

with start_ringfence(model, slots=8, context=2048, threads=1) as server:
    drive(server.port, calls)
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import psutil

from workers.decoder import die_with_parent

ROOT = Path(__file__).resolve().parent.parent
START_LIMIT_S = 120.0
STOP_LIMIT_S = 10.0
LOG_TAIL_LINES = 15


class ServerFailed(Exception):
    """A server did not start or did not answer."""


@dataclass(slots=True)
class Server:
    """A running server. process: its first process, None for one that somebody else started."""

    name: str
    address: str
    port: int
    process: subprocess.Popen[bytes] | None = None
    roles: dict[int, str] = field(default_factory=dict)
    keeps_alive: bool = True

    def cpu_s(self) -> dict[str, float]:
        """CPU time so far by role: for ringfence server, workers and decoders."""
        if self.process is None:
            return {}
        total: dict[str, float] = {}
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                role = self.roles.setdefault(process.pid, self._role(process))
                times = process.cpu_times()
                total[role] = total.get(role, 0.0) + times.user + times.system
        return total

    def libllama(self) -> set[str]:
        """The libllama files that its processes have mapped."""
        found = set()
        for process in self._tree() if self.process is not None else ():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                found |= {line.split()[-1] for line in maps.splitlines() if "libllama.so" in line}
        return found

    def get(self, path: str, *, timeout_s: float = 5.0) -> bytes:
        """Body of a GET. Raises OSError, HTTPError among them."""
        with urllib.request.urlopen(f"http://{self.address}:{self.port}{path}", timeout=timeout_s) as answer:
            body: bytes = answer.read()
            return body

    def _tree(self) -> list[psutil.Process]:
        assert self.process is not None
        first = psutil.Process(self.process.pid)
        return [first, *first.children(recursive=True)]

    def _role(self, process: psutil.Process) -> str:
        assert self.process is not None
        if process.pid == self.process.pid:
            return "server"
        return "worker" if process.ppid() == self.process.pid else "decoder"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def start_ringfence(
    model: Path,
    *,
    slots: int,
    context: int,
    threads: int,
    workers: int = 1,
    options: Sequence[str] = (),
) -> Iterator[Server]:
    """`ringfence serve` from this tree; further options as given. Raises ServerFailed."""
    command = [sys.executable, "-m", "server.cli", "serve", "--log-level", "warning"]
    for name, value in (("workers", workers), ("slots", slots), ("context", context), ("threads", threads)):
        command += [f"--{name}", str(value)]
    if "--decoder-command" in options:
        command += ["--tokenizer", str(model)]
    else:
        command += ["--model", str(model)]
    with _running("ringfence", [*command, *options], ready="/readyz") as server:
        yield server


@contextlib.contextmanager
def start_llama_server(
    program: Path, model: Path, *, slots: int, context: int, threads: int, options: Sequence[str] = ()
) -> Iterator[Server]:
    """llama-server with what we have: slots of their own context, no log, no prompt cache in RAM (it costs time).

    It is run with the libraries of our own decoder in front, so that both compute with the same libllama.
    """
    command = [str(program), "--model", str(model), "--threads", str(threads), "--gpu-layers", "0"]
    command += ["--parallel", str(slots), "--ctx-size", str(slots * context), "--no-kv-unified"]
    command += ["--cache-ram", "0", "--log-disable", *options]
    with _running("llama-server", command, ready="/health", libraries=libllama_dir()) as server:
        yield server


def peer(url: str) -> Server:
    """A server that runs already, at an URL such as http://127.0.0.1:8080."""
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise ServerFailed(f"{url} is no http:// URL of a server.")
    return Server(name=f"peer {parts.netloc}", address=socket.gethostbyname(parts.hostname), port=parts.port or 80)


def libllama_dir() -> Path:
    """Where the libraries lie that the built-in decoder links."""
    return next(path / "lib" for path in map(Path, sys.path) if (path / "lib" / "libllama.so").exists())


@contextlib.contextmanager
def _running(name: str, command: Sequence[str], *, ready: str, libraries: Path | None = None) -> Iterator[Server]:
    port = free_port()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RINGFENCE_", "LLAMA_ARG_"))}
    if libraries is not None:
        environment["LD_LIBRARY_PATH"] = str(libraries)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),
        )
        server = Server(name=name, address="127.0.0.1", port=port, process=process)
        try:
            _await_ready(server, ready, log)
            yield server
        finally:
            _stop(process)


def _await_ready(server: Server, path: str, log: IO[bytes]) -> None:
    until = time.monotonic() + START_LIMIT_S
    assert server.process is not None
    while time.monotonic() < until and server.process.poll() is None:
        try:
            server.get(path)
            return
        except OSError:
            time.sleep(0.05)
    log.seek(0)
    tail = "\n".join(log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:])
    raise ServerFailed(f"{server.name} did not become ready at {path}:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):  # ringfence: drain, then at once
        process.send_signal(number)
        try:
            process.wait(STOP_LIMIT_S if number is signal.SIGKILL else STOP_LIMIT_S / 2)
            return
        except subprocess.TimeoutExpired:
            continue
