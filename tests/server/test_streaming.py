"""Event streams: framing, what comes when, and that they say what whole answers say."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server import client, streaming, ticker
from tests.fakes.http import Call, app_of, call, ids_of, text_of
from tests.fakes.pool import FakePool, Script
from workers.errors import DecoderRefused, NonFinite, PoisonRequest, WorkerLost
from workers.request import FinishReason

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    return {**prompt, "stream": True, **fields}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes fifty times as fast for what is looked at now and then."""
    monkeypatch.setattr(ticker, "INTERVAL_S", 0.002)
    monkeypatch.setattr(streaming, "HEADERS_AFTER_S", 0.02)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_is_framed_and_ends_with_done(path: str) -> None:
    answer = await call(app_of(FakePool(Script(ids=ids_of("hello")))), "POST", path, body(path))
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "x-ringfence-worker" in answer.headers
    events = answer.events
    assert events[-1] == "[DONE]"
    assert len({event["id"] for event in events[:-1]}) == 1
    assert text_of(events) == "hello"
    reasons = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]]
    assert reasons.count(None) == len(reasons) - 1 and reasons[-1] == "stop"
    assert "timings" in events[-2]


async def test_the_first_chat_chunk_carries_the_role() -> None:
    answer = await call(app_of(FakePool(Script(ids=ids_of("a")))), "POST", CHAT, body(CHAT))
    assert answer.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert answer.events[1]["choices"][0]["delta"] == {"content": "a"}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("include", [True, False, None])
@pytest.mark.parametrize("max_tokens", [1, 8])
async def test_usage_comes_exactly_when_asked_for(path: str, n: int, include: bool | None, max_tokens: int) -> None:
    app = app_of(FakePool(Script(ids=ids_of("hello"))))
    options = {} if include is None else {"stream_options": {"include_usage": include}}
    stream = await call(app, "POST", path, body(path, n=n, max_tokens=max_tokens, **options))
    whole = await call(app, "POST", path, body(path, n=n, max_tokens=max_tokens, stream=False))
    events = stream.events[:-1]
    empty = [event for event in events if event["choices"] == []]
    if not include:
        assert not empty and not any("usage" in event for event in events)
        return
    assert empty == [events[-1]]
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["usage"] == whole.json["usage"]


