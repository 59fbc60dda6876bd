"""The real server on real sockets: connections and their bounds, drain and signals, the OpenAI SDK."""

import asyncio
import json
import os
import signal
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from server import serving
from server.service import Service
from server.serving import BindError, HTTPServer, Serving, bind, http_server
from tests.fakes.http import config_of, events_of, ids_of, open_files, service_of, text_of, tiny_tokenizer
from tests.fakes.pool import FakePool, Script
from workers.errors import WorkerLost

KEY = "k" * 8


@dataclass
class Running:
    pool: FakePool
    service: Service
    server: HTTPServer
    port: int

    async def connect(self) -> "Peer":
        return Peer(*await asyncio.open_connection("127.0.0.1", self.port))

    async def ask(self, method: str, path: str, body: Any = None, headers: str = "") -> "Peer":
        peer = await self.connect()
        peer.ask(method, path, body, headers)
        return peer

    async def alive(self) -> None:
        """A request of another connection, from its beginning to its end."""
        peer = await self.ask("GET", "/livez")
        assert (await peer.answer())[0] == 200
        peer.close()

    async def settled(self) -> None:
        """Nothing is running or reserved any more."""
        async with asyncio.timeout(5):
            while self.pool.live_turns or self.service.live or self.pool.reserved:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@dataclass
class Peer:
    """A client made of a socket."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def ask(self, method: str, path: str, body: Any = None, headers: str = "") -> None:
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
        kind = "content-type: application/json\r\n" if body is not None else ""
        self.writer.write((head + kind + headers + "\r\n").encode() + data)

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 10)).decode().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split()[1]), fields

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Head and body, by content-length or in chunks."""
        status, headers = await self.head()
        if "content-length" in headers:
            return (
                status,
                headers,
                await asyncio.wait_for(self.reader.readexactly(int(headers["content-length"])), 10),
            )
        body = b""
        while chunk := await self.chunk():
            body += chunk
        return status, headers, body

    async def chunk(self) -> bytes:
        size = int(await asyncio.wait_for(self.reader.readuntil(b"\r\n"), 10), 16)
        data = await asyncio.wait_for(self.reader.readexactly(size + 2), 10)
        return data[:-2]

    async def rest(self) -> bytes:
        try:
            return await asyncio.wait_for(self.reader.read(), 10)
        except ConnectionResetError:
            return b""

    def close(self, how: str = "fin") -> None:
        if how == "rst":
            raw = self.writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.close()


