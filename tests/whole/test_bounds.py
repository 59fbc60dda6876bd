"""The real server under bodies, heads and connections that are too large, too slow, too deep or too many; others are served
meanwhile, memory stays, and probes are answered."""

import asyncio
import contextlib
import gzip
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.fakes.echo import echo_prompt
from tests.whole.peer import Peer
from tests.whole.scripted import KEY, Scripted, new_marker, scripted, text_of

COMPLETIONS = "/v1/completions"
MiB = 1 << 20
LIMIT = 8 * MiB  # body_limit of the shared server
PROBE_S = 0.5


@pytest.fixture(autouse=True)
def flat_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test here costs the server 50 MB."""
    server: Scripted = request.getfixturevalue("shared_server")
    before = server.process.memory_info().rss
    yield
    assert server.process.memory_info().rss - before < 50 * MiB


_PROBER = """
import socket, sys, time
port, key = int(sys.argv[1]), sys.argv[2]
while True:
    for path in ("/health", "/metrics"):
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", port)) as peer:
            head = f"GET {path} HTTP/1.1", "host: x", f"authorization: Bearer {key}", "connection: close"
            peer.sendall("\\r\\n".join([*head, "", ""]).encode())
            answer = b""
            while part := peer.recv(65536):
                answer += part
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        print(time.monotonic() - began, flush=True)
    time.sleep(0.005)
"""


@asynccontextmanager
async def served_meanwhile(server: Scripted) -> AsyncIterator[None]:
    """Normal requests go on, and so do probes, from a process that does nothing else; the probes don't take long."""
    is_over = asyncio.Event()

    async def ask() -> None:
        while not is_over.is_set():
            marker = new_marker()
            status, answer = await server.call("POST", COMPLETIONS, {"prompt": echo_prompt(marker), "max_tokens": 5})
            assert status == 200 and answer["choices"][0]["text"] == text_of(marker, 5)

    prober = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-E", "-c", _PROBER, str(server.port), KEY, stdout=asyncio.subprocess.PIPE
    )
    asking = asyncio.create_task(ask())
    try:
        yield
    finally:
        is_over.set()
        await asking
        assert prober.returncode is None, "a probe failed"
        prober.terminate()
        out, _ = await prober.communicate()
    times = sorted(map(float, out.split()[:-1]))
    assert len(times) > 20 and times[int(len(times) * 0.99)] < PROBE_S


async def test_ten_gigabytes_are_refused_by_their_announcement(server: Scripted) -> None:
    async with server.peer() as peer:
        peer.write(peer.head_of("POST", COMPLETIONS, f"content-length: {10 << 30}\r\n") + b'{"prompt": "')
        status, headers, body = await peer.answer()
        assert (status, headers["connection"]) == (413, "close")
        assert json.loads(body)["error"]["code"] == "request_too_large"
        assert await peer.rest() == b""


async def test_a_body_without_an_end_is_refused_at_the_limit(server: Scripted) -> None:
    chunk = b"%x\r\n" % MiB + b" " * MiB + b"\r\n"
    async with server.peer() as peer:
        peer.write(peer.head_of("POST", COMPLETIONS, "transfer-encoding: chunked\r\n"))
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 4 * LIMIT and not peer.writer.transport.is_closing():
                peer.write(chunk)
                sent += MiB
                await asyncio.wait_for(peer.writer.drain(), 10)
        assert LIMIT <= sent < 4 * LIMIT
        answer = await peer.rest()
    assert not answer or b" 413 " in answer.split(b"\r\n")[0]  # a reset may overtake what was answered


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x", "unknown": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"prompt": "x", "response_format": {"type": "text", "json_schema": '
        + b"[" * 100_000
        + b"]" * 100_000
        + b"}}",
        b'{"prompt": "x", "a": ' + b"[" * 2_000 + b"]" * 2_000 + b"}",  # small enough to be read on the event loop
    ],
    ids=["open", "in a field", "in an unknown field", "in an untyped field", "short"],
)
async def test_json_nested_deeply_is_a_400(server: Scripted, body: bytes) -> None:
    status, answer = await server.call("POST", COMPLETIONS, body)
    assert status == 400 and answer["error"]["code"] in ("invalid_json", "invalid_type", "invalid_value"), answer


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "gzip, identity"])
async def test_compressed_bodies_are_not_unpacked(server: Scripted, coding: str) -> None:
    async with server.peer() as peer:
        peer.ask("POST", COMPLETIONS, gzip.compress(b" " * 10 * MiB), f"content-encoding: {coding}\r\n")
        assert (await peer.answer())[0] == 415


