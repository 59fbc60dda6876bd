"""/metrics, in Prometheus' text format, from a registry of our own.

Requests are counted here, once each, when they end. What the pool knows is read from its snapshot during the scrape;
its counters never decrease, and a worker that is dead or unloaded shows 0 (its figures) or 1 in its state. Labels are
bounded: worker numbers, states, routes, statuses, error codes; never a request's id or text.
"""

import logging
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from server.body import Bodies
from server.exchange import Exchange, Receive, Scope, Send
from server.ticker import Ticker
from shm.board import WorkerState
from workers.snapshot import PoolCounters, PoolSnapshot, WorkerSnapshot

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
    "prompt_tokens": "Prompt tokens of turns that ran.",
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
        yield from _totals(snapshot.counters)
        yield from _pool_gauges(snapshot)
        yield from _worker_gauges(snapshot.workers)


def _totals(counters: PoolCounters) -> Iterator[Metric]:
    for name, text in _COUNTER_HELP.items():
        yield CounterMetricFamily(f"ringfence_{name}", text, value=getattr(counters, name))


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
        ("uptime_seconds", "Since the server started.", snapshot.uptime_s),
    ):
        yield GaugeMetricFamily(f"ringfence_{name}", text, value=value)


def _worker_gauges(workers: tuple[WorkerSnapshot, ...]) -> Iterator[Metric]:
    state = GaugeMetricFamily("ringfence_worker_state", "1 for the state a worker is in.", labels=["worker", "state"])
    restarts = CounterMetricFamily("ringfence_worker_restarts", "Starts after the first.", labels=["worker"])
    figures = {
        name: GaugeMetricFamily(f"ringfence_worker_{name}", text, labels=["worker"])
        for name, text in (
            ("serving", "1 while it takes new turns."),
            ("cordoned", "1 while it is taken out of service."),
            ("running", "Turns running."),
            ("slots", "Turns it runs at once."),
            ("memory_bytes", "Memory of worker and decoder."),
            ("progress_age_seconds", "Since tokens or prompt reading last moved."),
            ("load_percent", "Progress of loading the model."),
            ("kv_cells_used", "Cells of the KV cache in use."),
            ("kv_cells", "Cells of the KV cache."),
            ("parked_tokens", "Tokens held back because the server did not take them."),
            ("protocol_violations", "Lines of the present decoder that broke the protocol."),
            ("stderr_dropped_lines", "Log lines of the present decoder not kept."),
        )
    }
    for worker in workers:
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
        registry = self.registry
        self._requests = Counter(
            "ringfence_requests", "Requests, when they ended.", ["endpoint", "status"], registry=registry
        )
        self._errors = Counter("ringfence_errors", "Errors answered, by their code.", ["code"], registry=registry)
        self._finishes = Counter(
            "ringfence_finishes", "Choices, by how they ended.", ["model", "reason"], registry=registry
        )
        self._gone = Counter("ringfence_clients_gone", "Requests whose client left before the end.", registry=registry)
        self._duration = Histogram(
            "ringfence_request_seconds", "Request to its last byte.", ["endpoint"], buckets=_SHORT, registry=registry
        )
        self._first = Histogram(
            "ringfence_first_token_seconds", "Request to its first token.", buckets=_SHORT, registry=registry
        )
        self._queue = Histogram("ringfence_queue_seconds", "Wait for a worker.", buckets=_SHORT, registry=registry)
        self._per_token = Histogram(
            "ringfence_per_token_seconds", "First to last token, by token.", buckets=_PER_TOKEN, registry=registry
        )
        self._prompt = Histogram(
            "ringfence_request_prompt_tokens", "Prompt tokens.", buckets=_TOKENS, registry=registry
        )
        self._generated = Histogram("ringfence_request_generated_tokens", "Tokens.", buckets=_TOKENS, registry=registry)
        lag = Gauge(
            "ringfence_event_loop_lag_seconds", "How late the loop was, of late.", ["quantile"], registry=registry
        )
        lag.labels("0.99").set_function(ticker.lag_p99_s)
        lag.labels("1").set_function(ticker.lag_max_s)
        held = Gauge("ringfence_body_bytes", "Bytes of request bodies held in memory.", registry=registry)
        held.set_function(lambda: bodies.held_bytes)
        Gauge("ringfence_body_limit_bytes", "Bytes of request bodies that may be held.", registry=registry).set(
            bodies.total_bytes
        )
        self.model = model

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