@asynccontextmanager
async def running(pool: FakePool | None = None, **values: Any) -> AsyncIterator[Running]:
    pool = pool or FakePool()
    service = service_of(pool, **values)
    listener = bind("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # connections inherit it
    server = http_server(service)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await server.ready.wait()
    try:
        yield Running(pool, service, server, listener.getsockname()[1])
    finally:
        server.force_exit = True
        server.exit()
        await asyncio.wait_for(task, 10)


# ---- a client that leaves ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fin", "rst"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["queued", "prefill", "token 1", "token 500"])
async def test_a_closed_connection_cancels_the_turn(how: str, stream: bool, phase: str) -> None:
    pool = FakePool(Script(by_hand=True), context=2000)
    async with running(pool, api_key=(KEY,), cors_origins=("*",)) as server:
        headers = f"authorization: Bearer {KEY}\r\norigin: https://example.org\r\n"
        body = {"prompt": "x", "stream": stream, "max_tokens": 1000}
        peer = await server.ask("POST", "/v1/completions", body, headers)
        turn = await pool.submitted()
        if phase != "queued":
            pool.start_turn(turn)
        if phase.startswith("token"):
            pool.give(turn, ids_of("x" * int(phase.split()[1])))
            if stream:
                await peer.head()
                await peer.chunk()
        peer.close(how)
        await server.settled()
        assert turn.is_cancelled
        fresh = await server.ask("GET", "/readyz")
        assert (await fresh.answer())[0] == 200
        fresh.close()


async def test_hundreds_of_leaving_clients_leave_no_file_open() -> None:
    pool = FakePool(Script(by_hand=True))
    async with running(pool) as server:
        before = open_files()
        for _ in range(5):
            peers = [await server.ask("POST", "/v1/completions", {"prompt": "x", "stream": True}) for _ in range(40)]
            await pool.submitted(len(pool.turns) + 1 if not pool.turns else len(pool.turns))
            for place, peer in enumerate(peers):
                peer.close("rst" if place % 2 else "fin")
            await server.settled()
        async with asyncio.timeout(5):
            while open_files() > before or server.server.server_state.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_a_client_that_stops_reading_is_dropped_and_others_are_not_slowed() -> None:
    pool = FakePool(Script(by_hand=True), context=2_000_000)
    async with running(pool, stall_limit_s=0.3) as server:
        slow = await server.connect()
        raw = slow.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.reader._transport.pause_reading()  # type: ignore[attr-defined]
        slow.ask("POST", "/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 1_000_000})
        turn = await pool.submitted()
        pool.default = Script(ids=ids_of("hello"))
        async with asyncio.timeout(10):
            while not turn.is_cancelled:
                if len(turn.ids) < 900_000:
                    pool.give(turn, ids_of("x" * 20_000))
                quick = await server.ask("POST", "/v1/completions", {"prompt": "y"})
                assert (await quick.answer())[0] == 200
                quick.close()
        await server.settled()
        slow.close()


# ---- bounds of connections -----------------------------------------------------------------------------------------


async def test_silent_connections_make_room_for_working_ones() -> None:
    async with running(connection_limit=5) as server:
        silent = [await server.connect() for _ in range(20)]
        peer = await server.ask("GET", "/livez")
        assert (await peer.answer())[0] == 200
        assert len(server.server.server_state.connections) <= 5
        for each in [*silent, peer]:
            each.close()


async def test_when_every_connection_works_a_new_one_is_refused() -> None:
    pool = FakePool(Script(by_hand=True))
    async with running(pool, connection_limit=2) as server:
        busy = [await server.ask("POST", "/v1/completions", {"prompt": "x"}) for _ in range(2)]
        await pool.submitted(2)
        peer = await server.connect()
        status, headers, body = await peer.answer()
        assert status == 503 and headers["retry-after"] == "1"
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        assert await peer.rest() == b""
        for each in [*busy, peer]:
            each.close()
        await server.settled()


async def test_a_head_that_never_ends_is_refused_by_size_and_by_time() -> None:
    async with running(header_limit=2000, header_timeout_s=0.1) as server:
        large = await server.connect()
        large.writer.write(b"GET /livez HTTP/1.1\r\n" + b"x-filler: " + b"y" * 5000)
        status, _, body = await large.answer()
        assert status == 431 and json.loads(body)["error"]["code"] == "headers_too_large"
        slow = await server.connect()
        slow.writer.write(b"GET /livez HTTP/1.1\r\nx")
        status, headers, _ = await slow.answer()
        assert status == 408 and headers["connection"] == "close"
        silent = await server.connect()
        assert (await silent.answer())[0] == 408
        for each in (large, slow, silent):
            each.close()


async def test_a_complete_head_that_is_too_large_is_refused() -> None:
    async with running(header_limit=500) as server:
        peer = await server.ask("GET", "/livez", headers="x-filler: " + "y" * 1000 + "\r\n")
        assert (await peer.answer())[0] == 431
        peer.close()


async def test_bytes_that_are_no_http_get_the_envelope() -> None:
    async with running() as server:
        peer = await server.connect()
        peer.writer.write(b"\x16\x03\x01 hello\r\n\r\n")
        status, headers, body = await peer.answer()
        assert status == 400 and headers["content-type"] == "application/json"
        assert json.loads(body)["error"]["code"] == "malformed_request"
        peer.close()


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = b'{"prompt": "x"}'
SIZED = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"transfer-encoding: identity\r\n\r\n" + BODY,
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKED,
    ],
)
async def test_a_body_that_is_no_http_gets_the_envelope(data: bytes) -> None:
    pool = FakePool()
    async with running(pool) as server:
        peer = await server.connect()
        peer.writer.write(data)
        status, _, body = await peer.answer()
        assert status == 400 and json.loads(body)["error"]["code"] == "malformed_request"
        assert await peer.rest() == b""
        await server.settled()
        assert not pool.turns
        peer.close()


