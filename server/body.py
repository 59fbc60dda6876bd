"""Reading a request's body within its bounds: size while it arrives, time until its last byte, JSON only."""

import asyncio

from server.exchange import Exchange
from server.failures import BodyTooLarge, BodyTooSlow, ClientGone, UnsupportedMediaType

_JSON = b"application/json"


async def read_json_body(exchange: Exchange, *, limit_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises UnsupportedMediaType, BodyTooLarge, BodyTooSlow, ClientGone."""
    check_headers(exchange.scope["headers"], limit_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            return await _collect(exchange, limit_bytes)
    except TimeoutError:
        raise BodyTooSlow(timeout_s) from None


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


async def _collect(exchange: Exchange, limit_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await exchange.receive()
        if message["type"] == "http.disconnect":
            exchange.is_gone = True
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            exchange.is_body_read = True
            return parts[0] if len(parts) == 1 else b"".join(parts)
