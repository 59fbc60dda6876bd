"""The other end of one request: it may leave, it may stop reading, and it wants signs of life.

    async with Client(exchange, ticker) as client:   # raises ClientGone or SlowClient out of whatever the body awaits
        await client.send(data)

One task per request awaits `receive()`, for the whole of the service; when it says http.disconnect the body is
cancelled, wherever it waits. That is how asyncio.timeout works, and __aexit__ turns the cancellation into the cause
the same way. Refused: finding out from a failed write (there is none while a request queues or is not streamed), and
polling is_disconnected().

Time comes from one Ticker for all requests, ten times a second while there are any: it drops a client that let a send
wait longer than the stall limit, and calls `on_silence` when nothing was sent for a while. A send costs two clock
readings and no timer.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType

from server.exchange import Exchange
from server.failures import ClientGone
from server.ticker import Ticker
from workers.errors import SlowClient


class Client:
    """Watches one client while its request is served. silence_s: after this long without a byte `on_silence` runs."""

    __slots__ = (
        "_cancelling",
        "_cause",
        "_exchange",
        "_listener",
        "_owner",
        "_poke",
        "_sending",
        "_sent_s",
        "_stall_limit_s",
        "_ticker",
        "on_silence",
        "silence_s",
    )

    def __init__(self, exchange: Exchange, ticker: Ticker, *, stall_limit_s: float) -> None:
        self._exchange = exchange
        self._ticker = ticker
        self._stall_limit_s = stall_limit_s
        self._cause: Exception | None = None
        self._owner: asyncio.Task[object] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._poke: asyncio.Task[None] | None = None
        self._cancelling = 0
        self._sending = 0
        self._sent_s = exchange.started_s
        self.on_silence: Callable[[], Awaitable[None]] | None = None
        self.silence_s = 0.0

    async def __aenter__(self) -> "Client":
        self._owner = asyncio.current_task()
        assert self._owner is not None
        self._cancelling = self._owner.cancelling()
        self._listener = asyncio.get_running_loop().create_task(self._listen())
        self._ticker.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ticker.discard(self)
        for task in (self._listener, self._poke):
            if task is not None:
                task.cancel()
        if self._cause is not None and self._owner is not None:
            is_ours = self._owner.uncancel() <= self._cancelling and kind is asyncio.CancelledError
            if is_ours:
                raise self._cause from None

    async def send(self, data: bytes, *, more: bool = True) -> None:
        """Send a part of the body. Waits while the client does not read; the stall limit ends that."""
        if self._poke is not None and not self._poke.done():
            await self._poke
        if not self._sending:
            self._sent_s = time.monotonic()
        self._sending += 1
        try:
            await self._exchange.send({"type": "http.response.body", "body": data, "more_body": more})
        finally:
            self._sending -= 1

    def on_tick(self, now_s: float) -> None:
        """The ticker's call: judge the send that waits, or the silence."""
        silent_s = now_s - self._sent_s
        if self._sending:
            if silent_s > self._stall_limit_s:
                self._leave(SlowClient(silent_s))
            return
        if self.on_silence is not None and silent_s >= self.silence_s and (self._poke is None or self._poke.done()):
            self._poke = asyncio.get_running_loop().create_task(self._break_silence(now_s))

    async def _break_silence(self, now_s: float) -> None:
        assert self.on_silence is not None
        self._sending += 1
        self._sent_s = now_s
        try:
            await self.on_silence()
        finally:
            self._sending -= 1

    async def _listen(self) -> None:
        while (await self._exchange.receive())["type"] != "http.disconnect":
            pass
        if not self._exchange.is_complete:
            self._exchange.is_gone = True
            self._leave(ClientGone())

    def _leave(self, cause: Exception) -> None:
        if self._cause is None and self._owner is not None:
            self._cause = cause
            self._owner.cancel()
