"""Health tells the truth: each kind of fault is seen in time, named, answered at once, and over by itself (B20, B21, B24,
B28, B32, B42)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL, SIGSEGV, SIGSTOP, Signals
from typing import Any

import pytest

from bench.chaos import wire
from tests.lifecycle.scene import Scene, echo, running

DEATH_S = 0.5
STOP_S = 2.5  # two looks of the watchdog at an idle worker, a second apart
HANG_S = 2.0
SLACK_S = 1.5  # a loaded machine

# The decoder takes its time, so that a poller sees that it is away.
SLOW_START = {"start_delay_s": 0.4}


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[Scene]:
    with running(folder, decoder=SLOW_START, hang_limit_s=HANG_S, deaths_limit=50) as scene:
        yield scene


@pytest.mark.parametrize(
    ("whose", "number", "limit_s"),
    [
        ("pid", SIGKILL, DEATH_S),
        ("pid", SIGSEGV, DEATH_S),
        ("pid", SIGSTOP, STOP_S),
        ("decoder_pid", SIGKILL, DEATH_S),
        ("decoder_pid", SIGSEGV, DEATH_S),
        ("decoder_pid", SIGSTOP, STOP_S),
    ],
)
async def test_a_dead_or_stopped_process_is_seen_in_time_and_its_place_is_taken(
    one: Scene, whose: str, number: Signals, limit_s: float
) -> None:
    await one.serving()
    one.signal(await one.worker(), whose, number)
    await outage(one, limit_s)


@pytest.mark.parametrize("happening", ["spin_at", "hang_at"])
async def test_a_decoder_that_moves_no_token_is_seen_within_the_hang_limit(one: Scene, happening: str) -> None:
    await one.serving()
    orders = {happening: 3, "fresh_only": 1}
    request = asyncio.create_task(one.exact(echo(10, length=40, is_streamed=True, **orders)))
    await one.running(1)
    await outage(one, HANG_S + 1.0)
    answer = await request
    assert answer.moves == 1


async def outage(scene: Scene, limit_s: float) -> None:
    """From the fault on: health turns, names worker and reason; requests are refused at once; then all is well."""
    body = await scene.health(503, limit_s=limit_s + SLACK_S)
    worker = body["worker"][0]
    assert (worker["index"], worker["serving"]) == (0, False)
    assert worker["reason"], worker
    assert body["workers_serving"] == 0

    began_s = time.monotonic()
    async with wire.call(scene.port, "POST", "/v1/completions", echo(5).body) as reply:
        took_s = time.monotonic() - began_s
        refusal = await reply.json()
    if reply.status != 200:  # it was back already on a slow machine
        assert reply.status == 503
        assert int(reply.headers["retry-after"]) >= 1
        assert refusal["error"]["code"] == "no_workers"
        assert took_s < 1.0
    assert (await scene.fetch("/livez"))[0] == 200

    await scene.health(200)
    assert (await scene.fetch("/readyz"))[0] == 200
    await scene.exact(echo(20))
    await scene.idle()


async def test_kills_without_traffic_and_during_the_restart_leave_no_trace_in_health(one: Scene) -> None:
    worker = (await one.serving())["workers"][0]
    for index in range(6):
        whose = "pid" if index % 2 else "decoder_pid"
        one.signal(worker, whose)
        if index >= 4:  # and once more while it comes back
            killed = worker[whose]

            async def coming_back(whose: str = whose, killed: int = killed) -> dict[str, Any] | None:
                found = await one.worker()
                is_coming = found["state"] in ("starting", "loading") and found["pid"] and found[whose] != killed
                return found if is_coming else None

            worker = await one.until(coming_back)
            whose = "pid"
            one.signal(worker, whose)
        worker = await one.replaced(worker, whose)
        assert (await one.fetch("/health"))[0] == 200
    await one.exact(echo(20))
    await one.idle()


async def test_engine_errors_in_a_row_cost_one_decoder_and_refusals_none(one: Scene) -> None:
    await one.serving()
    starts = len(one.stage.events("START"))
    one.stage.script(rules=[{"when": {"gen": [1, 2, 3]}, "times": 3, "error": "device error", "error_at": 0}])
    one.signal(await one.worker(), "decoder_pid")  # a decoder that counts from 1
    await one.health(503)
    await one.serving()
    for _ in range(3):
        answer = await one.ask(echo(10, is_streamed=False))
        assert answer.error.startswith("500 decoder_error")
    one.stage.script()
    await one.serving()
    await one.exact(echo(10))
    assert len(one.stage.events("START")) == starts + 2

    for _ in range(6):
        async with wire.call(one.port, "POST", "/v1/completions", {"prompt": [1_000_000]}) as reply:
            assert reply.status == 400
    assert len(one.stage.events("START")) == starts + 2
    await one.idle()


async def test_loading_is_told_and_started_once(tmp_path: Path) -> None:
    with running(tmp_path, decoder={"start_delay_s": 1.5, "load_steps": 10}, start_limit_s=1.0) as scene:
        seen = set()
        while (await scene.fetch("/readyz"))[0] == 503:
            status, headers, body = await scene.fetch("/health")
            worker = body["worker"][0]
            if status == 503 and worker["state"] == "loading":
                seen.add(worker["load_percent"])
                assert int(headers["retry-after"]) >= 1
            assert (await scene.fetch("/livez"))[0] == 200
            await asyncio.sleep(0.02)
        assert len(seen) > 2
        await scene.exact(echo(10))
        assert len(scene.stage.events("START")) == 1
        assert (await scene.worker())["restarts"] == 0


async def test_a_decoder_that_never_starts_counts_as_failed_and_is_tried_on(tmp_path: Path) -> None:
    with running(tmp_path, deaths_limit=3) as scene:
        await scene.serving()
        scene.stage.script(start_exit=3, start_stderr="no such device\n")
        scene.signal(await scene.worker(), "decoder_pid")

        async def is_fatal() -> bool:
            return bool((await scene.worker())["state"] == "fatal")

        await scene.until(is_fatal)
        assert (await scene.fetch("/health"))[2]["worker"][0]["state"] == "fatal"
        scene.stage.wait_for("START", len(scene.stage.events("START")) + 2)  # nobody gave up
        scene.stage.script()
        await scene.health(200)
        await scene.exact(echo(10))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with running(tmp_path_factory.mktemp("three"), workers=3, backoff_first_s=1.0, backoff_cap_s=1.0) as scene:
        yield scene


async def test_one_stopped_worker_of_three_degrades_and_gets_nothing(three: Scene) -> None:
    await three.serving()
    three.signal(await three.worker(1), "pid", SIGSTOP)

    async def is_degraded() -> bool:
        status, _, body = await three.fetch("/health")
        return bool(status == 200 and body["status"] == "degraded" and body["workers_serving"] == 2)

    await three.until(is_degraded, limit_s=STOP_S + SLACK_S)
    assert (await three.fetch("/readyz"))[0] == 200
    old = {worker["decoder_pid"] for worker in (await three.server.status())["workers"] if worker["index"] != 1}
    before = len(three.stage.events("GEN"))
    answers = await asyncio.gather(*(three.exact(echo(10)) for _ in range(8)))
    assert all(answer.moves == 0 for answer in answers)
    assert {event["pid"] for event in three.stage.events("GEN")[before:]} <= old
    await three.serving()
    fresh = (await three.worker(1))["decoder_pid"]
    await asyncio.gather(*(three.exact(echo(10)) for _ in range(12)))
    assert fresh in {event["pid"] for event in three.stage.events("GEN")[before:]}
    await three.idle()
