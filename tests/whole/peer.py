"""A client made of a socket: what it sends, reads and how it leaves is the test's own.

async with Peer(port) as peer:
    peer.ask("POST", "/v1/completions", {"prompt": "x", "stream": True})
    status, headers = await peer.head()
    event = await peer.event()
    peer.leave("rst")
"""

import asyncio
import json
import socket
import struct
from types import TracebackType
from typing import Any

WAIT_S = 30.0


class Peer:
    """One connection. Everything that waits raises TimeoutError after WAIT_S."""

    def __init__(self, port: int, *, key: str | None = None) -> None:
        self._port = port
        self._key = key
        self._body = b""  # of a chunked response, what was read and not taken
        self._is_over = False

    async def __aenter__(self) -> "Peer":
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.close()

    def ask(self, method: str, path: str, body: Any = None, headers: str = "") -> None:
        """Send a whole request. body: bytes, or what is sent as JSON."""
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        self.write(self.head_of(method, path, f"content-length: {len(data)}\r\n{headers}") + data)

    def head_of(self, method: str, path: str, headers: str = "") -> bytes:
        key = f"authorization: Bearer {self._key}\r\n" if self._key else ""
        kind = "content-type: application/json\r\n"
        return (
            f"{method} {path} HTTP/1.1\r\nhost: x\r\norigin: https://example.org\r\n{key}{kind}{headers}\r\n".encode()
        )

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> tuple[int, dict[str, str]]:
        lines = (await self._in_time(self.reader.readuntil(b"\r\n\r\n"))).decode().split("\r\n")
        return int(lines[0].split()[1]), dict(line.split(": ", 1) for line in lines[1:] if line)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Head and body of the response."""
        status, headers = await self.head()
        if "content-length" in headers:
            return status, headers, await self._in_time(self.reader.readexactly(int(headers["content-length"])))
        while not self._is_over:
            self._body += await self._chunk()
        return status, headers, self._body

    async def event(self) -> Any:
        """The next event of a stream: JSON, "[DONE]", or the text of a comment; None at the end."""
        while b"\n\n" not in self._body:
            if self._is_over:
                return None
            self._body += await self._chunk()
        block, _, self._body = self._body.partition(b"\n\n")
        text = block.decode()
        if not text.startswith("data: "):
            return text
        return "[DONE]" if text == "data: [DONE]" else json.loads(text[6:])

    async def events(self) -> list[Any]:
        """All that are left."""
        found = []
        while (event := await self.event()) is not None:
            found.append(event)
        return found

    async def rest(self) -> bytes:
        """Everything until the server closes the connection."""
        data = b""
        try:
            while part := await self._in_time(self.reader.read(1 << 16)):
                data += part
        except ConnectionError:
            pass  # it closed before it had read all that was sent
        return data

    def leave(self, how: str = "fin") -> None:
        """Close the connection: "fin", or "rst"."""
        if how == "rst":
            raw = self.writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.writer.transport.abort()
        else:
            self.writer.close()

    async def _chunk(self) -> bytes:
        size = int(await self._in_time(self.reader.readuntil(b"\r\n")), 16)
        data = await self._in_time(self.reader.readexactly(size + 2))
        self._is_over = size == 0
        return data[:-2]

    async def _in_time(self, reading: Any) -> bytes:
        data: bytes = await asyncio.wait_for(reading, WAIT_S)
        return data


async def call(port: int, method: str, path: str, body: Any = None, *, key: str | None = None) -> tuple[int, Any]:
    """Status and body of a whole request; the body as JSON if it is some."""
    async with Peer(port, key=key) as peer:
        peer.ask(method, path, body)
        status, headers, data = await peer.answer()
        return status, json.loads(data) if headers["content-type"].startswith("application/json") else data
