"""What Prometheus reads."""

import asyncio
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.app import build_app
from server.connection import ConnectionLimits
from server.ticker import Ticker
from shm.board import WorkerState
from tests.fakes.http import Call, app_of, call, ids_of, service_of
from tests.fakes.pool import FakePool, Script
from workers.errors import Overloaded
from workers.snapshot import PoolCounters

DOCS = Path(__file__).parents[2] / "docs" / "api.md"


def samples(text: str) -> dict[str, float]:
    """Value by name and labels."""
    return {
        sample.name + str(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_a_request_is_counted_once_with_bounded_labels() -> None:
    pool = FakePool(Script(ids=ids_of("hello")))
    service = service_of(pool)
    app = build_app(service)
    for stream in (True, False):
        await call(app, "POST", "/v1/completions", {"prompt": "x", "stream": stream})
    await call(app, "GET", "/some/unknown/path")
    pool.reserve_error = Overloaded("requests", 1, 1.0)
    await call(app, "POST", "/v1/completions", {"prompt": "x"})
    values = samples(service.metrics.text().decode())
    assert values["ringfence_requests_total[('endpoint', '/v1/completions'), ('status', '200')]"] == 2
    assert values["ringfence_requests_total[('endpoint', 'unmatched'), ('status', '404')]"] == 1
    assert values["ringfence_errors_total[('code', 'queue_full')]"] == 1
    assert values["ringfence_finishes_total[('model', 'tiny'), ('reason', 'stop')]"] == 2
    assert values["ringfence_first_token_seconds_count[]"] == 2
    assert values["ringfence_request_generated_tokens_sum[]"] == 10


async def test_a_client_that_left_before_the_answer_is_a_499() -> None:
    pool = FakePool(Script(by_hand=True))
    service = service_of(pool)
    async with Call(build_app(service), "POST", "/v1/completions", {"prompt": "x"}) as request:
        await pool.submitted()
        request.leave()
    values = samples(service.metrics.text().decode())
    assert values["ringfence_requests_total[('endpoint', '/v1/completions'), ('status', '499')]"] == 1
    assert values["ringfence_clients_gone_total[]"] == 1
    assert values["ringfence_finishes_total[('model', 'tiny'), ('reason', 'error')]"] == 1


def test_every_counter_of_the_pool_is_exported() -> None:
    pool = FakePool()
    names = list(PoolCounters.__dataclass_fields__)
    pool.count(**{name: place + 1 for place, name in enumerate(names)})
    values = samples(service_of(pool).metrics.text().decode())
    for place, name in enumerate(names):
        assert values[f"ringfence_{name}_total[]"] == place + 1


def test_a_dead_workers_gauges_go_to_zero_and_its_state_shows() -> None:
    pool = FakePool()
    pool.set_state(1, WorkerState.FATAL, "died")
    values = samples(service_of(pool).metrics.text().decode())
    assert values["ringfence_worker_serving[('worker', '0')]"] == 1
    assert values["ringfence_worker_serving[('worker', '1')]"] == 0
    assert values["ringfence_worker_slots[('worker', '1')]"] == 0
    assert values["ringfence_worker_state[('state', 'fatal'), ('worker', '1')]"] == 1
    assert "ringfence_worker_kv_cells[('worker', '1')]" not in values


async def test_a_pool_that_cannot_be_read_costs_its_figures_only() -> None:
    pool = FakePool()
    app = app_of(pool)
    pool.snapshot_error = RuntimeError("torn")
    answer = await call(app, "GET", "/metrics")
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain")
    assert b"ringfence_event_loop_lag_seconds" in answer.body and b"ringfence_capacity" not in answer.body


async def test_a_worker_that_cannot_be_read_costs_the_workers_figures_only() -> None:
    pool = FakePool()
    broken: Any = dataclasses.replace(pool.snapshot(), workers=(None,))  # type: ignore[arg-type]
    pool.snapshot = lambda: broken  # type: ignore[method-assign]
    service = service_of(pool)
    values = samples(service.metrics.text().decode())
    assert values["ringfence_capacity[]"] == 8 and values["ringfence_completed_total[]"] == 0
    assert not any(name.startswith("ringfence_worker_serving") for name in values)


def test_every_figure_is_explained_and_says_its_unit() -> None:
    service = service_of(FakePool())
    service.metrics.watch_connections(ConnectionLimits(connections=7, header_bytes=1, header_timeout_s=1))
    families = list(text_string_to_metric_families(service.metrics.text().decode()))
    assert len(families) > 50
    for family in families:
        assert family.name.startswith("ringfence_")
        assert family.documentation.endswith(".") and len(family.documentation) > 10, family.name
        words = set(family.name.split("_"))
        assert not words & {"ms", "milliseconds", "mb", "kb"}, f"{family.name}: seconds and bytes are the units"
    assert len({family.documentation for family in families}) == len(families), "two figures with the same words"


async def test_an_exception_in_counting_fails_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    service = service_of(FakePool())
    monkeypatch.setattr(service.metrics, "record", lambda exchange: 1 / 0)
    assert (await call(build_app(service), "POST", "/v1/completions", {"prompt": "x"})).status == 200


async def test_the_ticker_runs_only_while_there_is_something_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.ticker.INTERVAL_S", 0.001)
    ticker = Ticker()
    assert "running=False" in repr(ticker)
    ticked = asyncio.Event()

    class Watched:
        def on_tick(self, now_s: float) -> None:
            ticked.set()
            ticker.discard(self)

    ticker.add(Watched())
    await asyncio.wait_for(ticked.wait(), 5)
    assert len(ticker) == 0 and "running=False" in repr(ticker)
    assert 0 <= ticker.lag_p99_s() <= ticker.lag_max_s() < 5


def test_every_name_in_the_documentation_is_exported() -> None:
    service = service_of(FakePool())
    service.metrics.watch_connections(ConnectionLimits(connections=7, header_bytes=1, header_timeout_s=1))
    table = DOCS.read_text().partition("## Metrics")[2].partition("## Errors")[0]
    names = {name for name in re.findall(r"`([a-z_]+)(?:\{[a-z,]+\})?`", table) if name not in ("ringfence_", "_limit")}
    exported = service.metrics.text().decode()
    assert len(names) > 45
    assert [name for name in names if f"# TYPE ringfence_{name} " not in exported] == []
