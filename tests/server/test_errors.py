"""Every cause has one answer: status, code, OpenAI's envelope, and nothing of the inside."""

import asyncio
import inspect
from typing import Any

import pytest

from server import failures
from server.app import build_app
from server.badrequest import BadRequest
from server.errors import describe, whole_seconds
from tests.fakes.http import Call, app_of, call, service_of
from tests.fakes.pool import FakePool, Script
from workers import errors
from workers.request import FinishReason

CAUSES: list[tuple[Exception, int, str]] = [
    (BadRequest("Say something.", param="prompt", code="invalid_value"), 400, "invalid_value"),
    (errors.PromptTooLong(600, 512), 400, "context_length_exceeded"),
    (errors.Unsupported("grammar"), 400, "unsupported_parameter"),
    (failures.MalformedRequest(), 400, "malformed_request"),
    (failures.Unauthorized(given=False), 401, "invalid_api_key"),
    (failures.AdminDisabled(), 403, "admin_disabled"),
    (failures.RouteNotFound("GET", "/x"), 404, "unknown_url"),
    (failures.ModelNotFound("gpt", ("tiny",)), 404, "model_not_found"),
    (failures.WorkerNotFound("9", 2), 404, "worker_not_found"),
    (failures.MethodNotAllowed("GET", ("POST",)), 405, "method_not_allowed"),
    (failures.BodiesFull(100), 503, "bodies_full"),
    (failures.BodyTooSlow(30.0), 408, "request_timeout"),
    (errors.SlowClient(61.0), 408, "slow_client"),
    (failures.AdminFailed("restart", "it is running"), 409, "admin_refused"),
    (failures.BodyTooLarge(10), 413, "request_too_large"),
    (failures.UnsupportedMediaType("Content-Type text/plain"), 415, "unsupported_media_type"),
    (errors.Overloaded("requests", 256, 2.5), 429, "queue_full"),
    (failures.HeadersTooLarge(10), 431, "headers_too_large"),
    (errors.DecoderRefused("grammar: no rule in /tmp/x"), 400, "decoder_refused"),
    (errors.DecoderRefused("out of memory at /root/secret"), 500, "decoder_error"),
    (errors.EngineFailed(0, "CUDA error"), 500, "decoder_error"),
    (errors.NonFinite(), 500, "decoder_nonfinite"),
    (errors.PoisonRequest(2), 500, "poison_request"),
    (ValueError("/root/secret"), 500, "internal_error"),
    (errors.NoWorkers(("worker 0: backoff",), 7.0), 503, "no_workers"),
    (errors.DeadlineExceeded(12.0), 503, "queue_deadline"),
    (errors.WorkerLost(1, "/root/secret"), 503, "worker_lost"),
    (errors.ShuttingDown(), 503, "shutting_down"),
    (failures.TooManyConnections(1024), 503, "too_many_connections"),
]


@pytest.mark.parametrize(("error", "status", "code"), CAUSES, ids=lambda value: type(value).__name__)
def test_each_cause_has_its_status_and_code(error: Exception, status: int, code: str) -> None:
    reply = describe(error)
    assert (reply.status, reply.code) == (status, code)
    assert reply.message.endswith(".") and "/root" not in reply.message and "/tmp" not in reply.message
    assert (reply.retry_after_s is not None) == (status in (429, 503))


def test_every_cause_that_exists_is_in_the_table() -> None:
    known = {type(error) for error, _, _ in CAUSES}
    roots = (errors.RingfenceError, failures.Refusal)
    for module in (errors, failures):
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, roots) and kind not in roots:
                assert kind in known, f"{kind.__name__} has no row here, and maybe no answer in server/errors.py"


@pytest.mark.parametrize(("seconds", "whole"), [(0.0, 1), (0.2, 1), (2.0, 2), (2.1, 3), (float("inf"), 60)])
def test_retry_after_is_whole_seconds_and_never_zero(seconds: float, whole: int) -> None:
    assert whole_seconds(seconds) == whole


