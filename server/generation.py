"""What both kinds of completion have in common: from a request's body to turns, and from turns to an answer.

    body -> reservation -> request -> prompts -> turns -> event stream, or one JSON

The place in the queue is reserved before anything is computed, so an overloaded server refuses cheaply. Whatever
becomes of the request, its reservation is given back and its turns are cancelled, in a finally.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from server.body import Body
from server.client import Client
from server.detokenizer import Detokenizer
from server.exchange import JSON_HEADER, Exchange, Receive, Scope, Send, new_id
from server.logprobs import Taker
from server.output import Output
from server.prompts import Choice, choices, new_tokens
from server.sampling import sampling_options
from server.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    PromptTokensDetails,
    Timings,
    Usage,
    decode,
)
from server.service import Service
from server.streaming import Chunks, EventStream, placement_headers
from workers.request import GenerationRequest

LARGE_BODY_BYTES = 64 << 10  # JSON of this size is decoded in a thread
BYTES_PER_TOKEN = 4  # the estimate by which a place is reserved before the prompt is tokenised

Request = TypeVar("Request", CompletionRequest, ChatCompletionRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request read and tokenised. echoes: text that each prompt's choices begin with, if asked for."""

    prompts: list[list[int]]
    stops: tuple[str, ...]
    echoes: list[str] | None = None


