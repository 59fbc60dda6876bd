"""A real server with scripted decoders for a test: started, asked over HTTP, and hurt.

    with running(tmp_path, workers=2) as scene:
        answer = await scene.exact(echo(7, 50))
        scene.kill(await scene.worker(0), "decoder_pid")

Limits are short, so that what takes minutes in production takes a second here. When the block ends nothing that came of the
server may be left; `clean` says whether a living one is as it was.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from bench.chaos import wire
from bench.chaos.answers import Answer, Progress
from bench.chaos.scripted import EchoCall, decoder_options
from bench.chaos.served import Served, kill, see
from bench.chaos.traces import serving
from tests import tiny_model
from tests.fakes.echo import echo_prompt
from tests.fakes.stage import Stage

T = TypeVar("T")

ADMIN_KEY = "operators-only"
SHORT: dict[str, Any] = {
    "workers": 1,
    "gpus": "none",
    "slots": 4,
    "context": 2048,
    "admin_key": ADMIN_KEY,
    "start_limit_s": 20,
    "hang_limit_s": 20,
    "kill_grace_s": 1,
    "backoff_first_s": 0.05,
    "backoff_cap_s": 0.4,
    "stable_after_s": 0.5,
    "watchdog_interval_s": 0.1,
    "drain_s": 10,
}
_markers = itertools.count(1)


def echo(tokens: int = 40, *, length: int = 40, is_streamed: bool = True, **orders: int) -> EchoCall:
    """A request with a marker that no other has. orders: to the decoder, see tests/fakes/echo.py."""
    return EchoCall(echo_prompt(next(_markers), length, **orders), tokens, is_streamed=is_streamed)


class Scene:
    """A server and the stage of its decoders."""

    def __init__(self, server: Served, stage: Stage) -> None:
        self.server = server
        self.stage = stage

    @property
    def port(self) -> int:
        return self.server.port

    async def ask(self, call: EchoCall, progress: Progress | None = None) -> Answer:
        return await call.send(self.port, progress)

    async def exact(self, call: EchoCall, progress: Progress | None = None) -> Answer:
        """The answer to a request; it is complete and right."""
        answer = await self.ask(call, progress)
        verdict = call.judge(answer)
        assert not verdict.fault, f"{call.name}: {verdict.fault}\n{self.server.tail()}"
        assert not verdict.difference, f"{call.name}: {verdict.difference}"
        return answer

    async def fetch(self, path: str) -> tuple[int, dict[str, str], Any]:
        return await wire.fetch(self.port, path)

    async def act(self, worker: int, action: str) -> tuple[int, Any]:
        """An operator's call."""
        path = f"/admin/workers/{worker}/{action}"
        status, _, body = await wire.fetch(self.port, path, method="POST", key=ADMIN_KEY)
        return status, body

    async def worker(self, index: int = 0) -> dict[str, Any]:
        """A worker's part of /status."""
        worker: dict[str, Any] = (await self.server.status())["workers"][index]
        return worker

    async def serving(self) -> dict[str, Any]:
        """/status once all workers serve."""
        return await serving(self.server, 60.0)

    async def running(self, count: int) -> None:
        """Until so many requests run."""
        await self.until(lambda: self._has("running", count), what=f"{count} requests run")

    async def waiting(self, count: int) -> None:
        """Until so many requests wait."""

        async def has() -> bool:
            return bool((await self.server.status())["queue"]["requests"] == count)

        await self.until(has, what=f"{count} requests wait")

    async def health(self, status: int, *, limit_s: float = 30.0) -> dict[str, Any]:
        """The body of /health once it answers with this status."""

        async def look() -> dict[str, Any] | None:
            found, _, body = await self.fetch("/health")
            return dict(body) if found == status else None

        return await self.until(look, limit_s=limit_s, what=f"/health is {status}")

    async def until(
        self, condition: Callable[[], Awaitable[T | None]], *, limit_s: float = 30.0, what: str = "condition"
    ) -> T:
        """The first true value of a condition. Raises AssertionError with the log's end when that takes too long."""
        deadline = time.monotonic() + limit_s
        while not (value := await condition()):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {limit_s} s: {what}\n{self.server.tail()}")
            await asyncio.sleep(0.01)
        return value

    async def idle(self) -> None:
        """Nothing runs, waits or is reserved, and all serve again."""
        await self.idle_or_asleep()
        await self.serving()

    async def idle_or_asleep(self) -> None:
        """Nothing runs, waits or is reserved."""

        async def is_idle() -> bool:
            status = await self.server.status()
            queue = status["queue"]
            return not any((status["running"], queue["requests"], queue["reserved"], status["http"]["requests"] - 1))

        await self.until(is_idle, limit_s=10.0, what="nothing runs or waits")

    async def _has(self, key: str, count: int) -> bool:
        return bool((await self.server.status())[key] == count)

    def signal(self, worker: dict[str, Any], whose: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal a worker (`pid`) or its decoder (`decoder_pid`), as /status showed it. Returns the pid."""
        pid: int = worker[whose]
        victim = see(pid)
        assert victim is not None and self.server.owns(pid), f"{whose} {pid} is no process of the server"
        assert kill(victim, number)
        return pid

    async def replaced(self, worker: dict[str, Any], whose: str) -> dict[str, Any]:
        """The worker once it serves with another process in place of the one that was there."""

        async def look() -> dict[str, Any] | None:
            now = await self.worker(worker["index"])
            return now if now["is_serving"] and now[whose] not in (0, worker[whose]) else None

        return await self.until(look, what=f"{whose} {worker[whose]} is replaced")

    def gone(self, limit_s: float = 10.0, *, but: Sequence[int] = ()) -> None:
        """Nothing that came of the server is left, within the limit."""
        deadline = time.monotonic() + limit_s
        while left := [seen for seen in self.server.descendants() if seen.pid not in but]:
            assert time.monotonic() < deadline, f"left after {limit_s} s: {left}"
            time.sleep(0.02)


@contextmanager
def running(
    folder: Path, *, decoder: dict[str, Any] | None = None, prefix: Sequence[str] = (), **config: Any
) -> Iterator[Scene]:
    """A server that listens. decoder: keys of tests/fakes/script.py; config: keys that differ from SHORT."""
    stage = Stage(folder)
    with Served(folder / "server.log", options(folder, stage, decoder, config), prefix=prefix) as server:
        yield Scene(server, stage)


def options(folder: Path, stage: Stage, decoder: dict[str, Any] | None, config: dict[str, Any]) -> dict[str, Any]:
    """Configuration keys of a server over scripted decoders."""
    model = folder / "tiny.gguf"
    if not model.exists():
        tiny_model.build(model)
    merged = {**SHORT, **config}
    keys = {"token_delay_s": 0.005, **(decoder or {})}
    command = decoder_options(stage, slots=merged["slots"], **keys)
    return {**merged, "decoder_command": command, "tokenizer": model}
