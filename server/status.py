"""GET /status: everything the server knows of itself and its workers, for people and for `ringfence status`."""

from typing import Any

import msgspec

from server.exchange import Exchange, Receive, Scope, Send
from server.health import health_of
from server.service import Service
from workers.snapshot import WorkerSnapshot


class Status:
    """GET /status."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        exchange.endpoint = "/status"
        await exchange.respond(200, msgspec.json.encode(status_of(self._service)))


def status_of(service: Service) -> dict[str, Any]:
    """The body. `health` is /health's status; each worker has the supervisor's judgement and its own board."""
    snapshot = service.pool.snapshot()
    return {
        "health": health_of(snapshot)["status"],
        "model": service.model_name,
        "context": snapshot.context,
        "capabilities": snapshot.capabilities,
        "uptime_s": snapshot.uptime_s,
        "draining": snapshot.is_draining,
        "running": snapshot.running,
        "capacity": snapshot.capacity,
        "tokens_per_s": snapshot.tokens_per_s,
        "queue": snapshot.queue,
        "counters": snapshot.counters,
        "http": {
            "requests": len(service.live),
            "loop_lag_p99_ms": service.ticker.lag_p99_s() * 1000,
            "loop_lag_max_ms": service.ticker.lag_max_s() * 1000,
        },
        "workers": [_worker(worker) for worker in snapshot.workers],
    }


def _worker(worker: WorkerSnapshot) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(worker)
    return fields
