"""The outermost middleware: every request enters and leaves here.

It makes the Exchange, turns whatever is raised further in into the one error answer, and at the end counts and logs
the request once. Pure ASGI. An exception in counting or logging never reaches the request.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException

from server.exchange import KEY, Exchange, Receive, Scope, Send
from server.failures import ClientGone, MethodNotAllowed, RouteNotFound
from server.metrics import Metrics
from workers.errors import SlowClient

ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger("ringfence.request")


class Entrance:
    """Middleware around everything else. `live` holds the exchanges that are being served."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, live: set[Exchange]) -> None:
        self.app = app
        self._metrics = metrics
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._refuse_other(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send)
        scope[KEY] = exchange
        scope.setdefault(
            "app", self
        )  # Starlette's Route then raises HTTPException instead of answering 405 in plain text
        self._live.add(exchange)
        try:
            await self._serve(exchange)
        finally:
            self._live.discard(exchange)
            self._record(exchange)

    async def _serve(self, exchange: Exchange) -> None:
        try:
            await self.app(exchange.scope, exchange.receive, exchange.send)
        except ClientGone:
            exchange.is_gone = True
        except SlowClient as error:
            exchange.note(error)
            exchange.abort()
        except asyncio.CancelledError:
            # uvicorn cancels what outlives its own shutdown; the connection is of no more use.
            exchange.abort()
            raise
        except HTTPException as error:
            await self._answer(exchange, _translate(error, exchange))
        except Exception as error:  # noqa: BLE001 the top of a request: it becomes its answer
            await self._answer(exchange, error)

    async def _answer(self, exchange: Exchange, error: Exception) -> None:
        """The error's answer. If even that fails, the connection is dropped."""
        try:
            await exchange.fail(error)
        except Exception:
            logger.exception("event=answer_failed id=%s", exchange.id)
            exchange.abort()

    def _record(self, exchange: Exchange) -> None:
        try:
            self._metrics.record(exchange)
            if logger.isEnabledFor(logging.INFO):
                logger.info(_line(exchange))
        except Exception:
            logger.exception("event=record_failed id=%s", exchange.id)

    async def _refuse_other(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1003})
        else:
            await self.app(scope, receive, send)


def _translate(error: HTTPException, exchange: Exchange) -> Exception:
    """Starlette's own refusals, as ours."""
    scope = exchange.scope
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "").split(", ")
        return MethodNotAllowed(scope["method"], tuple(sorted(allowed)))
    return RouteNotFound(scope["method"], scope["path"]) if error.status_code == 404 else error


def _line(exchange: Exchange) -> str:
    """The request in one line; nothing of its content."""
    words = [
        "event=request",
        f"id={exchange.id}",
        f"method={exchange.scope['method']}",
        f"endpoint={exchange.endpoint}",
        f"status={exchange.status}",
        f"ms={(time.monotonic() - exchange.started_s) * 1000:.1f}",
    ]
    if exchange.worker is not None:
        words.append(f"worker={exchange.worker}")
    if exchange.queue_ms is not None:
        words.append(f"queue_ms={exchange.queue_ms:.1f}")
    if exchange.prompt_tokens:
        words.append(f"prompt={exchange.prompt_tokens} generated={exchange.completion_tokens}")
    if exchange.finish:
        words.append(f"finish={exchange.finish}")
    if exchange.moves:
        words.append(f"moves={exchange.moves}")
    if exchange.error_code:
        words.append(f"error={exchange.error_code}")
    if exchange.is_gone:
        words.append("client=gone")
    return " ".join(words)
