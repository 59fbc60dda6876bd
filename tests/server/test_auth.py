"""Keys: every route and every spelling of it, but for those that probers need."""

import pytest

from server.app import OPERATIONS
from server.auth import OPEN_PATHS
from tests.fakes.http import Call, app_of, call, service_of
from tests.fakes.pool import FakePool

KEY, OTHER, ADMIN = "first-key-0", "second-key-1", "admin-key-22"
PATHS = [operation.path for operation in OPERATIONS]
CLOSED = [path for path in PATHS if path not in OPEN_PATHS]


def guarded(pool: FakePool | None = None, **values: object) -> object:
    return app_of(pool or FakePool(), **{"api_key": (KEY, OTHER), "admin_key": (ADMIN,), **values})


def bearer(key: str, scheme: str = "Bearer") -> list[tuple[str, str]]:
    return [("authorization", f"{scheme} {key}")]


REFUSED: list[list[tuple[str, str]]] = [
    [],
    bearer("wrong-key-9"),
    bearer(""),
    bearer(KEY + "x"),
    bearer(KEY[:-1]),
    bearer(f"{KEY} {KEY}"),
    bearer(KEY.upper()),
    [("authorization", KEY)],
    [("x-api-key", KEY)],
    bearer(KEY) + bearer("wrong-key-9"),
    [("authorization", f"Basic {KEY}")],
]


def filled(path: str) -> str:
    return path.replace("{n}", "0").replace("{action}", "cordon").replace("{id}", "tiny")


def test_the_open_routes_are_these_and_no_others() -> None:
    assert {"/livez", "/readyz", "/health"} == OPEN_PATHS
    assert {operation.path for operation in OPERATIONS if operation.is_public} == OPEN_PATHS


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE"])
async def test_no_route_answers_without_a_key(path: str, method: str) -> None:
    app = guarded()
    for headers in REFUSED:
        answer = await call(app, method, filled(path), headers=headers, query=f"api_key={KEY}")
        assert answer.status == 401, headers
        assert answer.json["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models", "/v1//models", "/v1/models/", "/V1/MODELS", "/v1/./models", "/v1/x/../models", "/livez/",
        "/livez/../v1/models", "/LIVEZ", "//livez", "/health/x", "/", "/nope", "/metrics", "/status", "/openapi.json",
    ],
)  # fmt: skip
async def test_other_spellings_are_no_way_around(path: str) -> None:
    assert (await call(guarded(), "GET", path)).status == 401


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
async def test_probers_need_no_key(path: str) -> None:
    assert (await call(guarded(), "GET", path)).status == 200


@pytest.mark.parametrize(
    "headers", [bearer(KEY), bearer(OTHER), bearer(ADMIN), bearer(KEY, "bearer"), bearer(f" {KEY} ")]
)
async def test_each_key_opens_the_routes(headers: list[tuple[str, str]]) -> None:
    assert (await call(guarded(), "GET", "/v1/models", headers=headers)).status == 200
    assert (await call(guarded(), "GET", "/metrics", headers=headers)).status == 200


@pytest.mark.parametrize("path", ["/metrics", "/status"])
async def test_metrics_can_be_opened_by_configuration(path: str) -> None:
    assert (await call(guarded(public_metrics=True), "GET", path)).status == 200


async def test_without_keys_everything_but_admin_is_open() -> None:
    app = app_of(FakePool())
    assert (await call(app, "GET", "/v1/models")).status == 200
    assert (await call(app, "GET", "/admin/incidents")).status == 403


@pytest.mark.parametrize("path", ["/admin/incidents", "/admin", "/ADMIN/incidents", "/administration"])
async def test_a_client_key_opens_no_admin_route(path: str) -> None:
    assert (await call(guarded(), "GET", path, headers=bearer(KEY))).status == 401


async def test_admin_routes_take_the_admin_key_also_when_clients_need_none() -> None:
    app = app_of(FakePool(), admin_key=(ADMIN,))
    assert (await call(app, "GET", "/admin/incidents")).status == 401
    assert (await call(app, "GET", "/admin/incidents", headers=bearer(ADMIN))).status == 200


async def test_a_refused_request_costs_no_reading_of_its_body() -> None:
    pool = FakePool()
    async with Call(guarded(pool), "POST", "/v1/completions", b"", parts=[]) as request:
        await request.finished()  # not a byte of the body has come
    assert request.status == 401 and not pool.reserved


async def test_a_refusal_is_counted() -> None:
    service = service_of(FakePool(), api_key=(KEY,))
    from server.app import build_app

    await call(build_app(service), "POST", "/v1/completions", {"prompt": "x"})
    assert 'ringfence_requests_total{endpoint="unmatched",status="401"} 1.0' in service.metrics.text().decode()


@pytest.mark.parametrize(("length", "is_closed"), [("10", False), ("65537", True), ("9999999999", True), ("x", True)])
async def test_a_refused_upload_closes_its_connection_unless_it_is_small(length: str, is_closed: bool) -> None:
    answer = await call(guarded(), "POST", "/v1/completions", headers=[("content-length", length)])
    assert answer.status == 401 and ("connection" in answer.headers) == is_closed
