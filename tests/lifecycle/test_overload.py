"""Bounds: what is over them is told at once, what is under them is served, and every place comes back (B17, B53, B55)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from signal import SIGKILL
from typing import Any

import psutil
import pytest

from bench.chaos import wire
from bench.chaos.answers import Progress
from tests.fakes.echo import echo_prompt
from tests.lifecycle.scene import Scene, echo, running

SLOTS, QUEUE = 2, 3
LIMIT = SLOTS + QUEUE
TOO_MANY_BYTES = 64 << 20


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[Scene]:
    with running(folder, slots=SLOTS, queue_requests=QUEUE, queue_tokens=2000, deadline_s=30, deaths_limit=50) as scene:
        yield scene


async def test_what_is_over_the_limit_is_refused_at_once_and_the_rest_is_served(small: Scene) -> None:
    await small.serving()
    before = len(small.stage.events("GEN"))
    memory = psutil.Process(small.server.pid).memory_info().rss
    accepted = [asyncio.create_task(small.exact(echo(60, token_delay_ms=20))) for _ in range(LIMIT)]
    await small.running(SLOTS)
    await small.waiting(QUEUE)
    took: list[float] = []

    async def refused() -> None:
        began_s = time.monotonic()
        async with wire.call(small.port, "POST", "/v1/completions", echo(5).body) as reply:
            took.append(time.monotonic() - began_s)
            assert reply.status == 429
            assert int(reply.headers["retry-after"]) >= 1
            error = (await reply.json())["error"]
        assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")

    for _ in range(2):
        await asyncio.gather(*(refused() for _ in range(100)))
    assert sorted(took)[len(took) // 2] < 0.5, "refusals of 100 at once, on a loaded machine"
    status = await small.server.status()
    assert (status["running"], status["queue"]["requests"]) == (SLOTS, QUEUE)
    await asyncio.gather(*accepted)
    assert len(small.stage.events("GEN")) == before + LIMIT
    assert psutil.Process(small.server.pid).memory_info().rss - memory < TOO_MANY_BYTES
    await small.exact(echo(5))
    await small.idle()


async def test_prompts_are_bounded_by_tokens_too(small: Scene) -> None:
    await small.serving()
    running_ = [asyncio.create_task(small.exact(echo(60, token_delay_ms=10))) for _ in range(SLOTS)]
    await small.running(SLOTS)
    long = asyncio.create_task(small.exact(echo(5, length=1500)))
    await small.waiting(1)
    async with wire.call(small.port, "POST", "/v1/completions", echo(5, length=1500).body) as reply:
        assert reply.status == 429
        assert "prompt tokens" in (await reply.json())["error"]["message"]
    await asyncio.gather(*running_, long)
    await small.idle()


# ---- every way for a request to end gives its place back -------------------------------------------------------------


async def killed(scene: Scene) -> None:
    requests = [asyncio.create_task(scene.exact(echo(40, token_delay_ms=10))) for _ in range(LIMIT)]
    await scene.running(SLOTS)
    scene.signal(await scene.worker(), "pid", SIGKILL)
    await asyncio.gather(*requests, return_exceptions=True)


async def engine_errors(scene: Scene) -> None:
    scene.stage.script(error="out of luck", error_at=2)
    for answer in await asyncio.gather(*(scene.ask(echo(40)) for _ in range(LIMIT))):
        assert answer.error, answer
    scene.stage.script()


async def refusals_by_the_decoder(scene: Scene) -> None:
    scene.stage.script(error="bad request")
    for answer in await asyncio.gather(*(scene.ask(echo(40)) for _ in range(LIMIT))):
        assert answer.error, answer
    scene.stage.script()


async def leaving_while_running_and_waiting(scene: Scene) -> None:
    async with AsyncExitStack() as stack:
        for index in range(SLOTS):
            reply = await stack.enter_async_context(
                wire.call(scene.port, "POST", "/v1/completions", echo(500, token_delay_ms=20).body)
            )
            assert reply.status == 200, index
        waiting = [asyncio.create_task(scene.ask(echo(500))) for _ in range(QUEUE)]
        await scene.waiting(QUEUE)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await scene.waiting(0)


async def operators_restart(scene: Scene) -> None:
    requests = [asyncio.create_task(scene.exact(echo(30, token_delay_ms=10))) for _ in range(LIMIT)]
    await scene.running(SLOTS)
    assert (await scene.act(0, "restart"))[0] == 200
    await asyncio.gather(*requests)


async def unreadable_bodies(scene: Scene) -> None:
    bodies: list[dict[str, Any]] = [
        {"prompt": {}},
        {"prompt": [10**9]},
        {"prompt": echo_prompt(1, 4000)},
        {"prompt": "x", "n": 9999},
    ]
    for body in bodies:
        async with wire.call(scene.port, "POST", "/v1/completions", body) as reply:
            assert reply.status == 400


ENDS = (
    killed,
    engine_errors,
    refusals_by_the_decoder,
    leaving_while_running_and_waiting,
    operators_restart,
    unreadable_bodies,
)


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_after_each_way_to_end_all_places_are_free(small: Scene, end: Callable[[Scene], Awaitable[None]]) -> None:
    await small.serving()
    await end(small)
    await small.idle()
    full = [asyncio.create_task(small.exact(echo(30, token_delay_ms=10))) for _ in range(LIMIT)]
    await small.running(SLOTS)
    await small.waiting(QUEUE)
    assert (await small.ask(echo(5))).error.startswith("429 ")
    await asyncio.gather(*full)
    await small.idle()


async def test_a_deadline_gives_the_place_back(tmp_path: Path) -> None:
    with running(tmp_path, slots=1, queue_requests=4, deadline_s=0.3, decoder={"token_delay_s": 0.02}) as scene:
        await scene.serving()
        first = asyncio.create_task(scene.exact(echo(60)))
        await scene.running(1)
        for answer in await asyncio.gather(*(scene.ask(echo(5, is_streamed=False)) for _ in range(4))):
            assert answer.error.startswith("503 queue_deadline")
        await first
        await scene.idle()
        assert len(scene.stage.events("GEN")) == 1


async def test_clients_that_do_not_read_slow_nobody_and_are_dropped(tmp_path: Path) -> None:
    slow, normal = 10, 40
    with running(
        tmp_path,
        slots=slow + normal,
        ring_records=1,  # rounded up to the least there is
        stall_limit_s=1.0,
        model_name="x" * 4000,  # in every chunk, so that the sockets' buffers are soon full
        decoder={"token_delay_s": 0.03},
        connection_limit=200,
    ) as scene:
        await scene.serving()
        memory = psutil.Process(scene.server.pid).memory_info().rss
        alone_s = await timed(scene, normal)
        async with AsyncExitStack() as stack:
            for _ in range(slow):
                body = echo(1900, token_delay_ms=5).body
                reply = await stack.enter_async_context(
                    wire.call(scene.port, "POST", "/v1/completions", body, receive_bytes=4096, buffer_bytes=2048)
                )
                assert reply.status == 200
            beside_s = await timed(scene, normal)

            async def are_dropped() -> bool:
                return bool((await scene.server.status())["running"] == 0)

            await scene.until(are_dropped)
        assert beside_s < 3 * alone_s + 1.0, (beside_s, alone_s)
        assert psutil.Process(scene.server.pid).memory_info().rss - memory < TOO_MANY_BYTES
        cancelled = [event for event in scene.stage.events("END") if event["finish"] == "cancel"]
        assert len(cancelled) == slow, "their generations were stopped"
        await scene.exact(echo(10))
        await scene.idle()


async def timed(scene: Scene, count: int) -> float:
    """Time that so many requests take together."""
    began_s = time.monotonic()
    progress = Progress()
    await asyncio.gather(*(scene.exact(echo(25), progress) for _ in range(count)))
    return time.monotonic() - began_s
