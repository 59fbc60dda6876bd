"""Three questions a prober asks, answered from the pool's own reading at that moment; nothing is remembered between
calls.

/livez   is the process alive: 200 as long as the event loop answers.
/readyz  can a request be served: 200 while at least one worker can take it (an unloaded one loads on demand).
/health  how well: ok, degraded (some workers can't serve) or unavailable, and why for each worker.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import msgspec

from server.errors import Header, without_paths
from server.exchange import JSON_HEADER, Exchange, Receive, Scope, Send
from shm.board import WorkerState
from workers.snapshot import PoolSnapshot, WorkerSnapshot

Snapshot = Callable[[], PoolSnapshot]
_NO_STORE: Header = (b"cache-control", b"no-store")
_LOADING_RETRY_S = 5


def can_serve(worker: WorkerSnapshot) -> bool:
    """Whether a request could go to it, now or once it has loaded again."""
    return worker.is_serving or (worker.state is WorkerState.UNLOADED and not worker.is_cordoned)


def health_of(snapshot: PoolSnapshot) -> dict[str, Any]:
    """The body of /health."""
    serving = sum(can_serve(worker) for worker in snapshot.workers)
    if serving == 0 or snapshot.is_draining:
        status = "unavailable"
    else:
        status = "ok" if serving == len(snapshot.workers) else "degraded"
    return {
        "status": status,
        "workers_serving": serving,
        "workers": len(snapshot.workers),
        "draining": snapshot.is_draining,
        "running": snapshot.running,
        "capacity": snapshot.capacity,
        "queued": snapshot.queue.requests,
        "uptime_s": round(snapshot.uptime_s, 1),
        "worker": [_worker(worker) for worker in snapshot.workers],
    }


def is_ready(snapshot: PoolSnapshot) -> bool:
    return not snapshot.is_draining and any(can_serve(worker) for worker in snapshot.workers)


def retry_after_s(snapshot: PoolSnapshot, now_ns: int) -> int:
    """When asking again may help: the earliest end of a backoff, else a few seconds."""
    waits = [
        (worker.board.backoff_until_ns - now_ns) / 1e9
        for worker in snapshot.workers
        if worker.state is WorkerState.BACKOFF and worker.board is not None
    ]
    soonest = min((wait for wait in waits if wait > 0), default=float(_LOADING_RETRY_S))
    return max(1, math.ceil(soonest))


def _worker(worker: WorkerSnapshot) -> dict[str, Any]:
    return {
        "index": worker.index,
        "device": worker.device,
        "state": worker.state,
        "reason": _reason(worker),
        "serving": can_serve(worker),
        "cordoned": worker.is_cordoned,
        "load_percent": worker.board.load_percent if worker.board is not None else None,
        "progress_age_s": _rounded(worker.progress_age_s),
        "restarts": worker.restarts,
        "running": worker.running,
        "capacity": worker.capacity,
    }


def _reason(worker: WorkerSnapshot) -> str:
    """Without what the decoder wrote last: this answer needs no key. /status has it all."""
    return without_paths(worker.reason.partition("; last line")[0])


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


class Livez:
    """GET /livez."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        exchange.endpoint = "/livez"
        await exchange.respond(200, b'{"status":"ok"}', (JSON_HEADER, _NO_STORE))


class Readyz:
    """GET /readyz."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        exchange.endpoint = "/readyz"
        snapshot = self._snapshot()
        if is_ready(snapshot):
            await exchange.respond(200, b'{"status":"ready"}', (JSON_HEADER, _NO_STORE))
            return
        word = "draining" if snapshot.is_draining else "not ready"
        await exchange.respond(503, msgspec.json.encode({"status": word}), _unready_headers(snapshot))


class Health:
    """GET /health: 200 for ok and degraded, 503 for unavailable."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        exchange.endpoint = "/health"
        snapshot = self._snapshot()
        body = health_of(snapshot)
        if body["status"] == "unavailable":
            await exchange.respond(503, msgspec.json.encode(body), _unready_headers(snapshot))
        else:
            await exchange.respond(200, msgspec.json.encode(body), (JSON_HEADER, _NO_STORE))


def _unready_headers(snapshot: PoolSnapshot) -> tuple[Header, ...]:
    seconds = retry_after_s(snapshot, time.monotonic_ns())
    return (JSON_HEADER, _NO_STORE, (b"retry-after", str(seconds).encode()))
