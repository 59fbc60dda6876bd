"""Reading a request's body within its bounds: its size while it arrives, the time until its last byte, JSON only, and
how much all bodies together may hold.

    with service.bodies.of(exchange) as body:
        data = await body.read()
        ...                     decode and tokenise
        body.release()          the text is no longer held; leaving the block does it too

Bytes count against the total as they arrive, not as they are announced: an upload that is slow, or never comes, keeps
nobody else out.
"""

import asyncio
from types import TracebackType

from server.exchange import Exchange
from server.failures import BodiesFull, BodyTooLarge, BodyTooSlow, ClientGone, UnsupportedMediaType

_JSON = b"application/json"


class Bodies:
    """The bounds of all bodies. held_bytes: of those that have arrived and were not released, in part or whole."""

    __slots__ = ("held_bytes", "limit_bytes", "timeout_s", "total_bytes")

    def __init__(self, *, limit_bytes: int, total_bytes: int, timeout_s: float) -> None:
        self.limit_bytes = limit_bytes
        self.total_bytes = total_bytes
        self.timeout_s = timeout_s
        self.held_bytes = 0

    def __repr__(self) -> str:
        return f"Bodies(held={self.held_bytes}, total={self.total_bytes}, limit={self.limit_bytes})"

    def of(self, exchange: Exchange) -> "Body":
        return Body(self, exchange)


class Body:
    """One request's body. size_bytes: what has arrived and counts against the total."""

    __slots__ = ("_bodies", "_exchange", "size_bytes")

    def __init__(self, bodies: Bodies, exchange: Exchange) -> None:
        self._bodies = bodies
        self._exchange = exchange
        self.size_bytes = 0

    def __enter__(self) -> "Body":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """The caller keeps nothing of it any more. May be called any number of times."""
        self._bodies.held_bytes -= self.size_bytes
        self.size_bytes = 0

    async def read(self) -> bytes:
        """The whole body. Raises UnsupportedMediaType, BodyTooLarge, BodiesFull, BodyTooSlow, ClientGone."""
        check_headers(self._exchange.scope["headers"], self._bodies.limit_bytes)
        try:
            async with asyncio.timeout(self._bodies.timeout_s):
                return await self._collect()
        except TimeoutError:
            raise BodyTooSlow(self._bodies.timeout_s) from None

    async def _collect(self) -> bytes:
        exchange = self._exchange
        parts: list[bytes] = []
        while True:
            message = await exchange.receive()
            if message["type"] == "http.disconnect":
                exchange.is_gone = True
                raise ClientGone
            part = message.get("body", b"")
            self._take(len(part))
            parts.append(part)
            if not message.get("more_body", False):
                exchange.is_body_read = True
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _take(self, size_bytes: int) -> None:
        bodies = self._bodies
        if self.size_bytes + size_bytes > bodies.limit_bytes:
            raise BodyTooLarge(bodies.limit_bytes)
        if bodies.held_bytes + size_bytes > bodies.total_bytes:
            raise BodiesFull(bodies.total_bytes)
        self.size_bytes += size_bytes
        bodies.held_bytes += size_bytes


def check_headers(headers: list[tuple[bytes, bytes]], limit_bytes: int) -> None:
    """Refuse from the headers alone what needs no reading."""
    for name, value in headers:
        if name == b"content-type" and not _is_json(value):
            raise UnsupportedMediaType(f"Content-Type {value.decode('latin-1')}")
        if name == b"content-encoding" and value.strip().lower() not in (b"identity", b""):
            raise UnsupportedMediaType(f"Content-Encoding {value.decode('latin-1')}")
        if name == b"content-length" and (not value.isdigit() or len(value) > 18 or int(value) > limit_bytes):
            raise BodyTooLarge(limit_bytes)


def _is_json(value: bytes) -> bool:
    kind = value.split(b";", 1)[0].strip().lower()
    return kind == _JSON or (kind.startswith(b"application/") and kind.endswith(b"+json"))
