"""The ASGI application: routes and the middleware around them.

    (CORS) -> entrance -> auth -> router -> endpoint

Every endpoint is a plain ASGI callable, and all middleware is pure ASGI: a wrapper that reads `receive` for itself
would hide the client's disconnect from the endpoint that must see it.
"""

import importlib.metadata
from collections.abc import Callable
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router

from server import openapi
from server.admin import Incidents, RollingRestart, WorkerAction
from server.auth import Auth
from server.chat_completions import ChatCompletions
from server.completions import Completions
from server.embeddings import Embeddings
from server.entrance import Entrance
from server.exchange import Receive, Scope, Send
from server.failures import RouteNotFound
from server.health import Health, Livez, Readyz
from server.metrics import MetricsEndpoint
from server.models import Detokenize, Models, OneModel, OpenAPI, Tokenize
from server.openapi import Operation
from server.schemas import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    EmbeddingList,
    EmbeddingRequest,
    Model,
    ModelList,
    TokenizeRequest,
)
from server.service import Service
from server.status import Status

_GENERATION_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503)
_ADMIN_ERRORS = (401, 403, 404, 409)

OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/completions",
        summary="Continue a prompt",
        request=CompletionRequest,
        response=Completion,
        chunk=Completion,
        errors=_GENERATION_ERRORS,
    ),
    Operation(
        method="POST",
        path="/v1/chat/completions",
        summary="Answer a conversation",
        request=ChatCompletionRequest,
        response=ChatCompletion,
        chunk=ChatCompletionChunk,
        errors=_GENERATION_ERRORS,
    ),
    Operation(
        method="POST",
        path="/v1/embeddings",
        summary="Texts as vectors",
        request=EmbeddingRequest,
        response=EmbeddingList,
        errors=_GENERATION_ERRORS,
    ),
    Operation(method="GET", path="/v1/models", summary="Models served", response=ModelList, errors=(401,)),
    Operation(method="GET", path="/v1/models/{id}", summary="One model", response=Model, errors=(401, 404)),
    Operation(
        method="POST",
        path="/tokenize",
        summary="Text to token ids",
        request=TokenizeRequest,
        errors=(400, 401, 413, 415),
    ),
    Operation(
        method="POST",
        path="/detokenize",
        summary="Token ids to text",
        request=DetokenizeRequest,
        response=DetokenizeResponse,
        errors=(400, 401, 413, 415),
    ),
    Operation(method="GET", path="/livez", summary="Is the process alive", is_public=True),
    Operation(method="GET", path="/readyz", summary="Can a request be served", errors=(503,), is_public=True),
    Operation(method="GET", path="/health", summary="How well, and why", errors=(503,), is_public=True),
    Operation(method="GET", path="/status", summary="Workers, queue and counters", errors=(401,)),
    Operation(method="GET", path="/metrics", summary="For Prometheus", media="text/plain", errors=(401,)),
    Operation(method="GET", path="/openapi.json", summary="This document", errors=(401,)),
    Operation(method="POST", path="/admin/workers/{n}/{action}", summary="Act on one worker", errors=_ADMIN_ERRORS),
    Operation(method="POST", path="/admin/restart", summary="Restart all, one by one", errors=_ADMIN_ERRORS),
    Operation(method="GET", path="/admin/incidents", summary="Records of deaths", errors=(401, 403)),
)


class App(Router):
    """The application. `routes` can be enumerated; an unknown path raises RouteNotFound to the entrance."""

    async def not_found(self, scope: Scope, receive: Receive, send: Send) -> None:  # type: ignore[override]
        if scope["type"] == "http":
            raise RouteNotFound(scope["method"], scope["path"])
        await super().not_found(scope, receive, send)  # type: ignore[arg-type]


def build_app(service: Service) -> App:
    """All routes and middleware over one service."""
    return App(routes=routes(service), middleware=middleware(service), redirect_slashes=False)


def routes(service: Service) -> list[Route]:
    pool = service.pool
    document = openapi.document(OPERATIONS, version=_version(), has_keys=bool(service.config.api_key))
    endpoints: dict[str, Callable[..., Any]] = {
        "/v1/completions": Completions(service),
        "/v1/chat/completions": ChatCompletions(service),
        "/v1/embeddings": Embeddings(service),
        "/v1/models": Models(service),
        "/v1/models/{id}": OneModel(service),
        "/tokenize": Tokenize(service),
        "/detokenize": Detokenize(service),
        "/livez": Livez(),
        "/readyz": Readyz(pool.snapshot),
        "/health": Health(pool.snapshot),
        "/status": Status(service),
        "/metrics": MetricsEndpoint(service.metrics),
        "/openapi.json": OpenAPI(document),
        "/admin/workers/{n}/{action}": WorkerAction(pool),
        "/admin/restart": RollingRestart(pool),
        "/admin/incidents": Incidents(pool),
    }
    paths = {"/v1/models/{id}": "/v1/models/{id:path}"}  # names of models contain slashes
    return [
        Route(paths.get(operation.path, operation.path), endpoints[operation.path], methods=[operation.method])
        for operation in OPERATIONS
    ]


def middleware(service: Service) -> list[Middleware]:
    config = service.config
    layers = [
        Middleware(Entrance, metrics=service.metrics, live=service.live),
        Middleware(Auth, keys=config.api_key, admin_keys=config.admin_key, public_metrics=config.public_metrics),
    ]
    if config.cors_origins:  # outermost: pages may read errors too, and a preflight carries no key
        layers.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type", "x-request-id"],
                expose_headers=["x-request-id", "x-ringfence-worker", "x-ringfence-queue-ms", "retry-after"],
            ),
        )
    return layers


def _version() -> str:
    try:
        return importlib.metadata.version("ringfence")
    except importlib.metadata.PackageNotFoundError:
        return ""
