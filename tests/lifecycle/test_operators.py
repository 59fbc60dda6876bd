"""Operators' calls over HTTP: nothing is lost by them, sleepers wake once, and deaths are on record (B81)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from signal import SIGSEGV

import pytest

from bench.chaos import wire
from tests.lifecycle.scene import ADMIN_KEY, Scene, echo, running


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Scene]:
    with running(folder, workers=2, incidents_dir=str(folder / "incidents"), deaths_limit=50) as scene:
        yield scene


async def test_a_rolling_restart_under_load_fails_nothing(two: Scene) -> None:
    before = await two.serving()
    is_over = asyncio.Event()

    async def client() -> int:
        count = 0
        while not is_over.is_set():
            await two.exact(echo(30, is_streamed=count % 2 > 0))
            count += 1
        return count

    clients = [asyncio.create_task(client()) for _ in range(6)]
    async with wire.call(two.port, "POST", "/admin/restart", key=ADMIN_KEY) as reply:
        assert reply.status == 202

    async def is_done() -> bool:
        workers = (await two.server.status())["workers"]
        pids = {worker["pid"] for worker in before["workers"]}
        return all(worker["is_serving"] and worker["pid"] not in pids for worker in workers)

    await two.until(is_done, limit_s=60.0)
    is_over.set()
    assert min(await asyncio.gather(*clients)) > 0
    await two.idle()


async def test_a_drained_worker_gets_nothing_until_it_resumes(two: Scene) -> None:
    await two.serving()
    assert (await two.act(0, "drain"))[0] == 200
    other = (await two.worker(1))["decoder_pid"]
    before = len(two.stage.events("GEN"))
    await asyncio.gather(*(two.exact(echo(5)) for _ in range(8)))
    assert {event["pid"] for event in two.stage.events("GEN")[before:]} == {other}
    status, _, body = await two.fetch("/health")
    assert (status, body["status"], body["worker"][0]["serving"]) == (200, "degraded", False)
    assert (await two.act(0, "resume"))[0] == 200
    await two.serving()
    await two.idle()


async def test_a_cordoned_server_refuses_and_an_uncordoned_one_serves(two: Scene) -> None:
    await two.serving()
    for worker in range(2):
        await two.act(worker, "cordon")
    assert (await two.fetch("/readyz"))[0] == 503
    assert (await two.ask(echo(5, is_streamed=False))).error.startswith("503 no_workers")
    for worker in range(2):
        await two.act(worker, "uncordon")
    await two.serving()
    await two.exact(echo(5))
    await two.idle()


async def test_operators_need_their_own_key(two: Scene) -> None:
    for key in ("", "not-the-admin-key"):
        async with wire.call(two.port, "POST", "/admin/workers/0/restart", key=key) as reply:
            assert reply.status in (401, 403)
    async with wire.call(two.port, "GET", "/admin/incidents") as reply:
        assert reply.status == 401


async def test_a_death_is_on_record_without_what_was_said(two: Scene, folder: Path) -> None:
    await two.serving()
    call = echo(60, token_delay_ms=10)
    request = asyncio.create_task(two.exact(call))
    await two.running(1)
    busy = next(worker for worker in (await two.server.status())["workers"] if worker["running"])
    two.signal(busy, "decoder_pid", SIGSEGV)
    await request
    async with wire.call(two.port, "GET", "/admin/incidents", key=ADMIN_KEY) as reply:
        newest = (await reply.json())["data"][0]
    assert (newest["what"], newest["worker"], newest["kind"]) == ("decoder", busy["index"], "signal")
    assert "SIGSEGV" in newest["reason"]
    assert newest["turns"][0]["doing"] in ("decode", "prefill", "accepted")
    assert newest["board"]["state"]
    assert newest["ring"]
    assert not {"prompt", "output"} & newest["turns"][0].keys()

    async def is_written() -> bool:
        return newest["file"] in os.listdir(folder / "incidents")

    await two.until(is_written)
    assert json.loads((folder / "incidents" / newest["file"]).read_text())["reason"] == newest["reason"]
    await two.idle()


async def test_a_sleeper_is_ready_is_woken_once_and_loses_nobody(tmp_path: Path) -> None:
    with running(tmp_path, unload_idle_s=0.2, decoder={"start_delay_s": 0.2}) as scene:
        await scene.serving()
        for round_ in range(3):
            await scene.until(lambda: is_asleep(scene))
            assert (await scene.fetch("/readyz"))[0] == 200
            assert (await scene.fetch("/health"))[2]["status"] == "ok"
            await asyncio.gather(*(scene.exact(echo(10, is_streamed=index % 2 > 0)) for index in range(12)))
            assert len(scene.stage.events("START")) == round_ + 2
        assert (await scene.worker())["restarts"] == 0


async def test_requests_that_race_with_the_unloading_are_served(tmp_path: Path) -> None:
    with running(tmp_path, unload_idle_s=0.05) as scene:
        await scene.serving()
        for _ in range(25):
            await asyncio.gather(*(scene.exact(echo(2)) for _ in range(3)))
            await asyncio.sleep(0.04)
        await scene.idle_or_asleep()


async def test_a_sleeper_that_can_not_be_loaded_is_told_and_recovers(tmp_path: Path) -> None:
    with running(tmp_path, unload_idle_s=0.2) as scene:
        await scene.serving()
        await scene.until(lambda: is_asleep(scene))
        scene.stage.script(start_exit=3)
        answer = await scene.ask(echo(5, is_streamed=False))
        assert answer.error.startswith("503 ")
        scene.stage.script()
        await scene.health(200)
        await scene.exact(echo(5))


async def is_asleep(scene: Scene) -> bool:
    return bool((await scene.worker())["state"] == "unloaded")
