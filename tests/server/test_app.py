"""Whole answers and the small routes, over the fully assembled application."""

import asyncio
from typing import Any

import pytest
from starlette.middleware.base import BaseHTTPMiddleware

from server.app import OPERATIONS, middleware, routes
from server.config import Config
from tests.fakes.http import app_of, call, ids_of, service_of
from tests.fakes.pool import FakePool, Script
from workers.errors import Overloaded
from workers.request import FinishReason

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


async def test_a_completion_has_text_usage_timings_and_says_what_happened_to_it() -> None:
    pool = FakePool(Script(ids=ids_of("hello")))
    answer = await call(app_of(pool), "POST", COMPLETIONS, {"prompt": "abc", "model": "tiny"})
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req-")
    assert answer.headers["x-ringfence-worker"] == "1"
    assert float(answer.headers["x-ringfence-queue-ms"]) >= 0
    body = answer.json
    assert body["object"] == "text_completion" and body["model"] == "tiny" and body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["completion_tokens"] == 5
    assert body["usage"]["prompt_tokens"] == len(pool.turns[0].request.prompt)
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 5
    assert body["timings"]["predicted_n"] == 5 and body["timings"]["cache_n"] == 1


async def test_a_chat_answer_is_made_through_the_template() -> None:
    pool = FakePool(Script(ids=ids_of("hey")))
    answer = await call(app_of(pool), "POST", CHAT, chat(max_tokens=3))
    choice = answer.json["choices"][0]
    assert answer.json["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": "hey"}
    assert choice["finish_reason"] == "length"


async def test_a_list_of_prompts_with_n_makes_a_turn_each_in_the_order_of_index() -> None:
    pool = FakePool()
    for text in ("a0", "a1", "b0", "b1"):
        pool.scripts.append(Script(ids=ids_of(text)))
    answer = await call(app_of(pool), "POST", COMPLETIONS, {"prompt": ["aa", "bb"], "n": 2, "seed": 7})
    assert [(c["index"], c["text"]) for c in answer.json["choices"]] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    assert [turn.request.sampling.seed for turn in pool.turns] == [7, 8, 7, 8]
    assert len({turn.request.id for turn in pool.turns}) == 4
    prompts = [turn.request.prompt for turn in pool.turns]
    assert answer.json["usage"]["prompt_tokens"] == len(prompts[0]) + len(prompts[2])
    assert answer.json["usage"]["completion_tokens"] == 8


async def test_one_prompt_too_long_fails_the_whole_request_before_anything_ran() -> None:
    pool = FakePool(context=64)
    answer = await call(app_of(pool), "POST", COMPLETIONS, {"prompt": [[7], [7], [7] * 64, [7]]})
    assert answer.status == 400
    assert answer.json["error"]["code"] == "context_length_exceeded"
    assert answer.json["error"]["param"] == "prompt[2]"
    assert not pool.live_turns and not pool.reserved


async def test_an_error_of_one_choice_is_the_error_of_all() -> None:
    pool = FakePool()
    pool.scripts.extend([Script(by_hand=True), Script(error=Overloaded("requests", 1, 2.0), ids=())])
    async with asyncio.timeout(10):
        request = asyncio.create_task(call(app_of(pool), "POST", COMPLETIONS, {"prompt": "x", "n": 2}))
        turn = await pool.submitted()
        pool.finish(turn)
        answer = await request
    assert answer.status == 429
    assert not pool.live_turns


async def test_a_refused_turn_cancels_those_submitted_before_it() -> None:
    pool = FakePool(Script(by_hand=True))
    service = service_of(pool)
    original = pool.submit

    def refuse_second(request: Any, reservation: Any = None) -> Any:
        if pool.turns:
            raise Overloaded("requests", 1, 2.0)
        return original(request, reservation)

    pool.submit = refuse_second  # type: ignore[method-assign]
    from server.app import build_app

    answer = await call(build_app(service), "POST", COMPLETIONS, {"prompt": "x", "n": 2})
    assert answer.status == 429 and answer.headers["retry-after"] == "2"
    assert not pool.live_turns and not pool.reserved


