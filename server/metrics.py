"""/metrics, in Prometheus' text format, from a registry of our own.

Requests are counted here, once each, when they end. What the pool knows is read from its snapshot during the scrape;
its counters never decrease; a dead worker shows 1 in its state, 0 for its figures, and none that its board alone knew. Labels are
bounded: worker numbers, states, routes, statuses, error codes; never a request's id or text.
"""

import logging
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from server.body import Bodies
from server.connection import ConnectionLimits
from server.exchange import Exchange, Receive, Scope, Send
from server.logs import dropped_lines
from server.ticker import Ticker
from shm.board import WorkerState
from workers.snapshot import PoolSnapshot, WorkerSnapshot

logger = logging.getLogger("ringfence.metrics")

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each, of no use here

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PER_TOKEN = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
CLIENT_GONE = "499"  # nginx's number for a client that left before the response began

_COUNTER_HELP = {
    "submitted": "Turns given to the pool.",
    "completed": "Turns that ended well.",
    "cancelled": "Turns that their own client cancelled.",
    "failed": "Turns that ended with an error.",
    "rejected": "Requests refused because the queue was full.",
    "expired": "Turns whose deadline passed in the queue.",
    "moved": "Times a turn went on in another decoder.",
    "poisoned": "Requests refused after having cost decoders their lives.",
    "prompt_tokens": "Prompt tokens of turns that ran; those cached included.",
    "cached_tokens": "Prompt tokens that a decoder still had.",
    "generated_tokens": "Tokens generated.",
    "stale_records": "Ring records of generations that were over, dropped.",
    "ring_faults": "Ring records that were no records.",
    "worker_deaths": "Worker processes that died.",
    "worker_hangs": "Worker processes ended because nothing moved.",
    "decoder_deaths": "Decoders that died.",
    "slow_clients": "Turns stopped because their tokens were not taken.",
    "nonfinite": "Times a decoder dropped its caches for values that are no numbers.",
}


class OurCounters:
    """Counters that their owners keep: connections that the bound turned away, log lines that were dropped."""

    def __init__(self) -> None:
        self.limits: ConnectionLimits | None = None

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "ringfence_log_lines_dropped", "Log lines dropped because their reader was slow.", value=dropped_lines()
        )
        if self.limits is None:
            return
        yield GaugeMetricFamily("ringfence_connections", "Connections open.", value=self.limits.open)
        yield GaugeMetricFamily(
            "ringfence_connections_limit", "Connections that may be open.", value=self.limits.connections
        )
        yield CounterMetricFamily(
            "ringfence_connections_refused", "Connections refused because all were busy.", value=self.limits.refused
        )
        yield CounterMetricFamily(
            "ringfence_connections_evicted", "Idle connections closed to make room.", value=self.limits.evicted
        )