async def test_a_request_followed_by_what_is_none_is_answered_and_closed() -> None:
    """A client that counts characters in place of bytes sends more than it announced."""
    async with running() as server:
        peer = await server.connect()
        peer.writer.write(SIZED + b"\xc3\xa9}\r\n\r\n")
        status, _, body = await peer.answer()
        assert status == 200 and json.loads(body)["object"] == "text_completion"
        assert await peer.rest() == b""
        peer.close()


@pytest.mark.parametrize("framing", ["sized", "chunked", "late"])
async def test_an_offer_of_another_protocol_is_declined_and_the_request_served(framing: str) -> None:
    """As Java's HttpClient sends its first request."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    async with running() as server:
        peer = await server.connect()
        if framing == "chunked":
            peer.writer.write(HEAD + offer + b"transfer-encoding: chunked\r\n\r\n" + CHUNKED)
        else:
            peer.writer.write(HEAD + offer + b"content-length: %d\r\n\r\n" % len(BODY))
            if framing == "late":
                await server.alive()
            peer.writer.write(BODY)
        for _ in range(2):
            status, _, body = await peer.answer()
            assert status == 200 and json.loads(body)["object"] == "text_completion"
            peer.writer.write(SIZED)
        assert (await peer.answer())[0] == 200
        peer.close()


async def test_a_huge_body_is_refused_by_its_header_alone() -> None:
    async with running() as server:
        peer = await server.connect()
        peer.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10000000000\r\n\r\n")
        status, headers, _ = await peer.answer()
        assert status == 413 and headers["connection"] == "close"
        assert await peer.rest() == b""
        peer.close()


async def test_idle_connections_outlive_those_of_clients_and_proxies() -> None:
    async with running() as server:
        assert server.server.config.timeout_keep_alive > 60


async def test_a_connection_serves_one_request_after_the_other() -> None:
    async with running(FakePool(Script(ids=ids_of("ab")))) as server:
        peer = await server.connect()
        for stream in (False, True, False):
            peer.ask("POST", "/v1/completions", {"prompt": "x", "stream": stream})
            status, _, body = await peer.answer()
            assert status == 200
            assert stream == (b"[DONE]" in body)
        peer.close()


# ---- life ----------------------------------------------------------------------------------------------------------


def test_a_port_in_use_and_a_host_that_is_not_ours_are_explained() -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(BindError, match="choose another `port`"):
        bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(BindError, match="no address of this machine"):
        bind("203.0.113.7", 0)
    with pytest.raises(BindError, match="can't be resolved"):
        bind("no-such-host.invalid", 0)


@dataclass
class Life:
    pool: FakePool
    serving: Serving
    task: "asyncio.Task[int]"
    port: int

    async def ask(self, method: str, path: str, body: Any = None) -> Peer:
        peer = Peer(*await asyncio.open_connection("127.0.0.1", self.port))
        peer.ask(method, path, body)
        return peer


@asynccontextmanager
async def alive(pool: FakePool, **values: Any) -> AsyncIterator[Life]:
    listener = bind("127.0.0.1", 0)
    life = Serving(config_of(**values), pool, tiny_tokenizer(), listener)
    task = asyncio.create_task(life.run())
    async with asyncio.timeout(10):
        while "start" not in pool.calls:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    try:
        yield Life(pool, life, task, listener.getsockname()[1])
    finally:
        if not task.done():
            life.stop()
            life.stop()
        assert await asyncio.wait_for(task, 10) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains(number: signal.Signals) -> None:
    pool = FakePool(Script(by_hand=True))
    async with alive(pool) as life:
        streaming = await life.ask("POST", "/v1/completions", {"prompt": "x", "stream": True})
        turn = await pool.submitted()
        pool.give(turn, ids_of("a"))
        await streaming.head()
        os.kill(os.getpid(), number)
        async with asyncio.timeout(5):
            while not pool.is_draining:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        probe = await life.ask("GET", "/readyz")
        assert (await probe.answer())[0] == 503
        assert (await (await life.ask("GET", "/livez")).answer())[0] == 200
        refused = await life.ask("POST", "/v1/completions", {"prompt": "x"})
        status, headers, _ = await refused.answer()
        assert status == 503 and headers["connection"] == "close" and "retry-after" in headers
        pool.give(turn, ids_of("b"))
        pool.finish(turn)
        body = b""
        while chunk := await streaming.chunk():
            body += chunk
        assert text_of(events_of(body)) == "ab" and body.endswith(b"[DONE]\n\n")
        assert await asyncio.wait_for(asyncio.shield(life.task), 10) == 0


async def test_what_outlives_the_drain_gets_an_error_event() -> None:
    pool = FakePool(Script(by_hand=True))
    async with alive(pool, drain_s=0.05) as life:
        streaming = await life.ask("POST", "/v1/completions", {"prompt": "x", "stream": True})
        waiting = await life.ask("POST", "/v1/completions", {"prompt": "x"})
        await pool.submitted(2)
        streamed = next(turn for turn in pool.turns)
        for turn in pool.turns:
            pool.start_turn(turn)
        pool.give(streamed, ids_of("a"))
        first, second = streaming, waiting
        life.serving.stop()
        answers = [await peer.answer() for peer in (first, second)]
        bodies = b"".join(body for _, _, body in answers)
        assert bodies.count(b'"code":"shutting_down"') == 2 and b"[DONE]" not in bodies
        assert await asyncio.wait_for(asyncio.shield(life.task), 10) == 0


async def test_a_second_signal_ends_at_once() -> None:
    pool = FakePool(Script(by_hand=True))
    async with alive(pool, drain_s=600.0) as life:
        peer = await life.ask("POST", "/v1/completions", {"prompt": "x", "stream": True})
        await pool.submitted()
        life.serving.stop()
        life.serving.stop()
        assert await asyncio.wait_for(asyncio.shield(life.task), 2) == 0
        assert pool.is_stopped_now
        peer.close()


async def test_http_answers_before_the_workers_are_ready() -> None:
    pool = FakePool()
    started = asyncio.Event()

    async def slow_start() -> None:
        pool.calls.append("start")
        await started.wait()

    pool.start = slow_start  # type: ignore[method-assign]
    async with alive(pool) as life:
        assert (await (await life.ask("GET", "/livez")).answer())[0] == 200
        started.set()


def test_the_file_limit_is_raised_and_never_lowered() -> None:
    assert serving.raise_file_limit(10) >= 10


# ---- the SDK -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def sdk() -> AsyncIterator[tuple[FakePool, openai.AsyncOpenAI]]:
    pool = FakePool(Script(ids=ids_of("hello")))
    async with running(pool, api_key=(KEY,)) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            yield pool, client


async def test_the_sdk_reads_answers_and_streams(sdk: tuple[FakePool, openai.AsyncOpenAI]) -> None:
    _, client = sdk
    whole = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    assert whole.choices[0].message.content == "hello" and whole.usage and whole.usage.completion_tokens == 5
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello"
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens == 5 and not chunks[-1].choices
    legacy = await client.completions.create(model="tiny", prompt="x", stream=True)
    assert "".join([c.choices[0].text async for c in legacy if c.choices]) == "hello"
    assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_the_sdk_raises_its_own_classes(sdk: tuple[FakePool, openai.AsyncOpenAI]) -> None:
    pool, client = sdk
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="tiny", prompt=[7] * 600)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong-key").models.list()
    pool.scripts.append(Script(ids=ids_of("abc"), error=WorkerLost(0, "killed")))
    with pytest.raises(openai.APIError) as lost:
        async for _ in await client.completions.create(model="tiny", prompt="x", stream=True):
            pass
    assert lost.value.code == "worker_lost"