@pytest.mark.parametrize(
    ("fields", "ids", "finish", "expected"),
    [
        ({}, ids_of("ab"), FinishReason.STOP, ("ab", "stop", 2)),
        ({"max_tokens": 2}, ids_of("abc"), None, ("ab", "length", 2)),
        ({"stop": "c"}, ids_of("abcd"), None, ("ab", "stop", 3)),
        ({"stop": "c", "max_tokens": 3}, ids_of("abc"), None, ("ab", "stop", 3)),
        ({"stop": ["zz", "bc"]}, ids_of("abcd"), None, ("a", "stop", 3)),
        ({"max_tokens": 3}, ids_of("abc"), FinishReason.STOP, ("abc", "stop", 3)),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_finish_reason_and_usage(
    fields: dict[str, Any], ids: list[int], finish: FinishReason | None, expected: tuple[str, str, int], stream: bool
) -> None:
    pool = FakePool(Script(ids=ids, finish=finish))
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await call(app_of(pool), "POST", COMPLETIONS, {"prompt": "x", **fields, **options})
    if stream:
        events = answer.events[:-1]
        choices = [choice for event in events for choice in event["choices"]]
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]
        text = "".join(choice["text"] for choice in choices)
        usage = events[-1]["usage"]
    else:
        choice = answer.json["choices"][0]
        text, reasons, usage = choice["text"], [choice["finish_reason"]], answer.json["usage"]
    assert (text, reasons, usage["completion_tokens"]) == (expected[0], [expected[1]], expected[2])


async def test_echo_repeats_the_prompt_streamed_and_not() -> None:
    app = app_of(FakePool(Script(ids=ids_of("!"))))
    whole = await call(app, "POST", COMPLETIONS, {"prompt": "say", "echo": True})
    stream = await call(app, "POST", COMPLETIONS, {"prompt": "say", "echo": True, "stream": True})
    assert whole.json["choices"][0]["text"] == "say!"
    assert "".join(c["text"] for event in stream.events[:-1] for c in event["choices"]) == "say!"


async def test_logprobs_come_with_their_tokens() -> None:
    ids = ids_of("ab")
    script = Script(ids=ids, logprobs=[-0.1, -0.2], alternatives=[[(ids[0], -0.1), (ids[1], -3.0)], [(ids[1], -0.2)]])
    app = app_of(FakePool(script))
    whole = await call(app, "POST", COMPLETIONS, {"prompt": "x", "logprobs": 2})
    entry = whole.json["choices"][0]["logprobs"]
    assert entry["tokens"] == ["a", "b"] and entry["token_logprobs"] == [-0.1, -0.2]
    assert entry["top_logprobs"][0] == {"a": -0.1, "b": -3.0} and entry["text_offset"] == [0, 1]
    stream = await call(app, "POST", CHAT, chat(logprobs=True, top_logprobs=1, stream=True))
    content = [
        item
        for event in stream.events[:-1]
        for choice in event["choices"]
        for item in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert [item["token"] for item in content] == ["a", "b"]
    assert content[0]["top_logprobs"] == [{"token": "a", "logprob": -0.1, "bytes": [97]}]


async def test_a_place_is_reserved_before_the_body_is_understood_and_given_back() -> None:
    pool = FakePool()
    pool.reserve_error = Overloaded("requests", 8, 3.2)
    answer = await call(app_of(pool), "POST", COMPLETIONS, b"not json")
    assert (answer.status, answer.headers["retry-after"]) == (429, "4")
    pool.reserve_error = None
    answer = await call(app_of(pool), "POST", COMPLETIONS, b"not json")
    assert answer.status == 400 and not pool.reserved


async def test_the_prompt_that_was_tokenised_resizes_its_reservation() -> None:
    pool = FakePool()
    pool.token_limit = 10
    answer = await call(app_of(pool), "POST", COMPLETIONS, {"prompt": [9] * 11})
    assert answer.status == 429 and not pool.reserved


async def test_a_long_prompt_is_tokenised_off_the_loop() -> None:
    pool = FakePool(context=1_000_000)
    answer = await call(app_of(pool), "POST", COMPLETIONS, {"prompt": "word " * 30_000})
    assert answer.status == 200
    assert len(pool.turns[0].request.prompt) > 30_000


@pytest.mark.parametrize(("model", "status"), [("tiny", 200), ("other", 200), (None, 200), ("", 200), ("gpt-4", 404)])
async def test_the_configured_name_its_aliases_and_no_name_are_served(model: str | None, status: int) -> None:
    app = app_of(FakePool(), model_aliases=("other",))
    answer = await call(app, "POST", COMPLETIONS, {"prompt": "x", "model": model})
    assert answer.status == status
    if status == 404:
        assert answer.json["error"]["code"] == "model_not_found"


async def test_models_are_listed_and_found_also_with_slashes_in_their_name() -> None:
    app = app_of(FakePool(), model_name="org/model", model_aliases=("m",))
    listed = await call(app, "GET", "/v1/models")
    assert [model["id"] for model in listed.json["data"]] == ["org/model", "m"]
    assert (await call(app, "GET", "/v1/models/org/model")).json["id"] == "org/model"
    assert (await call(app, "GET", "/v1/models/gpt-4")).status == 404


async def test_tokenize_and_detokenize_are_each_others_inverse() -> None:
    app = app_of(FakePool())
    tokens = (await call(app, "POST", "/tokenize", {"content": "grün"})).json["tokens"]
    assert (await call(app, "POST", "/detokenize", {"tokens": tokens})).json == {"content": "grün"}
    pieces = (await call(app, "POST", "/tokenize", {"content": "ü", "with_pieces": True})).json["tokens"]
    assert [piece["piece"] for piece in pieces] == [[0xC3], [0xBC]]
    long = (await call(app, "POST", "/tokenize", {"content": "word " * 1000})).json["tokens"]
    assert len(long) > 1000


@pytest.mark.parametrize(
    ("given", "is_kept"), [("abc-123", True), ("", False), ("a b", False), ("x" * 129, False), ("ä", False)]
)
async def test_a_sane_request_id_of_the_client_is_kept(given: str, is_kept: bool) -> None:
    answer = await call(app_of(FakePool()), "GET", "/livez", headers=[("x-request-id", given)])
    assert (answer.headers["x-request-id"] == given) == is_kept


async def test_ids_of_answers_are_unique() -> None:
    app = app_of(FakePool())
    answers = [await call(app, "POST", COMPLETIONS, {"prompt": "x"}) for _ in range(20)]
    assert len({answer.json["id"] for answer in answers}) == 20
    assert len({answer.headers["x-request-id"] for answer in answers}) == 20


async def test_the_openapi_document_has_every_route() -> None:
    document = (await call(app_of(FakePool()), "GET", "/openapi.json")).json
    assert {operation.path for operation in OPERATIONS} <= set(document["paths"])


def test_every_route_is_in_the_table_and_none_is_wrapped_by_a_base_http_middleware() -> None:
    service = service_of(FakePool(), api_key=("k" * 8,), cors_origins=("*",))
    assert len(routes(service)) == len(OPERATIONS)
    layers = middleware(service)
    assert len(layers) == 3
    assert not any(isinstance(layer.cls, type) and issubclass(layer.cls, BaseHTTPMiddleware) for layer in layers)


async def test_cors_answers_a_preflight_without_a_key_and_names_our_headers() -> None:
    app = app_of(FakePool(), api_key=("k" * 8,), cors_origins=("https://example.org",))
    origin = [("origin", "https://example.org")]
    ask = [*origin, ("access-control-request-method", "POST"), ("access-control-request-headers", "authorization")]
    preflight = await call(app, "OPTIONS", COMPLETIONS, headers=ask)
    assert preflight.status == 200 and preflight.headers["access-control-allow-origin"] == "https://example.org"
    refused = await call(app, "POST", COMPLETIONS, {"prompt": "x"}, headers=origin)
    assert refused.status == 401 and refused.headers["access-control-allow-origin"] == "https://example.org"


def test_a_config_without_keys_has_no_keys() -> None:
    assert Config().api_key == ()