async def test_drips_are_ended_in_time_and_hold_nobody_up(server: Scripted) -> None:
    """100 heads and 100 bodies that come byte by byte. Time limits of both are 2 s here."""
    peers = [server.peer() for _ in range(200)]
    over: list[bytes] = []

    async def drip(peer: Peer, data: Iterator[bytes]) -> None:
        async with peer:
            reading = asyncio.create_task(peer.rest())
            for byte in data:
                if reading.done():
                    break
                peer.write(byte)
                await asyncio.wait([reading], timeout=0.25)
            over.append(await reading)

    def head() -> Iterator[bytes]:
        yield b"POST /v1/completions HTTP/1.1\r\n"
        yield from (b"x" for _ in range(40))

    def body(peer: Peer) -> Iterator[bytes]:
        yield peer.head_of("POST", COMPLETIONS, "content-length: 1000\r\n")
        yield from (b" " for _ in range(40))

    async with served_meanwhile(server):
        began = time.monotonic()
        await asyncio.gather(*(drip(peer, body(peer) if at % 2 else head()) for at, peer in enumerate(peers)))
        assert time.monotonic() - began < 8
    assert len(over) == 200
    assert all(b" 408 " in answer.split(b"\r\n")[0] and b"request_timeout" in answer for answer in over)


async def test_silent_connections_make_room_and_go(server: Scripted) -> None:
    """400 of them, and 300 may be open."""
    peers = [server.peer() for _ in range(400)]
    for peer in peers:
        await peer.__aenter__()
    async with served_meanwhile(server):
        closed = await asyncio.gather(*(peer.rest() for peer in peers))
    assert sum(not answer for answer in closed) >= 100, "those that had been silent longest made room"
    assert all(not answer or b" 408 " in answer for answer in closed)
    for peer in peers:
        peer.leave()
    metrics = await server.metrics()
    assert "ringfence_connections_evicted_total" in metrics


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    with scripted(tmp_path_factory.mktemp("wide"), "--queue-tokens", "10000000", slots=48) as server:
        yield server


def megabyte(number: int) -> tuple[str, dict[str, Any]]:
    """1 MB of words, as a text or as a conversation of 1,000 messages."""
    words = "the quick brown fox jumps over the lazy dog " * 24
    if number % 2:
        return COMPLETIONS, {"prompt": words * 1000}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": words}] * 1000}


async def test_probes_are_answered_beside_streams_and_huge_prompts(wide: Scripted) -> None:
    """B30: 48 streams, and 8 prompts of 1 MB that are read, templated, tokenised and then refused as too long."""
    wide.stage.script(token_delay_s=0.05)

    async def stream() -> None:
        marker = new_marker()
        async with wide.peer() as peer:
            peer.ask("POST", COMPLETIONS, {"prompt": echo_prompt(marker), "max_tokens": 60, "stream": True})
            await peer.head()
            *events, done = await peer.events()
        assert done == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in events) == text_of(marker, 60)

    async def huge(number: int) -> None:
        status, answer = await wide.call("POST", *megabyte(number))
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")

    async with served_meanwhile(wide):
        await asyncio.gather(*(stream() for _ in range(47)), *map(huge, range(8)))
    await wide.clean()
