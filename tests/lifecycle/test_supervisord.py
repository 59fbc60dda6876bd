"""The whole tree under a real supervisord and the shipped supervisord.conf (B38, B40, B43)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL
from typing import Any

import psutil
import pytest

from bench.chaos import wire
from bench.chaos.answers import Answer
from bench.chaos.scripted import EchoCall
from bench.chaos.served import ROOT
from tests.fakes.stage import Stage
from tests.lifecycle.scene import echo, options

DEADLINE_S = 40.0
GONE_S = 6.0
WRAPPER = '#!/bin/sh\nexec env PYTHONPATH="{root}" {python} -m server.cli "$@"\n'


class Installation:
    """A folder with the shipped supervisord.conf, and a `ringfence` that is this tree."""

    def __init__(self, here: Path, *, changes: dict[str, str] | None = None, **decoder: Any) -> None:
        self.here = here
        self.stage = Stage(here)
        self.mark = f"SUPERVISED={secrets.token_hex(8)}"
        self.conf = here / "supervisord.conf"
        text = (ROOT / "supervisord.conf").read_text()
        for key, value in (changes or {}).items():
            text = re.sub(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
        self.conf.write_text(text)
        command = here / ".venv" / "bin" / "ringfence"
        command.parent.mkdir(parents=True)
        command.write_text(WRAPPER.format(root=ROOT, python=sys.executable))
        command.chmod(0o755)
        keys = options(here, self.stage, decoder, {"port": 0, "workers": 2})
        lines = [
            f"{name} = {json.dumps(str(value) if isinstance(value, Path) else value)}" for name, value in keys.items()
        ]
        (here / "ringfence.toml").write_text("\n".join(lines) + "\n")

    @contextmanager
    def supervised(self) -> Iterator[subprocess.Popen[bytes]]:
        name, _, value = self.mark.partition("=")
        process = subprocess.Popen(
            [sys.executable, "-m", "supervisor.supervisord", "-c", str(self.conf)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, name: value},
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            for left in self.processes():
                left.kill()

    def control(self, *words: str) -> str:
        program = [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(self.conf), *words]
        return subprocess.run(program, capture_output=True, text=True).stdout

    def log(self) -> str:
        path = self.here / "ringfence.log"
        return path.read_text() if path.exists() else ""

    def port(self) -> int:
        """Of the server that listens now."""
        found = re.findall(r"url=http://127\.0\.0\.1:(\d+)", self.log())
        return int(found[-1]) if found else 0

    def listening(self, starts: int) -> int:
        """The port once the server has begun to listen this often."""
        wait_for(lambda: len(re.findall("event=listening", self.log())) >= starts, self.log)
        return self.port()

    def processes(self) -> list[psutil.Process]:
        """Everything that came of supervisord."""
        found = []
        for process in psutil.process_iter():
            try:
                if self.mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    found.append(process)
            except OSError:
                continue
        return found

    def has(self, count: int) -> None:
        """So many processes, the server among them, once all are up and all old ones gone."""
        wait_for(lambda: len(self.of_ringfence()) == count, self.of_ringfence)

    def of_ringfence(self) -> list[psutil.Process]:
        found = []
        for process in self.processes():
            try:
                if "supervisord" not in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found


def wait_for(condition: Callable[[], bool], tell: Callable[[], object] = str, limit_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {tell()}"
        time.sleep(0.02)


def ask(port: int, call: EchoCall) -> Answer:
    return asyncio.run(call.send(port))


def serves(port: int) -> None:
    """A request is answered, exactly."""
    wait_for(lambda: readiness(port) == 200)
    call = echo(10)
    answer = ask(port, call)
    assert not call.judge(answer).fault


def readiness(port: int) -> int:
    async def look() -> int:
        try:
            return (await wire.fetch(port, "/readyz"))[0]
        except OSError:
            return 0

    return asyncio.run(look())


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "with a space"
    folder.mkdir()
    return folder


def test_stop_restart_and_kills_leave_nobody_and_a_second_start_works(here: Path) -> None:
    installation = Installation(here, grandchild="holding", refuse=["quit", "eof", "term"])
    with installation.supervised() as supervisord:
        serves(installation.listening(1))
        installation.has(7)  # server, 2 workers, 2 decoders with a child each

        installation.control("restart", "ringfence")
        serves(installation.listening(2))
        installation.has(7)

        psutil.Process(supervisord.pid).children()[0].kill()  # the server
        serves(installation.listening(3))
        installation.has(7)

        installation.control("stop", "ringfence")
        assert installation.of_ringfence() == []

        installation.control("start", "ringfence")
        serves(installation.listening(4))
        os.kill(supervisord.pid, SIGKILL)
        wait_for(lambda: not installation.of_ringfence(), installation.of_ringfence, GONE_S)


def test_a_stop_that_takes_too_long_is_a_kill_of_everything(here: Path) -> None:
    installation = Installation(
        here, changes={"stopwaitsecs": "1"}, token_delay_s=0.1, refuse=["quit", "eof", "term"], grandchild="detached"
    )
    with installation.supervised():
        port = installation.listening(1)
        serves(port)
        asyncio.run(_stop_under_a_stream(installation, port))
        wait_for(lambda: not installation.of_ringfence(), installation.of_ringfence, GONE_S)


async def _stop_under_a_stream(installation: Installation, port: int) -> None:
    async with wire.call(port, "POST", "/v1/completions", echo(1500).body) as reply:
        assert reply.status == 200
        await asyncio.to_thread(installation.control, "stop", "ringfence")


def test_a_model_that_was_missing_is_served_when_it_is_there(here: Path) -> None:
    installation = Installation(here)
    model = here / "tiny.gguf"
    model.rename(here / "elsewhere.gguf")
    with installation.supervised():
        wait_for(lambda: installation.log().count("there is no such file") >= 2, installation.log)
        assert "FATAL" not in installation.control("status")
        (here / "elsewhere.gguf").rename(model)
        serves(installation.listening(1))
