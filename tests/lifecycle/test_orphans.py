"""Nothing outlives its owner, and nobody else is hurt (B38, B39, B47)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL, SIGSTOP, SIGTERM
from typing import Any

import psutil
import pytest

from bench.chaos.served import see
from tests.lifecycle.scene import Scene, echo, running

GONE_S = 5.0


@pytest.mark.parametrize(
    ("moment", "grandchild"),
    [("idle", "holding"), ("streaming", "detached"), ("loading", "holding"), ("worker stopped", "detached")],
)
async def test_a_killed_server_takes_everything_with_it(tmp_path: Path, moment: str, grandchild: str) -> None:
    loading = {"never_ready": True} if moment == "loading" else {}
    decoder: dict[str, Any] = {"grandchild": grandchild, "refuse": ["quit", "eof", "term"], **loading}
    before = set(os.listdir("/dev/shm"))
    with running(tmp_path, workers=2, decoder=decoder) as scene:
        if moment == "loading":
            scene.stage.wait_for("GRANDCHILD", 2)
        else:
            await scene.serving()
        streams = []
        if moment == "streaming":
            streams = [asyncio.create_task(scene.ask(echo(2000, token_delay_ms=20))) for _ in range(8)]
            await scene.running(8)
        if moment == "worker stopped":
            scene.signal(await scene.worker(), "pid", SIGSTOP)
        assert len(scene.server.descendants()) == 6
        scene.server.signal(SIGKILL)
        scene.server.wait()
        scene.gone(GONE_S)
        for answer in await asyncio.gather(*streams):
            assert answer.fault
            assert answer.finish is None
    assert set(os.listdir("/dev/shm")) <= before


async def test_a_killed_worker_takes_its_decoder_and_its_children_with_it(tmp_path: Path) -> None:
    with running(tmp_path, decoder={"grandchild": "holding", "refuse": ["quit", "eof", "term"]}) as scene:
        await scene.serving()
        old = scene.server.descendants()
        scene.signal(await scene.worker(), "pid")
        await until_gone({seen.pid: seen.started_s for seen in old})
        await scene.serving()
        await scene.exact(echo(10))
        assert len(scene.server.descendants()) == 3


async def until_gone(processes: dict[int, float]) -> None:
    deadline = time.monotonic() + GONE_S
    while left := [pid for pid, started_s in processes.items() if (now := see(pid)) and now.started_s == started_s]:
        assert time.monotonic() < deadline, f"left: {left}"
        await asyncio.sleep(0.02)


@contextmanager
def canary() -> Iterator[psutil.Process]:
    """A process of our session that nobody may touch."""
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        yield psutil.Process(process.pid)
        assert process.poll() is None, "the canary is dead"
    finally:
        process.kill()
        process.wait()


async def test_canaries_survive_deaths_restarts_and_the_end(tmp_path: Path) -> None:
    # The server is exec'ed by a shell that had a child: a child of the server's which the server did not make.
    prefix = ["sh", "-c", 'sleep 300 & echo $! >"$0"; exec "$@"', str(tmp_path / "child")]
    with canary() as sibling, running(tmp_path, workers=2, prefix=prefix) as scene:
        await scene.serving()
        child = psutil.Process(int((tmp_path / "child").read_text()))
        for worker in (await scene.server.status())["workers"]:
            assert os.getpgid(worker["pid"]) == os.getsid(worker["pid"]) == worker["pid"]
            assert os.getpgid(worker["decoder_pid"]) == worker["decoder_pid"]
            scene.signal(worker, "pid" if worker["index"] else "decoder_pid")
        await scene.serving()
        assert (await scene.act(0, "restart"))[0] == 200
        await scene.exact(echo(10))
        scene.server.signal(SIGTERM)
        assert scene.server.wait() == 0
        scene.gone(GONE_S, but=[child.pid])
        assert child.is_running()
        assert sibling.is_running()


@pytest.mark.parametrize("action", ["restart", "unload"])
async def test_a_replacement_waits_until_a_slow_predecessor_is_gone(tmp_path: Path, action: str) -> None:
    with running(tmp_path, decoder={"exit_delay_s": 0.6}) as scene:
        await scene.serving()
        old = see((await scene.worker())["decoder_pid"])
        assert old is not None
        operation = asyncio.create_task(scene.act(0, action))

        async def has_ended() -> bool:
            assert len(scene.stage.events("START")) == 1, "the replacement did not wait"
            now = see(old.pid)
            return now is None or now.started_s != old.started_s or now.is_zombie

        await scene.until(lambda: _was_told(scene))
        await scene.until(has_ended)
        assert (await operation)[0] == 200
        await scene.until(lambda: _loaded(scene, action))
        await scene.exact(echo(10))
        assert len(scene.stage.events("START")) == 2


async def _was_told(scene: Scene) -> bool:
    return bool(scene.stage.events("QUIT"))


async def _loaded(scene: Scene, action: str) -> bool:
    return action == "unload" or bool((await scene.worker())["is_serving"])


async def test_device_memory_that_is_freed_late_costs_tries_and_no_human(tmp_path: Path) -> None:
    decoder = {"lock_file": str(tmp_path / "memory"), "lock_s": 0.8}
    with running(tmp_path, decoder=decoder, deaths_limit=20) as scene:
        await scene.serving()
        scene.signal(await scene.worker(), "decoder_pid")
        body = await scene.health(503)
        assert body["worker"][0]["reason"]
        await scene.health(200)
        await scene.exact(echo(10))
        assert "held by process" in scene.server.text()
