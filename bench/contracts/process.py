"""A real decoder process behind real OS pipes: it repeats its prompt, one write a token, until it is told to stop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.schemes.messages import Pipes

ECHO_DECODER = Path(__file__).with_name("echo_decoder.py")


def pipes_of(process: subprocess.Popen[bytes]) -> Pipes:
    """The pipes of a process that was started with both."""
    if process.stdin is None or process.stdout is None:
        raise ValueError("start the process with stdin=PIPE and stdout=PIPE")
    return Pipes(process.stdin, process.stdout)


class ProcessDecoder:
    """Starts bench/contracts/echo_decoder.py; nothing of it can be seen but what it answers."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-I", "-S", str(ECHO_DECODER)]

    def connect(self) -> Pipes:
        process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._processes.append(process)
        return pipes_of(process)

    def close(self) -> None:
        """Those we started ourselves; a worker process ends its own."""
        for process in self._processes:
            try:
                process.wait(2.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
