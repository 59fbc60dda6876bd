"""A client that leaves, or stops reading, in every phase; over the application with all its middleware."""

import asyncio
from typing import Any

import pytest

from server import ticker
from server.app import build_app
from tests.fakes.http import Call, call, ids_of, service_of
from tests.fakes.pool import FakePool, Script

COMPLETIONS = "/v1/completions"
KEY = "k" * 8
RUNNER = "_call_in_runner_task"  # anyio's own task


def assembled(pool: FakePool, **values: Any) -> tuple[Any, Any]:
    """The application with everything on, and its service."""
    service = service_of(pool, api_key=(KEY,), cors_origins=("*",), **values)
    return build_app(service), service


def request_to(app: Any, **fields: Any) -> Call:
    headers = [("authorization", f"Bearer {KEY}"), ("origin", "https://example.org")]
    return Call(app, "POST", COMPLETIONS, {"prompt": "x", "max_tokens": 400, **fields}, headers=headers)


async def assert_clean(pool: FakePool, service: Any) -> None:
    """Nothing is left of the request but this test's own task."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not pool.live_turns and not pool.reserved
    assert not service.live and len(service.ticker) == 0
    others = [task for task in asyncio.all_tasks() - {asyncio.current_task()} if RUNNER not in repr(task)]
    assert not others, others


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("phase", ["queued", "prefill", "first token", "mid-stream", "last token"])
async def test_a_client_that_leaves_cancels_its_turns(stream: bool, n: int, phase: str) -> None:
    pool = FakePool(Script(by_hand=True))
    app, service = assembled(pool)
    async with request_to(app, stream=stream, n=n) as request:
        await pool.submitted(n)
        turns = list(pool.turns)
        if phase != "queued":
            for turn in turns:
                pool.start_turn(turn)
        if phase in ("first token", "mid-stream", "last token"):
            for turn in turns:
                pool.give(turn, ids_of("x" * {"first token": 1, "mid-stream": 200, "last token": 400}[phase]))
            await asyncio.sleep(0)
        request.leave()
        await request.finished()
    assert all(turn.is_cancelled for turn in turns)
    assert b"[DONE]" not in request.body and b'finish_reason":"' not in request.body
    await assert_clean(pool, service)


async def test_a_choice_that_has_finished_is_not_cancelled_with_its_siblings() -> None:
    pool = FakePool(Script(by_hand=True))
    app, service = assembled(pool)
    async with request_to(app, stream=True, n=2) as request:
        await pool.submitted(2)
        pool.give(pool.turns[0], ids_of("a"))
        pool.finish(pool.turns[0])
        await request.text_holds('finish_reason":"stop')
        request.leave()
    assert [turn.is_cancelled for turn in pool.turns] == [False, True]
    await assert_clean(pool, service)


async def test_leaving_while_the_body_is_still_coming_is_no_error() -> None:
    pool = FakePool()
    app, service = assembled(pool)
    async with Call(
        app, "POST", COMPLETIONS, b"", headers=[("authorization", f"Bearer {KEY}")], parts=[b"{", b""]
    ) as request:
        request._inbox.get_nowait()
        request.leave()
    assert not request.messages or not pool.turns
    await assert_clean(pool, service)


async def test_leaving_while_a_long_prompt_is_tokenised_submits_nothing() -> None:
    pool = FakePool(context=1_000_000)
    app, service = assembled(pool)
    async with request_to(app, prompt="word " * 100_000) as request:
        while not pool.reserved:  # noqa: ASYNC110
            await asyncio.sleep(0)
        request.leave()
    assert not pool.turns
    await assert_clean(pool, service)


async def test_a_disconnect_after_the_end_is_not_a_disconnect() -> None:
    pool = FakePool(Script(ids=ids_of("abc")))
    app, service = assembled(pool)
    async with request_to(app, stream=True) as request:
        await request.text_holds("[DONE]")
        request.leave()
    assert "ringfence_clients_gone_total 0.0" in service.metrics.text().decode()
    await assert_clean(pool, service)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_does_not_read_is_dropped_after_the_stall_limit(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticker, "INTERVAL_S", 0.005)
    pool = FakePool(Script(by_hand=True))
    app, service = assembled(pool, stall_limit_s=0.05)
    async with request_to(app, stream=stream) as request:
        turn = await pool.submitted()
        if stream:
            pool.give(turn, ids_of("a"))
            await request.text_holds("a")
            request.blocks = True
            pool.give(turn, ids_of("b"))
        else:
            pool.give(turn, ids_of("a"))
            await asyncio.sleep(0)
            pool.finish(turn)
            await request.started()
            request.blocks = not request.body
    if stream:
        assert turn.is_cancelled and request.is_aborted
        assert "slow_client" in service.metrics.text().decode()
    await assert_clean(pool, service)


async def test_a_client_slower_than_the_decoder_gets_merged_chunks_and_everything() -> None:
    pool = FakePool(Script(by_hand=True))
    app, service = assembled(pool)
    async with request_to(app, stream=True) as request:
        turn = await pool.submitted()
        pool.give(turn, ids_of("a"))
        await request.text_holds("a")
        request.blocks = True
        for letter in "bcdefgh":
            pool.give(turn, ids_of(letter))
            await asyncio.sleep(0)
        pool.finish(turn)
        request.unblock()
        await request.finished()
    bodies = [message["body"] for message in request.messages[1:]]
    assert len(bodies) <= 4
    assert "".join(c["text"] for event in request.events[:-1] for c in event["choices"]) == "abcdefgh"
    await assert_clean(pool, service)


async def test_leaving_a_queue_again_and_again_leaves_nothing() -> None:
    pool = FakePool(Script(by_hand=True))
    app, service = assembled(pool)
    for _ in range(100):
        async with request_to(app, stream=True) as request:
            await pool.submitted(len(pool.turns) + 1)
            request.leave()
    assert all(turn.is_cancelled for turn in pool.turns) and len(pool.turns) == 100
    await assert_clean(pool, service)


async def test_a_cancelled_request_task_cancels_its_turn_and_passes_the_cancellation_on() -> None:
    pool = FakePool(Script(by_hand=True))
    app, service = assembled(pool)
    request = request_to(app, stream=True)
    async with request:
        turn = await pool.submitted()
        assert request.task is not None
        request.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request.task
    assert turn.is_cancelled
    await assert_clean(pool, service)


async def test_an_exception_while_the_answer_is_made_frees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr("server.generation.timings_of", broken)
    pool = FakePool()
    app, service = assembled(pool)
    answer = await call(app, "POST", COMPLETIONS, {"prompt": "x"}, headers=[("authorization", f"Bearer {KEY}")])
    assert answer.status == 500 and b"secret" not in answer.body
    assert answer.json["error"]["code"] == "internal_error"
    await assert_clean(pool, service)
