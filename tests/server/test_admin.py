"""Operators' calls."""

import pytest

from server.admin import ACTIONS
from tests.fakes.http import app_of, call
from tests.fakes.pool import FakePool

ADMIN = "admin-key-22"
HEADERS = [("authorization", f"Bearer {ADMIN}")]


def administered(pool: FakePool) -> object:
    return app_of(pool, admin_key=(ADMIN,))


@pytest.mark.parametrize("action", ACTIONS)
async def test_each_action_reaches_its_worker_and_answers_with_it(action: str) -> None:
    pool = FakePool()
    answer = await call(administered(pool), "POST", f"/admin/workers/1/{action}", headers=HEADERS)
    assert answer.status == 200 and pool.calls == [f"{action} 1"]
    assert answer.json["done"] is True and answer.json["worker"]["index"] == 1


async def test_an_action_whose_limit_passed_is_202() -> None:
    pool = FakePool()
    pool.operations.succeeds = False
    answer = await call(administered(pool), "POST", "/admin/workers/0/load", headers=HEADERS)
    assert answer.status == 202 and answer.json["done"] is False


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/admin/workers/2/restart", "worker_not_found"),
        ("/admin/workers/x/restart", "worker_not_found"),
        ("/admin/workers/-1/restart", "worker_not_found"),
        ("/admin/workers/99999999999/restart", "worker_not_found"),
        ("/admin/workers/0/explode", "unknown_url"),
    ],
)
async def test_unknown_workers_and_actions_are_404(path: str, code: str) -> None:
    pool = FakePool()
    answer = await call(administered(pool), "POST", path, headers=HEADERS)
    assert answer.status == 404 and answer.json["error"]["code"] == code and not pool.calls


async def test_a_rolling_restart_is_started_and_answered_at_once() -> None:
    pool = FakePool()
    answer = await call(administered(pool), "POST", "/admin/restart", headers=HEADERS)
    assert answer.status == 202 and pool.calls == ["restart_all"]


async def test_incidents_are_listed() -> None:
    pool = FakePool()
    pool.incident_records.append({"worker": 0, "cause": "killed"})
    answer = await call(administered(pool), "GET", "/admin/incidents", headers=HEADERS)
    assert answer.json == {"object": "list", "data": [{"worker": 0, "cause": "killed"}]}
