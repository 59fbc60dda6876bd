"""A death costs time, not requests: streams go on at any token, and where they can't they end in one clear error (B17, B25,
B34, B60)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from bench.chaos import wire
from bench.chaos.answers import Progress
from bench.chaos.scripted import EchoCall
from tests.lifecycle.scene import Scene, echo, running

LAST = 60


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Scene]:
    with running(folder, workers=2, deaths_limit=50, decoder={"crash_signal": 11}, deadline_s=20) as scene:
        yield scene


@pytest.mark.parametrize("whose", ["pid", "decoder_pid"])
@pytest.mark.parametrize("at", [0, 1, 50, LAST - 1])
async def test_a_kill_at_any_token_leaves_no_seam(two: Scene, whose: str, at: int) -> None:
    await two.serving()
    progress = Progress()
    calls = [echo(LAST), echo(LAST, is_streamed=False)]
    first = len(two.stage.events("GEN")) + 1
    two.stage.script(rules=[{"when": {"total_gen": [first, first + 1]}, "stall_at": at}])
    requests = []
    for count, call in enumerate(calls):
        requests.append(asyncio.create_task(two.exact(call, progress)))

        async def has_arrived(due: int = first + count) -> bool:
            return len(two.stage.events("GEN")) >= due

        await two.until(has_arrived)

    async def has_come() -> bool:
        return progress.pieces >= min(at, 1)

    await two.until(has_come)
    for worker in (await two.server.status())["workers"]:
        if worker["running"]:
            two.signal(worker, whose)
    answers = await asyncio.gather(*requests)
    assert all(answer.moves >= 1 for answer in answers)
    two.stage.script()
    await two.idle()


async def test_32_requests_at_every_waiting_point_survive_their_worker(two: Scene) -> None:
    await two.serving()
    orders: list[dict[str, int]] = [{}, {"prefill_ms": 400}, {"stall_at": 3, "fresh_only": 1}, {"token_delay_ms": 20}]
    calls = [echo(20 + index, is_streamed=index % 3 > 0, **orders[index % 4]) for index in range(32)]
    requests = [asyncio.create_task(two.exact(call)) for call in calls]
    await two.running(8)
    two.signal(await two.worker(0), "pid")
    stalled = asyncio.gather(*requests)
    while not stalled.done():  # those that stall on the other worker need its death too
        try:
            await asyncio.wait_for(asyncio.shield(stalled), 1.0)
        except TimeoutError:
            for worker in (await two.serving())["workers"]:
                two.signal(worker, "decoder_pid")
                await two.replaced(worker, "decoder_pid")
    await two.idle()


async def test_a_chat_goes_on_after_a_death_as_if_there_were_none(two: Scene) -> None:
    await two.serving()
    body = {"messages": [{"role": "user", "content": "tell"}], "max_tokens": 80}
    whole = await two.ask(raw("/v1/chat/completions", body))
    two.stage.script(rules=[{"when": {"resumed": False}, "stall_at": 50}])
    progress = Progress()
    request = asyncio.create_task(two.ask(raw("/v1/chat/completions", {**body, "stream": True}), progress))

    async def has_come() -> bool:
        return progress.pieces > 0

    await two.until(has_come)
    busy = next(worker for worker in (await two.server.status())["workers"] if worker["running"])
    two.signal(busy, "decoder_pid")
    answer = await request
    two.stage.script()
    assert (answer.fault, answer.text, answer.moves) == ("", whole.text, 1)
    assert len(whole.text) == 160
    await two.idle()


@pytest.mark.parametrize("at", [0, 1, 50])
async def test_poison_ends_a_stream_in_one_error_and_hurts_nobody(two: Scene, at: int) -> None:
    await two.serving()
    others = [asyncio.create_task(two.exact(echo(80))) for _ in range(3)]
    call = echo(LAST, crash_at=at)
    answer = await two.ask(call)
    assert "poison_request" in answer.error
    assert answer.finish is None
    assert not answer.usage
    assert not call.judge(answer).difference
    await asyncio.gather(*others)
    await two.serving()
    whole = await two.ask(echo(LAST, is_streamed=False, crash_at=at))
    assert whole.error.startswith("500 poison_request")
    assert two.server.exit_code() is None
    await two.idle()


@pytest.mark.parametrize("at", [0, 20])
async def test_the_sdk_raises_when_a_stream_can_not_go_on(two: Scene, at: int) -> None:
    await two.serving()
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{two.port}/v1", api_key="none", max_retries=0)
    call = echo(LAST, crash_at=at)
    reasons = []
    with pytest.raises(openai.APIError) as raised:
        stream = await client.completions.create(
            model="ringfence-tiny", prompt=call.prompt, max_tokens=LAST, stream=True
        )
        async for chunk in stream:
            reasons += [choice.finish_reason for choice in chunk.choices]
    assert raised.value.code == "poison_request"
    assert not any(reasons)
    await client.close()
    await two.idle()


async def test_an_error_event_is_the_last_thing_on_the_connection(two: Scene) -> None:
    await two.serving()
    async with wire.call(two.port, "POST", "/v1/completions", echo(LAST, crash_at=5).body) as reply:
        assert reply.status == 200
        events = [event async for event in reply.events()]
        assert await reply.reader.read() == b""
    assert [event for event in events if '"error"' in event] == events[-1:]
    assert "[DONE]" not in events
    await two.idle()


async def test_a_request_whose_worker_does_not_come_back_ends_at_its_deadline(tmp_path: Path) -> None:
    with running(tmp_path, deadline_s=1.0, deaths_limit=2) as scene:
        await scene.serving()
        call = echo(LAST, stall_at=5)
        request = asyncio.create_task(scene.ask(call))
        await scene.running(1)
        scene.stage.script(start_exit=3)
        scene.signal(await scene.worker(), "decoder_pid")
        answer = await request
        assert "queue_deadline" in answer.error
        assert answer.finish is None
        assert not call.judge(answer).difference


async def test_a_prefix_does_not_draw_requests_to_a_dead_worker(tmp_path: Path) -> None:
    with running(tmp_path, workers=2, slots=24, decoder={"prefix_cache": True}, backoff_first_s=1.0) as scene:
        await scene.serving()
        warm = echo(5, length=600)
        await scene.exact(warm)
        hot = scene.stage.events("GEN")[-1]["pid"]
        again = EchoCall(warm.prompt, 5)
        await scene.exact(again)
        assert scene.stage.events("GEN")[-1]["pid"] == hot, "affinity is what this is about"
        dying = next(worker for worker in (await scene.server.status())["workers"] if worker["decoder_pid"] == hot)
        scene.signal(dying, "pid")

        async def is_seen() -> bool:
            return not (await scene.worker(dying["index"]))["is_serving"]

        await scene.until(is_seen)
        before = len(scene.stage.events("GEN"))
        answers = await asyncio.gather(*(scene.exact(EchoCall(warm.prompt, 5)) for _ in range(24)))
        assert all(answer.moves == 0 for answer in answers)
        assert hot not in {event["pid"] for event in scene.stage.events("GEN")[before:]}
        await scene.serving()
        await scene.exact(EchoCall(warm.prompt, 5))


def raw(path: str, body: dict[str, object]) -> EchoCall:
    """A request of any kind, to be sent and not judged."""
    call = echo(1)
    call.path, call.body = path, body
    return call
