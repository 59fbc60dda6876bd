"""HTTP/1.1 to a server on loopback, one connection per request: small enough that the client is never the bottleneck,
and bare enough that a test can stop reading, or leave, at any byte.

    async with call(port, "POST", "/v1/completions", {"prompt": "x", "stream": True}) as reply:
        reply.status, reply.headers
        async for event in reply.events(): ...
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Reply:
    """Status and headers of an answer (names in lower case), and the way to its body."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises asyncio.IncompleteReadError when the connection ends before it does."""
        if self.headers.get("transfer-encoding") == "chunked":
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                yield (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)
        else:
            yield await self.reader.readexactly(int(self.headers.get("content-length", "0")))

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])

    async def json(self) -> Any:
        return json.loads(await self.body())

    async def events(self) -> AsyncIterator[str]:
        """Data of each server-sent event; comments are left out."""
        unread = b""
        async for piece in self.pieces():
            *blocks, unread = (unread + piece).split(b"\n\n")
            for block in blocks:
                if block.startswith(b"data: "):
                    yield block[6:].decode()
                elif not block.startswith(b":"):
                    raise ValueError(f"no server-sent event: {block[:100]!r}")
        if unread:
            raise ValueError(f"the stream ends within an event: {unread[:100]!r}")


@asynccontextmanager
async def call(
    port: int,
    method: str,
    path: str,
    body: Any = None,
    *,
    key: str = "",
    receive_bytes: int = 0,
    buffer_bytes: int = _BUFFER_BYTES,
) -> AsyncIterator[Reply]:
    """Send a request and read the head of its answer. Leaving the block closes the connection.

    receive_bytes: size of the socket's receive buffer, for clients that are to be slow. Raises OSError.
    """
    reader, writer = await _connect(port, receive_bytes, buffer_bytes)
    try:
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        if key:
            head += f"authorization: Bearer {key}\r\n"
        if body is not None:
            head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n"
        writer.write(head.encode() + b"\r\n" + data)
        status, headers = _parse(await reader.readuntil(b"\r\n\r\n"))
        yield Reply(status, headers, reader, writer)
    finally:
        writer.transport.abort() if receive_bytes else writer.close()


async def fetch(port: int, path: str, *, method: str = "GET", key: str = "") -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON of a short request."""
    async with call(port, method, path, key=key) as reply:
        return reply.status, reply.headers, await reply.json()


async def _connect(
    port: int, receive_bytes: int, buffer_bytes: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection = socket.socket()
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        return await asyncio.open_connection(sock=connection, limit=buffer_bytes)
    except BaseException:
        connection.close()
        raise


def _parse(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return int(first.split(" ")[1]), {name.lower(): value.strip() for name, _, value in pairs}
