"""One request and its response: identity, figures, and the only ways in which bytes leave.

The entrance makes one per request and puts it into the scope; endpoints take it from there with `Exchange.of(scope)`.
`send` is a plain function that returns the server's own awaitable, so a chunk of a stream costs one call more than
without it.
"""

import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from server.errors import ErrorReply, Header, describe

Message = dict[str, Any]
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

logger = logging.getLogger("ringfence.request")

KEY = "ringfence"
DISCARDED_BYTES = (
    64 << 10
)  # a body that nobody has read: up to this it is read and dropped, beyond it the connection closes
_SANE_ID = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")
JSON_HEADER: Header = (b"content-type", b"application/json")
EVENT_STREAM_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def new_id(prefix: str) -> str:
    """A name that no other request has: 96 random bits."""
    return prefix + os.urandom(12).hex()


class Exchange:
    """The request's identity and figures (for the log and the metrics), and its response.

    status: 0 until the response has begun. error_code: of the envelope sent, if one was.
    """

    __slots__ = (
        "_send",
        "closes",
        "completion_tokens",
        "endpoint",
        "error_code",
        "finish",
        "first_token_s",
        "id",
        "is_body_read",
        "is_complete",
        "is_gone",
        "moves",
        "prompt_tokens",
        "queue_ms",
        "receive",
        "scope",
        "started_s",
        "status",
        "worker",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        self.started_s = time.monotonic()
        self.id = _request_id(scope)
        self.endpoint = "unmatched"
        self.status = 0
        self.is_body_read = False
        self.is_complete = False
        self.is_gone = False
        self.closes = False
        self.error_code: str | None = None
        self.worker: int | None = None
        self.queue_ms: float | None = None
        self.first_token_s: float | None = None
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.finish = ""
        self.moves = 0

    def __repr__(self) -> str:
        return (
            f"Exchange(id={self.id!r}, endpoint={self.endpoint!r}, status={self.status}, complete={self.is_complete})"
        )

    @staticmethod
    def of(scope: Scope) -> "Exchange":
        exchange: Exchange = scope[KEY]
        return exchange

    def send(self, message: Message) -> Awaitable[None]:
        """ASGI send. Adds x-request-id, and knows what has been sent."""
        if not self.status:
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
            if self.closes and not any(name == b"connection" for name, _ in headers):
                headers.append((b"connection", b"close"))
            return self._send({**message, "headers": headers})
        if not message.get("more_body", False):
            self.is_complete = True
        return self._send(message)

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        """Send the response's head."""
        await self.send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def respond(self, status: int, body: bytes, headers: Iterable[Header] = (JSON_HEADER,)) -> None:
        """Send a whole response."""
        await self.start(status, (*headers, (b"content-length", str(len(body)).encode())))
        await self.send({"type": "http.response.body", "body": body})

    def note(self, error: BaseException) -> ErrorReply:
        """Describe an error that this request is answered with, and log it if it is a fault of ours or of a decoder."""
        reply = describe(error)
        self.error_code = reply.code
        if reply.status == 500:
            logger.error(
                "event=request_failed id=%s endpoint=%s code=%s", self.id, self.endpoint, reply.code, exc_info=error
            )
        return reply

    async def fail(self, error: BaseException) -> None:
        """Answer with an error: as the response if none has begun, as the last event of a stream that has."""
        reply = self.note(error)
        if not self.status:
            await self.respond(reply.status, reply.body(), self._error_headers(reply))
        elif not self.is_complete:
            await self.send({"type": "http.response.body", "body": reply.event()})

    def abort(self) -> None:
        """Drop the connection with whatever it has not taken yet. Only our own connections can (see connection.py)."""
        drop = self.scope.get("extensions", {}).get("ringfence.abort")
        if drop is not None:
            drop()

    def _error_headers(self, reply: ErrorReply) -> list[Header]:
        headers = reply.header_list()
        if not reply.closes and not self.is_body_read and self._announced_body() > DISCARDED_BYTES:
            headers.append((b"connection", b"close"))
        if self.worker is not None:
            headers.append((b"x-ringfence-worker", str(self.worker).encode()))
        return headers

    def _announced_body(self) -> int:
        """Bytes of the body as the headers have it; a chunked one may be of any size."""
        for name, value in self.scope["headers"]:
            if name == b"transfer-encoding":
                return DISCARDED_BYTES + 1
            if name == b"content-length":
                return int(value) if value.isdigit() else DISCARDED_BYTES + 1
        return 0


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return value.decode() if _SANE_ID.fullmatch(value) else new_id("req-")
    return new_id("req-")
