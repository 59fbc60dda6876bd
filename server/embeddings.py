"""POST /v1/embeddings: texts as vectors, one turn each.

    body -> reservation -> inputs as token ids -> turns, AT_ONCE of them in the pool -> one JSON

A long list takes its turns one after the other, a few at a time, so it neither fills the queue nor makes others wait for
all of it. The vectors are the decoder's own; the built-in one gives them length one.
"""

import base64
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np

from server import prompts
from server.badrequest import BadRequest
from server.body import Body
from server.client import Client
from server.exchange import JSON_HEADER, Exchange, Receive, Scope, Send
from server.generation import BYTES_PER_TOKEN, LARGE_BODY_BYTES
from server.schemas import Embedding, EmbeddingList, EmbeddingRequest, EmbeddingUsage, decode
from server.service import Service
from workers.errors import EngineFailed, NonFinite
from workers.request import GenerationRequest, RequestKind
from workers.turn import Turn

INPUTS_LIMIT = 1024
AT_ONCE = 16


class Embeddings:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        exchange.endpoint = "/v1/embeddings"
        with self._service.bodies.of(exchange) as body:
            await self._serve(exchange, body, await body.read())

    async def _serve(self, exchange: Exchange, body: Body, data: bytes) -> None:
        service = self._service
        async with Client(exchange, service.ticker, stall_limit_s=service.config.stall_limit_s) as client:
            reservation = service.pool.reserve(prompt_tokens=len(data) // BYTES_PER_TOKEN)
            live: deque[Turn] = deque()
            try:
                request = await self._decode(data)
                del data
                service.check_model(request.model)
                inputs = await self._read(request)
                is_base64 = request.encoding_format == "base64"
                del request
                body.release()
                reservation.resize(sum(map(len, inputs)))
                embeddings = await self._run(exchange, inputs, reservation, live, is_base64=is_base64)
                await self._answer(exchange, client, embeddings)
            finally:
                reservation.release()
                for turn in live:
                    turn.cancel()

    async def _decode(self, data: bytes) -> EmbeddingRequest:
        if len(data) > LARGE_BODY_BYTES:
            return await self._service.in_thread(lambda: decode(EmbeddingRequest, data))
        return decode(EmbeddingRequest, data)

    async def _read(self, request: EmbeddingRequest) -> list[list[int]]:
        """Token ids of every input, all of which fit the context. Raises BadRequest."""
        tokenizer = self._service.tokenizer
        given = prompts.split(request.input, param="input")
        if len(given) > INPUTS_LIMIT:
            raise BadRequest(
                f"input has {len(given)} texts, and at most {INPUTS_LIMIT} are allowed. Send several requests.",
                param="input",
            )
        context = self._service.pool.context
        read = partial(prompts.read_all, given, tokenizer, param="input", context=context, output=0)
        return await self._service.in_thread(read) if prompts.needs_thread(given, tokenizer) else read()

    async def _run(
        self, exchange: Exchange, inputs: Sequence[list[int]], reservation: Any, live: deque[Turn], *, is_base64: bool
    ) -> list[Embedding]:
        """The inputs' embeddings in their order. live: turns that have not been waited for; the caller's to cancel."""
        embeddings: list[Embedding] = []

        async def take() -> None:
            await live[0].wait_ended()
            turn = live.popleft()
            turn.raise_for_error()
            embeddings.append(Embedding(index=len(embeddings), embedding=_vector(turn, is_base64=is_base64)))
            _note(exchange, turn)

        for place, ids in enumerate(inputs):
            if len(live) == AT_ONCE:
                await take()
            request = GenerationRequest(
                id=f"{exchange.id}/{place}" if place else exchange.id,
                prompt=ids,
                max_new=1,
                kind=RequestKind.EMBED,
                deadline_s=self._service.config.deadline_s,
            )
            live.append(self._service.pool.submit(request, None if place else reservation))
        while live:
            await take()
        return embeddings

    async def _answer(self, exchange: Exchange, client: Client, embeddings: list[Embedding]) -> None:
        tokens = exchange.prompt_tokens
        answer = EmbeddingList(
            data=embeddings,
            model=self._service.model_name,
            usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens),
        )
        body = msgspec.json.encode(answer)
        headers = [JSON_HEADER, (b"content-length", str(len(body)).encode())]
        if exchange.worker is not None:
            headers += [
                (b"x-ringfence-worker", str(exchange.worker).encode()),
                (b"x-ringfence-queue-ms", f"{exchange.queue_ms:.1f}".encode()),
            ]
        await exchange.start(200, headers)
        await client.send(body, more=False)


def _vector(turn: Turn, *, is_base64: bool) -> str:
    """The turn's embedding, as JSON already: encoding a long list of them at once would hold the event loop."""
    numbers = np.frombuffer(turn.embedding, "<f4")
    if not len(numbers):
        raise EngineFailed(-1 if turn.worker is None else turn.worker, "it ended an embedding without its numbers")
    if not np.isfinite(numbers).all():
        raise NonFinite
    value = base64.b64encode(turn.embedding).decode() if is_base64 else numbers.tolist()
    return cast(str, msgspec.Raw(msgspec.json.encode(value)))


def _note(exchange: Exchange, turn: Turn) -> None:
    """A turn's figures, for the log line and the metrics; place and queue of the first."""
    if exchange.worker is None:
        exchange.worker = turn.worker
        exchange.queue_ms = turn.queue_ms
    exchange.prompt_tokens += len(turn.request.prompt)
    exchange.moves += turn.moves
