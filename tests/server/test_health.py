"""Health, readiness and liveness are read from the pool at that moment, and are never latched."""

import time
from dataclasses import replace

import pytest

from server.health import health_of, is_ready, retry_after_s
from shm.board import WorkerState
from tests.fakes.http import app_of, call
from tests.fakes.pool import FakePool, board_of

ALL = [state for state in WorkerState if state not in (WorkerState.READY, WorkerState.UNLOADED)]


@pytest.mark.parametrize(
    ("states", "status", "ready"),
    [
        ([WorkerState.READY, WorkerState.READY], "ok", True),
        ([WorkerState.READY, WorkerState.BACKOFF], "degraded", True),
        ([WorkerState.READY, WorkerState.FATAL], "degraded", True),
        ([WorkerState.LOADING, WorkerState.LOADING], "unavailable", False),
        ([WorkerState.FATAL, WorkerState.BACKOFF], "unavailable", False),
        ([WorkerState.UNLOADED, WorkerState.UNLOADED], "ok", True),
        ([WorkerState.UNLOADED, WorkerState.FATAL], "degraded", True),
    ],
)
async def test_health_by_the_workers_states(states: list[WorkerState], status: str, ready: bool) -> None:
    pool = FakePool()
    for index, state in enumerate(states):
        pool.set_state(index, state, reason="" if state is WorkerState.READY else f"it is {state}")
    app = app_of(pool)
    health = await call(app, "GET", "/health")
    assert health.json["status"] == status
    assert health.status == (503 if status == "unavailable" else 200)
    readiness = await call(app, "GET", "/readyz")
    assert readiness.status == (200 if ready else 503)
    for answer in (health, readiness):
        assert ("retry-after" in answer.headers) == (answer.status == 503)
        assert answer.headers["cache-control"] == "no-store"
    assert (await call(app, "GET", "/livez")).status == 200


@pytest.mark.parametrize("state", ALL)
async def test_health_recovers_with_the_worker(state: WorkerState) -> None:
    pool = FakePool(workers=1)
    app = app_of(pool)
    pool.set_state(0, state, "gone")
    answer = await call(app, "GET", "/health")
    assert answer.status == 503 and answer.json["worker"][0]["reason"] == "gone"
    pool.set_state(0, WorkerState.READY)
    assert (await call(app, "GET", "/health")).json["status"] == "ok"
    assert (await call(app, "GET", "/readyz")).status == 200


async def test_a_draining_server_is_not_ready_and_lives() -> None:
    pool = FakePool()
    app = app_of(pool)
    pool.begin_drain()
    assert (await call(app, "GET", "/readyz")).json == {"status": "draining"}
    assert (await call(app, "GET", "/health")).status == 503
    assert (await call(app, "GET", "/livez")).status == 200


async def test_a_cordoned_worker_is_named_and_does_not_serve() -> None:
    pool = FakePool()
    pool.cordoned.add(1)
    body = health_of(pool.snapshot())
    assert body["status"] == "degraded" and body["workers_serving"] == 1
    assert body["worker"][1]["cordoned"] and not body["worker"][1]["serving"]


def test_a_cordoned_worker_that_sleeps_does_not_make_ready() -> None:
    pool = FakePool(workers=1)
    pool.set_state(0, WorkerState.UNLOADED)
    pool.cordoned.add(0)
    assert not is_ready(pool.snapshot())


def test_retry_after_is_the_earliest_end_of_a_backoff() -> None:
    pool = FakePool()
    snapshot = pool.snapshot()
    now_ns = time.monotonic_ns()
    workers = tuple(
        replace(
            worker,
            state=WorkerState.BACKOFF,
            board=replace(board_of(WorkerState.BACKOFF), backoff_until_ns=now_ns + int(seconds * 1e9)),
        )
        for worker, seconds in zip(snapshot.workers, (20.0, 7.5), strict=True)
    )
    assert retry_after_s(replace(snapshot, workers=workers), now_ns) == 8
    assert retry_after_s(snapshot, now_ns) == 5


async def test_status_has_every_board_and_the_queue() -> None:
    pool = FakePool()
    pool.set_state(1, WorkerState.FATAL, "died 5 times")
    body = (await call(app_of(pool), "GET", "/status")).json
    assert [worker["state"] for worker in body["workers"]] == ["ready", "fatal"]
    assert body["workers"][0]["board"]["load_percent"] == 100 and body["workers"][1]["board"] is None
    assert body["queue"]["request_limit"] == 256 and body["counters"]["submitted"] == 0
    assert body["http"]["requests"] == 1


async def test_health_needs_no_key_and_shows_neither_paths_nor_what_the_decoder_wrote() -> None:
    pool = FakePool(workers=1)
    pool.set_state(0, WorkerState.BACKOFF, "exited with 1 in /srv/secret; last line: can't open /srv/models/x.gguf")
    answer = await call(app_of(pool), "GET", "/health")
    assert answer.json["worker"][0]["reason"] == "exited with 1 in (path)"
    assert b"/srv" in (await call(app_of(pool), "GET", "/status")).body