@settings(max_examples=60, deadline=None)
@given(
    text=st.text(alphabet="aSTOP é😀", max_size=24),
    stop=st.sampled_from([None, "STOP", ["P", "OP"], "é"]),
    batch=st.integers(1, 9),
    max_tokens=st.integers(1, 40),
)
def test_a_stream_joined_is_the_whole_answer(text: str, stop: Any, batch: int, max_tokens: int) -> None:
    async def both() -> tuple[Any, Any]:
        app = app_of(FakePool(Script(ids=ids_of(text), batch=batch)))
        fields: dict[str, Any] = {"max_tokens": max_tokens, **({} if stop is None else {"stop": stop})}
        stream = await call(app, "POST", COMPLETIONS, body(COMPLETIONS, **fields))
        whole = await call(app, "POST", COMPLETIONS, body(COMPLETIONS, stream=False, **fields))
        return stream.events, whole.json

    events, answer = asyncio.run(both())
    choice = answer["choices"][0]
    assert text_of(events) == choice["text"]
    assert events[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert events[-2]["timings"]["predicted_n"] == answer["usage"]["completion_tokens"]


async def test_tokens_that_came_together_leave_in_one_message() -> None:
    pool = FakePool(Script(by_hand=True))
    async with Call(app_of(pool), "POST", COMPLETIONS, body(COMPLETIONS)) as request:
        turn = await pool.submitted()
        pool.give(turn, ids_of("several"))
        await request.text_holds("several")
        pool.finish(turn)
    assert len(request.messages) == 3  # head, tokens, end


async def test_choices_are_interleaved_by_index_and_each_finishes_once() -> None:
    pool = FakePool()
    pool.scripts.extend([Script(ids=ids_of("first")), Script(ids=ids_of("second, longer"))])
    answer = await call(app_of(pool), "POST", CHAT, body(CHAT, n=2))
    assert text_of(answer.events, 0) == "first"
    assert text_of(answer.events, 1) == "second, longer"
    finished = [c["index"] for e in answer.events[:-1] for c in e["choices"] if c["finish_reason"] is not None]
    assert sorted(finished) == [0, 1]


async def test_a_stop_string_cancels_at_once_and_does_not_wait_long_for_the_decoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.output.SETTLE_S", 0.01)
    pool = FakePool(Script(by_hand=True, ends_on_cancel=False))
    async with Call(app_of(pool), "POST", COMPLETIONS, body(COMPLETIONS, stop="END")) as request:
        turn = await pool.submitted()
        pool.give(turn, ids_of("abcEND and more"))
        await request.finished()
    assert turn.is_cancelled
    assert text_of(request.events) == "abc"
    finish = request.events[-2]
    assert finish["choices"][0]["finish_reason"] == "stop" and finish["timings"]["predicted_n"] == 6


async def test_the_text_before_a_stop_string_does_not_wait_for_the_decoders_figures() -> None:
    pool = FakePool(Script(by_hand=True, ends_on_cancel=False))
    async with Call(app_of(pool), "POST", COMPLETIONS, body(COMPLETIONS, stop="END")) as request:
        turn = await pool.submitted()
        pool.give(turn, ids_of("abcEND"))
        await request.text_holds("abc")
        assert 'finish_reason":"stop' not in request.body.decode()
        pool.finish(turn, FinishReason.CANCEL)
    assert request.events[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (WorkerLost(0, "killed"), 503),
        (NonFinite(), 500),
        (PoisonRequest(2), 500),
        (DecoderRefused("grammar: not valid"), 400),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_an_error_before_the_first_token_is_a_plain_answer(error: Any, status: int, path: str) -> None:
    answer = await call(app_of(FakePool(Script(ids=(), error=error))), "POST", path, body(path))
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert isinstance(answer.json["error"]["message"], str)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("count", [1, 50])
async def test_an_error_in_mid_stream_is_one_event_and_the_end(count: int, n: int) -> None:
    pool = FakePool(Script(ids=ids_of("x" * count), error=WorkerLost(1, "killed"), finish=None))
    request = body(COMPLETIONS, n=n, stream_options={"include_usage": True}, max_tokens=100)
    answer = await call(app_of(pool), "POST", COMPLETIONS, request)
    assert answer.status == 200
    *chunks, last = answer.events
    assert last["error"]["code"] == "worker_lost" and last["error"]["type"] == "server_error"
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    assert all(chunk["usage"] is None for chunk in chunks)
    assert answer.messages[-1].get("more_body", False) is False
    assert not pool.live_turns


@pytest.mark.usefixtures("quick")
async def test_headers_are_sent_while_nothing_has_come_and_comments_follow() -> None:
    pool = FakePool(Script(by_hand=True))
    app = app_of(pool, keepalive_s=0.01)
    async with Call(app, "POST", COMPLETIONS, body(COMPLETIONS)) as request:
        turn = await pool.submitted()
        head = await request.started()
        assert head["status"] == 200
        assert b"x-ringfence-worker" not in dict(head["headers"])
        await request.text_holds(": keep-alive\n\n")
        pool.give(turn, ids_of("late"))
        await request.text_holds("late")
        pool.finish(turn)
    assert text_of(request.events) == "late" and request.events[-1] == "[DONE]"


@pytest.mark.usefixtures("quick")
async def test_an_error_after_early_headers_is_an_event() -> None:
    pool = FakePool(Script(by_hand=True))
    async with Call(app_of(pool, keepalive_s=0.0), "POST", CHAT, body(CHAT)) as request:
        turn = await pool.submitted()
        await request.started()
        turn.end(error=NonFinite())
    assert request.status == 200
    assert [event["error"]["code"] for event in request.events] == ["decoder_nonfinite"]


@pytest.mark.usefixtures("quick")
async def test_without_keepalive_a_silent_stream_stays_silent() -> None:
    pool = FakePool(Script(by_hand=True))
    async with Call(app_of(pool, keepalive_s=0.0), "POST", COMPLETIONS, body(COMPLETIONS)) as request:
        turn = await pool.submitted()
        await request.started()
        pool.give(turn, ids_of("a"))
        await request.text_holds("a")
        pool.finish(turn)
    assert b":" not in request.body[:1]


async def test_no_template_is_needed_for_text_that_looks_like_one() -> None:
    tricky = '"},{"\\ue000text\ue000\u2028</s>'
    answer = await call(
        app_of(FakePool(Script(ids=ids_of(tricky)))), "POST", COMPLETIONS, body(COMPLETIONS, max_tokens=99)
    )
    assert text_of(answer.events) == tricky


def test_the_ticker_is_the_clients_only_clock() -> None:
    assert not hasattr(client, "INTERVAL_S")
