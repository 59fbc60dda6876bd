"""Operators' calls. They need the admin key; see auth.py.

POST /admin/workers/{n}/{action}   restart, drain, resume, cordon, uncordon, unload, load
POST /admin/restart                all workers, one after the other, without a failed request
GET  /admin/incidents              what is recorded of deaths

An action is answered when it is done (200, or 202 with `done: false` if its limit passed first) with the worker as it
is. A client that gives up earlier does not undo it.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from server.backend import Backend
from server.exchange import Exchange, Receive, Scope, Send
from server.failures import AdminFailed, RouteNotFound, WorkerNotFound
from server.health import health_of

ACTIONS = ("restart", "drain", "resume", "cordon", "uncordon", "unload", "load")


class WorkerAction:
    """POST /admin/workers/{n}/{action}."""

    def __init__(self, pool: Backend) -> None:
        self._pool = pool
        self._calls: dict[str, Callable[[int], Coroutine[Any, Any, bool]]] = {
            action: getattr(pool.operations, action) for action in ACTIONS
        }
        self._running: set[asyncio.Task[bool]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        exchange.endpoint = "/admin/workers/{n}/{action}"
        action = scope["path_params"]["action"]
        if action not in self._calls:
            raise RouteNotFound(scope["method"], scope["path"])
        index = self._index(scope["path_params"]["n"])
        is_done = await self._finish(action, self._calls[action](index))
        worker = health_of(self._pool.snapshot())["worker"][index]
        body = msgspec.json.encode({"action": action, "done": is_done, "worker": worker})
        await exchange.respond(200 if is_done else 202, body)

    def _index(self, text: str) -> int:
        count = len(self._pool.snapshot().workers)
        if not text.isdecimal() or len(text) > 4 or int(text) >= count:
            raise WorkerNotFound(text, count)
        return int(text)

    async def _finish(self, action: str, work: Coroutine[Any, Any, bool]) -> bool:
        """Shielded: the caller's leaving must not stop a restart half-way."""
        task = asyncio.create_task(work, name=f"admin-{action}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)


class RollingRestart:
    """POST /admin/restart. Answers 202 at once: with long requests running it may take minutes; /status shows it."""

    def __init__(self, pool: Backend) -> None:
        self._pool = pool
        self._task: asyncio.Task[bool] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        exchange.endpoint = "/admin/restart"
        if self._task is not None and not self._task.done():
            raise AdminFailed("restart", "a rolling restart is running already")
        self._task = asyncio.create_task(self._pool.operations.restart_all(), name="admin-restart-all")
        await exchange.respond(202, b'{"action":"restart","status":"started"}')


class Incidents:
    """GET /admin/incidents, newest first as the pool gives them."""

    def __init__(self, pool: Backend) -> None:
        self._pool = pool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        exchange.endpoint = "/admin/incidents"
        await exchange.respond(200, msgspec.json.encode({"object": "list", "data": self._pool.incidents()}))