@pytest.mark.parametrize(
    ("error", "status"), [(error, status) for error, status, _ in CAUSES if isinstance(error, errors.RingfenceError)]
)
async def test_errors_of_the_pool_arrive_in_the_envelope(error: errors.RingfenceError, status: int) -> None:
    pool = FakePool()
    pool.submit_error = error
    answer = await call(app_of(pool), "POST", "/v1/completions", {"prompt": "x"})
    if isinstance(error, errors.SlowClient):
        return
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]
    assert ("retry-after" in answer.headers) == (status in (429, 503))


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "code"),
    [
        ("GET", "/nope", None, (), 404, "unknown_url"),
        ("GET", "/", None, (), 404, "unknown_url"),
        ("GET", "/v1/completions/", None, (), 404, "unknown_url"),
        ("GET", "/v1/completions", None, (), 405, "method_not_allowed"),
        ("DELETE", "/v1/models", None, (), 405, "method_not_allowed"),
        ("POST", "/v1/completions", b"", (), 400, "invalid_json"),
        ("POST", "/v1/completions", b"{", (), 400, "invalid_json"),
        ("POST", "/v1/completions", b"\xff\xfe", (), 400, "invalid_json"),
        ("POST", "/v1/completions", b"[" * 100_000, (), 400, None),
        ("POST", "/v1/completions", b'{"prompt":' + b"[" * 100_000, (), 400, None),
        ("POST", "/v1/completions", b'{"prompt":"x","unknown":' + b"[" * 100_000, (), 400, None),
        ("POST", "/v1/completions", b"[]", (), 400, "invalid_type"),
        ("POST", "/v1/completions", {}, (), 400, "missing_required_parameter"),
        ("POST", "/v1/completions", {"prompt": "x", "temperature": -1}, (), 400, "invalid_value"),
        ("POST", "/v1/completions", {"prompt": "x", "n": 0}, (), 400, "invalid_value"),
        ("POST", "/v1/completions", {"prompt": "x", "stop": ""}, (), 400, "invalid_value"),
        ("POST", "/v1/completions", {"prompt": "x", "stream_options": {}}, (), 400, None),
        ("POST", "/v1/completions", {"prompt": "x", "model": "gpt"}, (), 404, "model_not_found"),
        ("POST", "/v1/chat/completions", {"messages": []}, (), 400, "invalid_value"),
        ("POST", "/v1/completions", {"prompt": "x"}, [("content-type", "text/plain")], 415, "unsupported_media_type"),
        ("POST", "/v1/completions", {"prompt": "x"}, [("content-encoding", "gzip")], 415, "unsupported_media_type"),
        ("POST", "/v1/completions", {"prompt": "x"}, [("content-length", str(10**11))], 413, "request_too_large"),
        ("POST", "/admin/workers/0/restart", {}, (), 403, "admin_disabled"),
    ],
)
async def test_reachable_refusals(
    method: str, path: str, body: Any, headers: Any, status: int, code: str | None
) -> None:
    pool = FakePool()
    answer = await call(app_of(pool), method, path, body, headers=headers)
    assert answer.status == status
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert code is None or error["code"] == code
    assert not pool.turns and not pool.reserved


async def test_a_405_names_what_is_allowed() -> None:
    answer = await call(app_of(FakePool()), "PUT", "/v1/completions")
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("charset", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
async def test_json_may_be_announced_in_several_ways(charset: str) -> None:
    headers = [("content-type", charset)]
    assert (await call(app_of(FakePool()), "POST", "/v1/completions", {"prompt": "x"}, headers=headers)).status == 200


async def test_a_body_without_an_end_is_refused_at_the_limit() -> None:
    async with Call(app_of(FakePool(), body_limit=1000), "POST", "/v1/completions", b"", parts=[]) as request:
        for _ in range(3):
            request.push(b" " * 400, more=True)
        await request.finished()
    assert request.status == 413 and request.headers["connection"] == "close"


async def test_all_bodies_together_are_bounded_and_what_is_read_makes_room_again() -> None:
    pool = FakePool(Script(by_hand=True))
    service = service_of(pool, body_limit=1000, body_total=1500)
    app = build_app(service)
    async with Call(app, "POST", "/v1/completions", b"", parts=[]) as slow:
        slow.push(b'{"prompt": "' + b"x" * 900, more=True)
        while service.bodies.held_bytes < 900:  # noqa: ASYNC110
            await asyncio.sleep(0)
        refused = await call(app, "POST", "/v1/completions", b"x" * 700)
        assert (refused.status, refused.json["error"]["code"]) == (503, "bodies_full")
        assert refused.headers["retry-after"] == "1" and refused.headers["connection"] == "close"
        assert service.bodies.held_bytes == 912
        assert b"ringfence_body_bytes 912.0" in service.metrics.text()
        slow.push(b'"}', more=False)
        turn = await pool.submitted()
        assert service.bodies.held_bytes == 0, "a prompt that is ids holds no body"
        pool.give(turn, [10])
        pool.finish(turn)
    assert slow.status == 200


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"]
)
@pytest.mark.parametrize("body", [b"{", b"[]", b"null", b'{"prompt": 1}'])
async def test_a_refused_body_is_not_counted_any_more(path: str, body: bytes) -> None:
    service = service_of(FakePool())
    assert (await call(build_app(service), "POST", path, body)).status == 400
    assert service.bodies.held_bytes == 0


async def test_a_body_whose_client_left_is_not_counted_any_more() -> None:
    service = service_of(FakePool())
    async with Call(build_app(service), "POST", "/v1/completions", b"", parts=[]) as request:
        request.push(b" " * 400, more=True)
        request.leave()
    assert service.bodies.held_bytes == 0


async def test_a_body_that_drips_is_refused_in_time() -> None:
    async with Call(app_of(FakePool(), body_timeout_s=0.02), "POST", "/v1/completions", b"", parts=[]) as request:
        request.push(b"{", more=True)
        await request.finished()
    assert request.status == 408 and request.json["error"]["code"] == "request_timeout"


async def test_an_unexpected_exception_says_nothing_of_itself() -> None:
    pool = FakePool()
    pool.snapshot_error = RuntimeError("/root/secret")
    answer = await call(app_of(pool), "GET", "/health")
    assert answer.status == 500 and b"secret" not in answer.body
    assert answer.json["error"]["code"] == "internal_error"


async def test_an_unexpected_exception_in_a_stream_is_an_event() -> None:
    pool = FakePool(Script(by_hand=True))
    async with Call(app_of(pool), "POST", "/v1/completions", {"prompt": "x", "stream": True}) as request:
        turn = await pool.submitted()
        pool.give(turn, [70])
        await request.started()
        pool.finish(turn, FinishReason.CANCEL)  # which nobody who reads the turn has asked for
    assert request.events[-1]["error"]["code"] == "internal_error"
