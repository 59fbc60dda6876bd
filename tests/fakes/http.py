"""The application called as a server would call it, with hand-written receive and send; and over a real socket.

async with Call(app, "POST", "/v1/completions", {"prompt": "x"}) as call:
    await call.chunk()       # waits for a message that carries a body
    call.leave()             # http.disconnect
"""

import asyncio
import json
import os
import tempfile
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

from server.app import build_app
from server.config import Config
from server.service import Service, new_service
from server.tokenizer import Tokenizer
from tests import tiny_model
from tests.fakes.pool import FakePool

Message = dict[str, Any]


@lru_cache(maxsize=1)
def tiny_tokenizer() -> Tokenizer:
    """The tiny model's vocabulary: byte b is token 6 + b."""
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.load(tiny_model.build(Path(folder) / "tiny.gguf"))


def ids_of(text: str) -> list[int]:
    """One token for each byte."""
    return [tiny_model.FIRST_BYTE + byte for byte in text.encode()]


def config_of(**values: Any) -> Config:
    return Config(**{"model_name": "tiny", "demo": True, **values})


def service_of(pool: FakePool, **values: Any) -> Service:
    return new_service(config_of(**values), pool, tiny_tokenizer())


class Call:
    """One request. Messages that the application sends are kept in `messages`."""

    def __init__(
        self,
        app: Any,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Iterable[tuple[str, str]] = (),
        parts: Iterable[bytes] | None = None,
        query: str = "",
    ) -> None:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        chunks = [data] if parts is None else list(parts)
        for place, chunk in enumerate(chunks):
            more = place < len(chunks) - 1
            self._inbox.put_nowait({"type": "http.request", "body": chunk, "more_body": more})
        given = [(name.lower().encode(), value.encode()) for name, value in headers]
        if body is not None and not any(name == b"content-type" for name, _ in given):
            given.append((b"content-type", b"application/json"))
        self.scope: Message = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": given,
            "http_version": "1.1",
            "scheme": "http",
            "extensions": {"ringfence.abort": self._abort},
        }
        self.messages: list[Message] = []
        self.is_aborted = False
        self.blocks = False  # a client that does not read: send waits
        self._unblocked = asyncio.Event()
        self._changed = asyncio.Event()
        self._app = app
        self.task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Call":
        self.task = asyncio.create_task(self._app(self.scope, self._receive, self._send))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self.task is not None
        if kind is not None:
            self.task.cancel()
        await asyncio.wait([self.task], timeout=10)
        assert self.task.done(), f"the request goes on: {self.task!r}"
        if kind is None and not self.task.cancelled():
            self.task.result()

    def leave(self) -> None:
        """The client closes its connection."""
        self._inbox.put_nowait({"type": "http.disconnect"})

    def push(self, body: bytes, *, more: bool) -> None:
        self._inbox.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def unblock(self) -> None:
        self.blocks = False
        self._unblocked.set()

    async def started(self) -> Message:
        """Wait for the head of the response."""
        await self._until(lambda: bool(self.messages))
        return self.messages[0]

    async def text_holds(self, piece: str) -> None:
        """Wait until the body has this in it."""
        await self._until(lambda: piece in self.body.decode())

    async def finished(self) -> "Call":
        assert self.task is not None
        await asyncio.wait_for(asyncio.shield(self.task), 10)
        return self

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        return events_of(self.body)

    async def _until(self, condition: Any) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def _receive(self) -> Message:
        return await self._inbox.get()

    async def _send(self, message: Message) -> None:
        if self.blocks:
            await self._unblocked.wait()
        self.messages.append(message)
        self._changed.set()

    def _abort(self) -> None:
        self.is_aborted = True


async def call(app: Any, method: str, path: str, body: Any = None, **options: Any) -> Call:
    """A whole request."""
    async with Call(app, method, path, body, **options) as request:
        await request.finished()
    return request


def events_of(body: bytes) -> list[Any]:
    """JSON of each `data:` line; "[DONE]" as it is. Checks the framing."""
    assert body.endswith(b"\n\n")
    events: list[Any] = []
    for block in body.decode().split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        assert block.startswith("data: ") and "\n" not in block, block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


def text_of(events: Iterable[Any], index: int = 0) -> str:
    """A choice's text, joined."""
    parts = []
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) else ():
            if choice["index"] == index:
                parts.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
    return "".join(parts)


def app_of(pool: FakePool, **values: Any) -> Any:
    return build_app(service_of(pool, **values))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