class Generation(Generic[Request]):
    """A POST endpoint that generates. Subclasses say how a request is read and what an answer looks like."""

    path: str
    kind: type[Request]
    id_prefix: str

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        exchange.endpoint = self.path
        with self.service.bodies.of(exchange) as body:
            await self._serve(exchange, body, await body.read())

    async def _serve(self, exchange: Exchange, body: Body, data: bytes) -> None:
        service, config = self.service, self.service.config
        async with Client(exchange, service.ticker, stall_limit_s=config.stall_limit_s) as client:
            reservation = service.pool.reserve(prompt_tokens=len(data) // BYTES_PER_TOKEN)
            outputs: list[Output] = []
            try:
                request = await self._decode(data)
                del data
                service.check_model(request.model)
                prepared = await self.prepare(request)
                request.forget_text()
                body.release()
                reservation.resize(sum(map(len, prepared.prompts)) * request.choices_per_prompt)
                self._submit(request, prepared, exchange.id, reservation, outputs)
                await self._answer(exchange, client, request, prepared, outputs)
            finally:
                reservation.release()
                for output in outputs:
                    output.turn.cancel()
                self._note(exchange, outputs)

    # ---- what subclasses say -------------------------------------------------------------------------------------

    async def prepare(self, request: Request) -> Prepared:
        """Tokenise. Long texts go to a thread. Raises BadRequest."""
        raise NotImplementedError

    def chunks(self, *, id: str, has_usage: bool) -> Chunks:
        raise NotImplementedError

    def taker(self, request: Request) -> Taker | None:
        """What collects logprobs, if they are asked for."""
        raise NotImplementedError

    def whole(self, id: str, outputs: Sequence[Output], texts: Sequence[str], take: Taker | None) -> msgspec.Struct:
        """The answer that is not streamed, without usage and timings."""
        raise NotImplementedError

    # ---- steps ---------------------------------------------------------------------------------------------------

    async def _decode(self, body: bytes) -> Request:
        if len(body) > LARGE_BODY_BYTES:
            return await self.service.in_thread(lambda: decode(self.kind, body))
        return decode(self.kind, body)

    def _submit(self, request: Request, prepared: Prepared, id: str, reservation: Any, outputs: list[Output]) -> None:
        """Queue a turn for each choice, into `outputs`; those queued before the pool refused one are the caller's to
        cancel. All are checked first: a request that can't be served as asked reaches no decoder."""
        service = self.service
        asked = list(choices(request, prompts=len(prepared.prompts)))
        generations = [self._generation(request, prepared, id, choice) for choice in asked]
        for choice, generation in zip(asked, generations, strict=True):
            detokenizer = Detokenizer(
                service.tokenizer.table, prepared.stops, has_offsets=generation.sampling.logprobs is not None
            )
            turn = service.pool.submit(generation, reservation if choice.index == 0 else None)
            echo = prepared.echoes[choice.prompt_index] if prepared.echoes is not None else ""
            outputs.append(Output(turn, detokenizer, index=choice.index, echo=echo))

    def _generation(self, request: Request, prepared: Prepared, id: str, choice: Choice) -> GenerationRequest:
        """What the pool is asked for one choice. Raises BadRequest."""
        service, context = self.service, self.service.pool.context
        prompt = prepared.prompts[choice.prompt_index]
        param = f"prompt[{choice.prompt_index}]" if len(prepared.prompts) > 1 else None
        return GenerationRequest(
            id=id if choice.index == 0 else f"{id}/{choice.index}",
            prompt=prompt,
            max_new=new_tokens(request, prompt_tokens=len(prompt), context=context, param=param),
            sampling=sampling_options(
                request,
                vocabulary=service.tokenizer.vocabulary,
                eog=service.tokenizer.eog,
                context=context,
                choice=choice.number,
            ),
            deadline_s=service.config.deadline_s,
        )

    async def _answer(
        self, exchange: Exchange, client: Client, request: Request, prepared: Prepared, outputs: list[Output]
    ) -> None:
        id = new_id(self.id_prefix)
        usage = _usage_maker(prepared, outputs)
        take = self.taker(request)
        if request.stream:
            chunks = self.chunks(id=id, has_usage=request.wants_usage_chunk)
            stream = EventStream(
                exchange, client, outputs, chunks, take_logprobs=take, keepalive_s=self.service.config.keepalive_s
            )
            await stream.run(usage if request.wants_usage_chunk else None)
            return
        texts = [await _whole_text(output) for output in outputs]
        answer: Any = self.whole(id, outputs, texts, take)
        answer.usage = usage()
        answer.timings = timings_of(outputs)
        await exchange.start(
            200, (JSON_HEADER, *placement_headers(outputs), *_length(body := msgspec.json.encode(answer)))
        )
        await client.send(body, more=False)

    def _note(self, exchange: Exchange, outputs: Sequence[Output]) -> None:
        """The request's figures, for its log line and the metrics."""
        if not outputs:
            return
        exchange.worker = outputs[0].turn.worker
        exchange.queue_ms = outputs[0].turn.queue_ms
        exchange.prompt_tokens = sum(output.prompt_tokens for output in outputs)
        exchange.completion_tokens = sum(output.completion_tokens for output in outputs)
        exchange.moves = sum(output.turn.moves for output in outputs)
        exchange.first_token_s = min(
            (output.first_token_s for output in outputs if output.first_token_s is not None), default=None
        )
        reasons = [output.finish_reason or "error" for output in outputs]
        exchange.finish = ",".join(dict.fromkeys(reasons))
        for reason in reasons:
            self.service.metrics.count_finish(reason)


async def _whole_text(output: Output) -> str:
    parts = []
    while not output.is_over:
        parts.append(await output.next())
    await output.settle()
    return "".join(parts)


def _length(body: bytes) -> tuple[tuple[bytes, bytes]]:
    return ((b"content-length", str(len(body)).encode()),)


def _usage_maker(prepared: Prepared, outputs: Sequence[Output]) -> Callable[[], Usage]:
    """usage, once all turns are over. Each prompt counts once, however many choices it has."""

    def make() -> Usage:
        prompt = sum(map(len, prepared.prompts))
        completion = sum(output.completion_tokens for output in outputs)
        per_prompt = max(1, len(outputs) // len(prepared.prompts))
        cached = sum(output.cached_tokens for output in outputs[::per_prompt])
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

    return make


def timings_of(outputs: Sequence[Output]) -> Timings:
    """Figures of the answer: those of its only turn, or of all together (counts and times added, longest wait)."""
    each = [output.timings() for output in outputs]
    if len(each) == 1:
        return each[0]
    read, generated = sum(t.prompt_n for t in each), sum(t.predicted_n for t in each)
    prompt_ms, decode_ms = sum(t.prompt_ms for t in each), sum(t.predicted_ms for t in each)
    return Timings(
        cache_n=sum(t.cache_n for t in each),
        prompt_n=read,
        prompt_ms=round(prompt_ms, 3),
        prompt_per_token_ms=round(prompt_ms / max(1, read), 3),
        prompt_per_second=round(read * 1000 / prompt_ms, 3) if prompt_ms else 0.0,
        predicted_n=generated,
        predicted_ms=round(decode_ms, 3),
        predicted_per_token_ms=round(decode_ms / max(1, generated), 3),
        predicted_per_second=round(generated * 1000 / decode_ms, 3) if decode_ms else 0.0,
        queue_ms=max(t.queue_ms for t in each),
        moves=sum(t.moves for t in each),
    )


def now() -> int:
    """`created` of an answer."""
    return int(time.time())
