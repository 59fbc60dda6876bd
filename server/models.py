"""The smaller JSON routes: models, tokenize, detokenize, the OpenAPI document."""

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from server.client import Client
from server.exchange import Exchange, Receive, Scope, Send
from server.generation import LARGE_BODY_BYTES
from server.schemas import (
    DetokenizeRequest,
    DetokenizeResponse,
    Model,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
    TokenPiece,
    decode,
)
from server.service import Service


class Models:
    """GET /v1/models."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        exchange.endpoint = "/v1/models"
        names = self._service.model_names
        models = [Model(id=name, created=self._service.created) for name in names]
        await exchange.respond(200, msgspec.json.encode(ModelList(data=models)))


class OneModel:
    """GET /v1/models/{id}."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        exchange.endpoint = "/v1/models/{id}"
        name = scope["path_params"]["id"]
        self._service.check_model(name)
        await exchange.respond(200, msgspec.json.encode(Model(id=name, created=self._service.created)))


class Tokenize:
    """POST /tokenize."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        exchange.endpoint = "/tokenize"
        service = self._service
        with service.bodies.of(exchange) as body:
            data = await body.read()
            async with Client(exchange, service.ticker, stall_limit_s=service.config.stall_limit_s) as client:
                is_short = len(data) <= 2_000
                answer = self._tokenize(data) if is_short else await service.in_thread(lambda: self._tokenize(data))
                await _respond(exchange, client, answer)

    def _tokenize(self, body: bytes) -> bytes:
        request = decode(TokenizeRequest, body)
        tokenizer = self._service.tokenizer
        steps = tokenizer.encode_in_steps(
            request.content, add_special=request.add_special, parse_special=request.parse_special
        )
        parts = []
        for ids in steps:  # a million ids in one list would hold the event loop, being encoded and being freed
            tokens = self._with_pieces(ids) if request.with_pieces else ids
            parts.append(msgspec.json.encode(tokens)[1:-1])
        return msgspec.json.encode(
            TokenizeResponse(tokens=cast(list[int], msgspec.Raw(b"[" + b",".join(parts) + b"]")))
        )

    def _with_pieces(self, ids: Sequence[int]) -> Sequence[int | TokenPiece]:
        piece = self._service.tokenizer.piece
        return [TokenPiece(id=token, piece=_piece(piece(token, special=True))) for token in ids]


class Detokenize:
    """POST /detokenize."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        exchange.endpoint = "/detokenize"
        service = self._service
        with service.bodies.of(exchange) as body:
            data = await body.read()
            async with Client(exchange, service.ticker, stall_limit_s=service.config.stall_limit_s) as client:
                is_short = len(data) <= LARGE_BODY_BYTES // 4
                answer = self._detokenize(data) if is_short else await service.in_thread(lambda: self._detokenize(data))
                await _respond(exchange, client, answer)

    def _detokenize(self, body: bytes) -> bytes:
        request = decode(DetokenizeRequest, body)
        return msgspec.json.encode(DetokenizeResponse(content=self._service.tokenizer.decode(request.tokens)))


class OpenAPI:
    """GET /openapi.json."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._body = msgspec.json.encode(document)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        exchange.endpoint = "/openapi.json"
        await exchange.respond(200, self._body)


async def _respond(exchange: Exchange, client: Client, body: bytes) -> None:
    """As Exchange.respond, with the stall limit: these bodies can be large."""
    await exchange.start(200, ((b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())))
    await client.send(body, more=False)


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
