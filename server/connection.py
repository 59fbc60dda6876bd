"""uvicorn's connection with the bounds that it leaves open: how many, how large a head, how long a head may take.

At the limit of connections the one that has been idle longest makes room (it has sent nothing, or no whole head); so
thousands of silent connections shut nobody out. When all of them are busy, the newcomer gets 503 and is closed.

Whatever the bytes were, the answer is OpenAI's envelope. `scope["extensions"]["ringfence.abort"]` drops the
connection without waiting for the client to take what is buffered; a plain close would wait for ever for one that
doesn't read.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from server.errors import describe
from server.failures import BodyTooSlow, HeadersTooLarge, MalformedRequest, Refusal, TooManyConnections

_UPGRADE_HEADERS = (b"upgrade", b"connection", b"http2-settings")


@dataclass(slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of all connections of one server, and how often they were reached.

    idle: those without a request, the longest idle first. open: all there are. refused: newcomers that found no room.
    evicted: idle ones that made room.
    """

    connections: int
    header_bytes: int
    header_timeout_s: float
    idle: "dict[Connection, None]" = field(default_factory=dict)
    open: int = 0
    refused: int = 0
    evicted: int = 0


class Connection(HttpToolsProtocol):
    """One connection. Made by uvicorn, through a subclass that carries the limits (see `limited`)."""

    limits: ConnectionLimits

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = True
        self._is_deaf = False  # what comes is no HTTP any more
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.limits.open += 1
        if len(self.connections) > self.limits.connections and not self._make_room():
            self.limits.refused += 1
            self._refuse(TooManyConnections(self.limits.connections))
            return
        self.limits.idle[self] = None
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.open -= 1
        self.limits.idle.pop(self, None)
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf or self.transport.is_closing():
            return
        if self._is_in_head:
            self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline_upgrade(data[offer.args[0] :])
        except httptools.HttpParserError:
            self._on_malformed()
        if self._is_in_head and self._head_bytes > self.limits.header_bytes and not self.transport.is_closing():
            self._refuse(HeadersTooLarge(self.limits.header_bytes))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {"ringfence.abort": self.transport.abort}  # type: ignore[dict-item]
        self._is_in_head = True
        if self._head_timer is None:
            self._arm()

    def on_headers_complete(self) -> None:
        if self._offers_upgrade():
            self.scope["method"] = self.parser.get_method().decode("ascii")
            return  # data_received declines it
        self._disarm()
        self._is_in_head = False
        is_large = self._head_bytes > self.limits.header_bytes and self._head_size() > self.limits.header_bytes
        self._head_bytes = 0
        self.limits.idle.pop(self, None)
        if is_large:
            self._refuse(HeadersTooLarge(self.limits.header_bytes))
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.cycle is not None:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and not self.pipeline:
            self.limits.idle[self] = None

    def _decline_upgrade(self, rest: bytes) -> None:
        """Go on in HTTP/1.1 with a request that offered another protocol (RFC 9110, 7.8).

        Java's HttpClient offers h2c with its first request, and curl does on request. The parser takes what follows such
        a head for the other protocol, so a new one gets the head without the offer, and the body.
        """
        head = [self.scope["method"].encode(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name not in _UPGRADE_HEADERS:
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join([*head, b"\r\n", rest]))

    def _offers_upgrade(self) -> bool:
        return bool(self.parser.should_upgrade()) and any(name == b"upgrade" for name, _ in self.headers)

    def _on_malformed(self) -> None:
        """What came is no HTTP. A whole request before it is still answered."""
        cycle: RequestResponseCycle | None = self.cycle
        self._is_deaf = True
        if cycle is None or cycle.response_complete:
            self._refuse(MalformedRequest())
        elif not cycle.more_body:
            cycle.keep_alive = False
        else:
            self._refuse(MalformedRequest(), is_mid_request=not self.pipeline and not cycle.response_started)

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.header_timeout_s, self._on_late_head)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_late_head(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(BodyTooSlow(self.limits.header_timeout_s))

    def _make_room(self) -> bool:
        """Close the connection that has been idle longest. False if none is idle."""
        victim = next(iter(self.limits.idle), None)
        if victim is None:
            return False
        del self.limits.idle[victim]
        self.limits.evicted += 1
        victim.transport.abort()
        return True

    def _refuse(self, cause: Refusal, *, is_mid_request: bool = False) -> None:
        """Answer without a request, or in place of its response, and close. In the middle of a response there is nothing
        to answer: only close."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete or is_mid_request:
            reply = describe(cause)
            body = reply.body()
            headers = [*reply.header_list(), (b"content-length", str(len(body)).encode())]
            lines = [
                STATUS_LINE[reply.status],
                *(name + b": " + value + b"\r\n" for name, value in headers),
                b"\r\n",
                body,
            ]
            self.transport.write(b"".join(lines))
        self.transport.close()


def limited(limits: ConnectionLimits) -> type[Connection]:
    """The connection class that uvicorn is given as its `http` protocol."""
    return type("LimitedConnection", (Connection,), {"limits": limits})
