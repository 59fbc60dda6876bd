"""What the real server refuses: in OpenAI's envelope, as the SDK's own classes, before anything reaches a decoder."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from starlette.routing import Route

from server.app import routes
from server.auth import OPEN_PATHS
from tests.fakes.echo import echo_prompt
from tests.fakes.http import service_of
from tests.fakes.pool import FakePool
from tests.whole.peer import Peer
from tests.whole.scripted import ADMIN_KEY, CONTEXT, KEY, Scripted, new_marker

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def checked(status: int, headers: dict[str, str], body: bytes) -> Any:
    """The error of an answer, whose form is right."""
    assert headers["content-type"] == "application/json", body
    answer = json.loads(body)
    assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}
    error = answer["error"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    assert all(isinstance(error[name], str | None) for name in ("param", "code"))
    assert "Traceback" not in error["message"] and "/work" not in error["message"] and ".py" not in error["message"]
    assert ("retry-after" in headers) == (status in (429, 503))
    assert int(headers.get("retry-after", "1")) >= 1
    return error


async def refused(server: Scripted, method: str, path: str, body: Any = None, headers: str = "") -> tuple[int, Any]:
    async with server.peer() as peer:
        peer.ask(method, path, body, headers)
        status, fields, data = await peer.answer()
        return status, checked(status, fields, data)


# ---- the context (B71) ---------------------------------------------------------------------------------------------


def prompts_of(tokens: int) -> dict[str, Any]:
    """As ids, as a text of that many tokens (the first is bos), and in a list of four."""
    ids = [7 + place % 60 for place in range(tokens)]
    return {"ids": ids, "text": "!" * (tokens - 1), "list": [[7], [8], ids, [9]]}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("kind", ["ids", "text", "list"])
@pytest.mark.parametrize("tokens", [CONTEXT, CONTEXT + 1, 10 * CONTEXT])
async def test_a_prompt_too_long_is_refused_with_numbers(
    server: Scripted, tokens: int, kind: str, stream: bool
) -> None:
    before = len(server.stage.events("GEN"))
    body = {"prompt": prompts_of(tokens)[kind], "max_tokens": 1, "stream": stream}
    status, error = await refused(server, "POST", COMPLETIONS, body)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == ("prompt[2]" if kind == "list" else "prompt")
    assert str(CONTEXT) in error["message"] and str(tokens) in error["message"]
    assert len(server.stage.events("GEN")) == before, "it reached a decoder"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_chat_too_long_is_refused_with_numbers(server: Scripted, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "!" * 5000}], "stream": stream}
    status, error = await refused(server, "POST", CHAT, body)
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")


@pytest.mark.parametrize("kind", ["ids", "text"])
async def test_a_prompt_that_leaves_room_for_one_token_is_run_whole(server: Scripted, kind: str) -> None:
    before = len(server.stage.events("GEN"))
    body = {"prompt": prompts_of(CONTEXT - 1)[kind], "max_tokens": 50}
    status, answer = await server.call("POST", COMPLETIONS, body)
    assert status == 200 and answer["usage"]["prompt_tokens"] == CONTEXT - 1
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 1
    (gen,) = server.stage.events("GEN")[before:]
    assert (len(gen["ids"]), gen["max_new"]) == (CONTEXT - 1, 1)


# ---- formats and grammars (B74) ------------------------------------------------------------------------------------


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def format_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


FORMATS: dict[str, dict[str, Any]] = {
    "unknown type": {"response_format": {"type": "yaml"}},
    "no type": {"response_format": {}},
    "no object": {"response_format": "json_object"},
    "a schema": {"response_format": format_of({"type": "object"})},
    "a deep schema": {"response_format": format_of(nested(400))},
    "a schema of 10,000 words": {"response_format": format_of({"enum": [f"word {n}" for n in range(10_000)]})},
    "a schema of itself": {"response_format": format_of({"$ref": "#"})},
    "a huge pattern": {"response_format": format_of({"type": "string", "pattern": "(a{1,9999}){1,9999}"})},
    "a schema of no kind": {"response_format": {"type": "json_schema", "json_schema": 7}},
    "two at once": {"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'},
    "a grammar of no kind": {"grammar": 7},
    "a grammar that is too long": {"grammar": "#" * 70_000},
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_format_that_cannot_be_kept_is_refused(server: Scripted, path: str, name: str) -> None:
    before = len(server.stage.events("GEN"))
    prompt = {"prompt": [7]} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    status, error = await refused(server, "POST", path, {**prompt, **FORMATS[name]})
    assert status == 400 and error["param"].startswith(("response_format", "grammar"))
    assert len(server.stage.events("GEN")) == before


async def test_a_grammar_that_the_decoder_refuses_is_a_400_of_its_request_alone(server: Scripted) -> None:
    bad, good = new_marker(), new_marker()
    text = "grammar: expecting ::= at /srv/models/x.gguf"
    server.stage.script(rules=[{"when": {"marker": bad}, "error": text}])
    one, other = await asyncio.gather(
        refused(server, "POST", COMPLETIONS, {"prompt": echo_prompt(bad), "grammar": "nonsense"}),
        server.call("POST", COMPLETIONS, {"prompt": echo_prompt(good), "max_tokens": 5}),
    )
    assert (one[0], one[1]["code"]) == (400, "decoder_refused")
    assert "/srv" not in one[1]["message"] and "expecting ::=" in one[1]["message"]
    assert other[0] == 200
    (worker,) = (await server.status())["workers"]
    assert worker["restarts"] == 0 and worker["state"] == "ready"


# ---- the envelope (B76) --------------------------------------------------------------------------------------------

ASK: dict[str, Any] = {"prompt": [7], "max_tokens": 2}
ERRORS: list[tuple[int, str | None, str, str, Any, str]] = [
    (400, "invalid_json", "POST", COMPLETIONS, b"{", ""),
    (400, "invalid_json", "POST", COMPLETIONS, b"", ""),
    (400, "invalid_json", "POST", COMPLETIONS, b'{"prompt": "\xff"}', ""),
    (400, "missing_required_parameter", "POST", COMPLETIONS, {}, ""),
    (400, "invalid_value", "POST", COMPLETIONS, {**ASK, "temperature": "hot"}, ""),
    (400, "invalid_value", "POST", COMPLETIONS, {"prompt": [99_999]}, ""),
    (400, "unsupported_parameter", "POST", COMPLETIONS, {**ASK, "suffix": "x"}, ""),
    (400, "unsupported_value", "POST", COMPLETIONS, {**ASK, "response_format": {"type": "yaml"}}, ""),
    (404, "unknown_url", "GET", "/v1/nothing", None, ""),
    (404, "unknown_url", "POST", "/v1/completions/", ASK, ""),
    (404, "model_not_found", "POST", COMPLETIONS, {**ASK, "model": "gpt-5"}, ""),
    (404, "model_not_found", "GET", "/v1/models/gpt-5", None, ""),
    (405, "method_not_allowed", "GET", COMPLETIONS, None, ""),
    (405, "method_not_allowed", "DELETE", "/v1/models", None, ""),
    (413, "request_too_large", "POST", COMPLETIONS, b" ", "transfer-encoding: x\r\n"),
    (415, "unsupported_media_type", "POST", COMPLETIONS, ASK, "content-encoding: gzip\r\n"),
    (415, "unsupported_media_type", "POST", COMPLETIONS, ASK, "content-type: text/plain\r\n"),
    (401, "invalid_api_key", "POST", "/admin/restart", None, ""),
]


@pytest.mark.parametrize(("status", "code", "method", "path", "body", "headers"), ERRORS)
async def test_every_refusal_has_the_envelope(
    server: Scripted, status: int, code: str | None, method: str, path: str, body: Any, headers: str
) -> None:
    if "transfer-encoding" in headers:  # the length is announced, and refused before anything is read
        async with server.peer() as peer:
            peer.write(peer.head_of(method, path, f"content-length: {10**10}\r\n"))
            got, fields, data = await peer.answer()
            error = checked(got, fields, data)
    else:
        got, error = await refused(server, method, path, body, headers)
    assert (got, error["code"]) == (status, code)


SDK_CLASSES: list[tuple[dict[str, Any], type[openai.APIStatusError], dict[str, Any]]] = [
    ({"temperature": -1}, openai.BadRequestError, {}),
    ({"model": "gpt-5"}, openai.NotFoundError, {}),
    ({"extra_headers": {"authorization": "Bearer wrong-key-0"}}, openai.AuthenticationError, {}),
    ({}, openai.InternalServerError, {"error": "device error"}),
    ({}, openai.InternalServerError, {"nonfinite_at": 0}),
]


@pytest.fixture
def sdk(server: Scripted) -> Iterator[openai.OpenAI]:
    base = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=base, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("fields", "kind", "script"), SDK_CLASSES)
async def test_the_sdk_raises_its_class(
    server: Scripted, sdk: openai.OpenAI, fields: Any, kind: type[openai.APIStatusError], script: Any, stream: bool
) -> None:
    server.stage.script(**script)

    def ask() -> None:
        answer = sdk.completions.create(**{"model": "tiny", "prompt": [7], **fields}, stream=stream)
        if stream:
            list(answer)

    with pytest.raises(kind) as caught:
        await asyncio.to_thread(ask)
    assert caught.value.body and caught.value.code
    assert isinstance(caught.value.request_id, str)


async def test_a_failure_in_mid_stream_is_raised_by_the_sdk(server: Scripted, sdk: openai.OpenAI) -> None:
    server.stage.script(error_at=2)
    got: list[str] = []

    def ask() -> None:
        for chunk in sdk.completions.create(model="tiny", prompt=[7], stream=True):
            got.append(chunk.choices[0].text)

    with pytest.raises(openai.APIError, match="decoder failed") as caught:
        await asyncio.to_thread(ask)
    assert got and caught.value.code == "decoder_error"


async def test_a_full_queue_is_a_429_at_once_and_nothing_of_it_reaches_a_decoder(server: Scripted) -> None:
    """B53 in short: all beyond slots and queue are refused, the others are served."""
    statuses: list[int] = []
    marker = new_marker()
    holders = [server.peer() for _ in range(4)]
    for holder in holders:
        await holder.__aenter__()
        holder.ask("POST", COMPLETIONS, {"prompt": echo_prompt(marker, prefill_ms=60_000)})
    await server.running(marker, 4)
    before = len(server.stage.events("GEN"))

    async def one() -> None:
        async with server.peer() as peer:
            peer.ask("POST", COMPLETIONS, {"prompt": [7, 8], "max_tokens": 1})
            status, fields, body = await peer.answer()
            statuses.append(status)
            if status != 200:
                assert checked(status, fields, body)["code"] == "queue_full"

    everybody = asyncio.gather(*(one() for _ in range(200)))
    await server.until(lambda: len(statuses) == 200 - 128, "the refusals")
    assert set(statuses) == {429}
    for holder in holders:
        holder.leave()
    await everybody
    assert statuses.count(200) == len(server.stage.events("GEN")) - before == 128


# ---- keys (B77) ----------------------------------------------------------------------------------------------------

KEYS = {
    "none": "",
    "wrong": "authorization: Bearer wrong-key-00\r\n",
    "empty": "authorization: Bearer \r\n",
    "blank": "authorization:\r\n",
    "two words": f"authorization: Bearer {KEY} {KEY}\r\n",
    "no scheme": f"authorization: {KEY}\r\n",
    "basic": f"authorization: Basic {KEY}\r\n",
    "twice": f"authorization: Bearer {KEY}\r\nauthorization: Bearer wrong-key-00\r\n",
    "longer": f"authorization: Bearer {KEY}x\r\n",
    "other case": f"authorization: Bearer {KEY.upper()}\r\n",
    "other header": f"x-api-key: {KEY}\r\n",
}


def variants(path: str) -> Iterator[str]:
    """Spellings of a path, and the key where it does not belong."""
    yield path
    yield f"{path}?api_key={KEY}&key={KEY}"
    yield f"/{path}"
    yield f"{path}/"
    yield f"{path}/."
    yield path.replace("/", "/./", 1)
    yield f"/livez/..{path}"
    yield f"/livez%2f..{path}"
    yield path.upper()
    yield path.replace("/", "/%2e/", 1)
    yield f"http://x{path}"
    yield f"{path}%00"
    yield f"{path};livez"


def every_route() -> list[tuple[str, str]]:
    """(method, path) of all routes of the application, and the methods that every server may be asked."""
    found = []
    for route in routes(service_of(FakePool())):
        assert isinstance(route, Route)
        path = route.path.replace("{id:path}", "tiny").replace("{n}", "0").replace("{action}", "cordon")
        found += [(method, path) for method in sorted({*(route.methods or ()), "GET", "HEAD", "OPTIONS", "PUT"})]
    return found


async def test_no_spelling_of_any_route_answers_without_a_key(server: Scripted) -> None:
    closed = [(method, path) for method, path in every_route() if path not in OPEN_PATHS]
    assert len({path for _, path in closed}) >= 12
    asked = [(m, spelt, key) for m, path in closed for spelt in variants(path) for key in KEYS]
    # every spelling without a key, and every key on the plain path
    asked = [(m, spelt, key) for m, spelt, key in asked if key == "none" or spelt in {path for _, path in closed}]

    async def some(part: list[tuple[str, str, str]]) -> list[Any]:
        wrong = []
        async with Peer(server.port) as peer:
            for method, path, key in part:
                peer.ask(method, path, None, KEYS[key])
                status, headers = await peer.head()
                if method != "HEAD":
                    await peer.reader.readexactly(int(headers["content-length"]))
                if status != 401:
                    wrong.append((method, path, key, status))
        return wrong

    wrong = await asyncio.gather(*(some(asked[place::8]) for place in range(8)))
    assert list(itertools.chain(*wrong)) == []
    assert not any(worker["is_cordoned"] for worker in (await server.status())["workers"])


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
async def test_probers_need_no_key(server: Scripted, path: str) -> None:
    async with Peer(server.port) as peer:
        peer.ask("GET", path)
        assert (await peer.answer())[0] == 200


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER ", "Bearer   "])
async def test_the_scheme_may_be_written_in_any_case(server: Scripted, scheme: str) -> None:
    for key in (KEY, ADMIN_KEY):
        async with Peer(server.port) as peer:
            peer.ask("GET", "/v1/models", None, f"authorization: {scheme}{key} \r\n")
            assert (await peer.answer())[0] == 200


async def test_a_page_of_another_origin_may_ask_and_read_its_errors(server: Scripted) -> None:
    async with Peer(server.port) as peer:
        ask = "access-control-request-method: POST\r\naccess-control-request-headers: authorization,content-type\r\n"
        peer.ask("OPTIONS", COMPLETIONS, None, ask)
        status, headers, _ = await peer.answer()
        assert status == 200 and headers["access-control-allow-origin"] == "*"
        peer.ask("POST", COMPLETIONS, ASK)
        status, headers, body = await peer.answer()
        assert (status, checked(status, headers, body)["code"]) == (401, "invalid_api_key")
        assert headers["access-control-allow-origin"] == "*"