class PoolCollector:
    """Reads the pool's snapshot when scraped. A pool that can't be read costs its figures, not the scrape."""

    def __init__(self, snapshot: Callable[[], PoolSnapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> list[Metric]:
        """Nothing at registration: the pool may not be running yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        try:
            snapshot = self._snapshot()
        except Exception:
            logger.exception("event=snapshot_failed")
            return
        for part in (_totals, _pool_gauges, _worker_gauges):
            yield from _all_or_none(part, snapshot)


def _all_or_none(part: Callable[[PoolSnapshot], Iterator[Metric]], snapshot: PoolSnapshot) -> list[Metric]:
    """A part of the figures; none of it, and a line in the log, if it can't be made."""
    try:
        return list(part(snapshot))
    except Exception:
        logger.exception("event=figures_failed part=%s", part.__name__.strip("_"))
        return []


def _totals(snapshot: PoolSnapshot) -> Iterator[Metric]:
    for name, text in _COUNTER_HELP.items():
        yield CounterMetricFamily(f"ringfence_{name}", text, value=getattr(snapshot.counters, name))


def _pool_gauges(snapshot: PoolSnapshot) -> Iterator[Metric]:
    for name, text, value in (
        ("running", "Turns running.", snapshot.running),
        ("capacity", "Turns that READY workers run at once.", snapshot.capacity),
        ("queue_requests", "Turns waiting for a worker.", snapshot.queue.requests),
        ("queue_tokens", "Prompt tokens waiting for a worker.", snapshot.queue.tokens),
        ("queue_reserved", "Requests being tokenised.", snapshot.queue.reserved),
        ("queue_requests_limit", "Turns that may wait.", snapshot.queue.request_limit),
        ("queue_tokens_limit", "Prompt tokens that may wait.", snapshot.queue.token_limit),
        ("queue_oldest_seconds", "How long the first in the queue has waited.", snapshot.queue.oldest_s),
        ("tokens_per_second", "Tokens generated per second, over the last seconds.", snapshot.tokens_per_s),
        ("draining", "1 while the server is stopping.", int(snapshot.is_draining)),
        ("uptime_seconds", "How long the server has run.", snapshot.uptime_s),
    ):
        yield GaugeMetricFamily(f"ringfence_{name}", text, value=value)


def _worker_gauges(snapshot: PoolSnapshot) -> Iterator[Metric]:
    state = GaugeMetricFamily("ringfence_worker_state", "1 for the state a worker is in.", labels=["worker", "state"])
    restarts = CounterMetricFamily(
        "ringfence_worker_restarts", "Starts of the worker after the first.", labels=["worker"]
    )
    figures = {
        name: GaugeMetricFamily(f"ringfence_worker_{name}", text, labels=["worker"])
        for name, text in (
            ("serving", "1 while it takes new turns."),
            ("cordoned", "1 while it is taken out of service."),
            ("running", "Turns running in it."),
            ("slots", "Turns it runs at once."),
            ("memory_bytes", "Memory of worker and decoder."),
            ("progress_age_seconds", "How long ago tokens or prompt reading last moved."),
            ("load_percent", "Progress of loading the model."),
            ("kv_cells_used", "Cells of the KV cache in use."),
            ("kv_cells", "Cells of the KV cache."),
            ("parked_tokens", "Tokens held back because the server did not take them."),
            ("protocol_violations", "Lines of the present decoder that broke the protocol."),
            ("stderr_dropped_lines", "Log lines of the present decoder not kept."),
        )
    }
    for worker in snapshot.workers:
        label = [str(worker.index)]
        for each in WorkerState:
            state.add_metric([*label, each], int(worker.state is each))
        restarts.add_metric(label, worker.restarts)
        for name, value in _figures_of(worker).items():
            figures[name].add_metric(label, value)
    yield state
    yield restarts
    yield from figures.values()


def _figures_of(worker: WorkerSnapshot) -> dict[str, float]:
    figures: dict[str, float] = {
        "serving": worker.is_serving,
        "cordoned": worker.is_cordoned,
        "running": worker.running,
        "slots": worker.capacity if worker.is_serving else 0,
        "memory_bytes": worker.memory_bytes,
        "progress_age_seconds": worker.progress_age_s or 0.0,
    }
    board = worker.board
    if board is not None:
        figures |= {
            "load_percent": board.load_percent,
            "kv_cells_used": board.kv_cells_used,
            "kv_cells": board.kv_cells,
            "parked_tokens": board.parked,
            "protocol_violations": board.violations,
            "stderr_dropped_lines": board.stderr_dropped,
        }
    return figures


class Metrics:
    """Counts requests as they end, and writes the text."""

    def __init__(
        self, snapshot: Callable[[], PoolSnapshot], ticker: Ticker, bodies: Bodies, *, model: str = ""
    ) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(PoolCollector(snapshot))
        self._ours = OurCounters()
        self.registry.register(self._ours)
        self._requests = self._counter(
            "requests", "Requests that have ended, by route and status.", "endpoint", "status"
        )
        self._errors = self._counter("errors", "Errors that clients were answered with, by their code.", "code")
        self._finishes = self._counter(
            "finishes", "Choices that have ended, by finish_reason or error.", "model", "reason"
        )
        self._gone = self._counter("clients_gone", "Requests whose client left before the end.")
        self._duration = self._histogram("request_seconds", "From a request to its last byte.", _SHORT, "endpoint")
        self._first = self._histogram("first_token_seconds", "From a request to its first token.", _SHORT)
        self._queue = self._histogram("queue_seconds", "How long requests waited for a worker.", _SHORT)
        self._per_token = self._histogram("per_token_seconds", "From first to last token, for each token.", _PER_TOKEN)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of requests.", _TOKENS)
        self._generated = self._histogram("request_generated_tokens", "Tokens generated for requests.", _TOKENS)
        lag = self._gauge("event_loop_lag_seconds", "How late the event loop was, of late.", "quantile")
        lag.labels("0.99").set_function(ticker.lag_p99_s)
        lag.labels("1").set_function(ticker.lag_max_s)
        self._gauge("body_bytes", "Request bodies held in memory.").set_function(lambda: bodies.held_bytes)
        self._gauge("body_limit_bytes", "Request bodies that may be held.").set(bodies.total_bytes)
        self.model = model

    def watch_connections(self, limits: ConnectionLimits) -> None:
        """Export the connections of the server that these are the limits of."""
        self._ours.limits = limits

    def record(self, exchange: Exchange) -> None:
        """A request has ended."""
        now_s = time.monotonic()
        status = str(exchange.status) if exchange.status else CLIENT_GONE
        self._requests.labels(exchange.endpoint, status).inc()
        self._duration.labels(exchange.endpoint).observe(now_s - exchange.started_s)
        if exchange.error_code is not None:
            self._errors.labels(exchange.error_code).inc()
        if exchange.is_gone:
            self._gone.inc()
        if exchange.queue_ms is not None:
            self._queue.observe(exchange.queue_ms / 1000)
        if exchange.first_token_s is None:
            return
        self._first.observe(exchange.first_token_s - exchange.started_s)
        self._prompt.observe(exchange.prompt_tokens)
        self._generated.observe(exchange.completion_tokens)
        if exchange.completion_tokens > 1:
            self._per_token.observe((now_s - exchange.first_token_s) / (exchange.completion_tokens - 1))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"ringfence_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"ringfence_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"ringfence_{name}", text, labels, buckets=buckets, registry=self.registry)

    def count_finish(self, reason: str) -> None:
        """A choice has ended with this finish_reason."""
        self._finishes.labels(self.model, reason).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class MetricsEndpoint:
    """GET /metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        exchange.endpoint = "/metrics"
        await exchange.respond(200, self._metrics.text(), ((b"content-type", CONTENT_TYPE_LATEST.encode()),))
