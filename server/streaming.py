"""Writing a stream of server-sent events: n choices on one connection.

Headers go out with the first token, so that an error before it is a plain answer with its status, and the worker and
the queue time are known; but after HEADERS_AFTER_S they go out anyway, for clients and proxies that wait for them.
While nothing comes, a comment line keeps the connection alive. Then:

    (role)  text*  finish        for each choice, interleaved by index
    usage                        if asked for
    data: [DONE]

An error after the headers is one event `data: {"error": {...}}`, and the end: no finish reason, no usage, no [DONE].

One choice is written by the request's own task. Several have a task each; their events are whole messages, so they
may interleave.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from server.chunks import DONE, KEEP_ALIVE, Template
from server.client import Client
from server.errors import Header
from server.exchange import EVENT_STREAM_HEADERS, Exchange
from server.failures import ClientGone
from server.logprobs import Taker
from server.output import Output
from server.schemas import Timings, Usage
from workers.errors import SlowClient

HEADERS_AFTER_S = 0.8  # looked at ten times a second, so within one second


class Chunks(Protocol):
    """One wire format's events; see chunks.py."""

    def template(self, index: int) -> Template: ...

    def first(self, index: int) -> bytes: ...

    def text(self, index: int, text: str, logprobs: Any) -> bytes: ...

    def finish(self, index: int, reason: str, timings: Timings) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...


class EventStream:
    """One streamed answer."""

    __slots__ = ("_chunks", "_client", "_exchange", "_is_open", "_keepalive_s", "_outputs", "_take_logprobs")

    def __init__(
        self,
        exchange: Exchange,
        client: Client,
        outputs: Sequence[Output],
        chunks: Chunks,
        *,
        take_logprobs: Taker | None,
        keepalive_s: float,
    ) -> None:
        self._exchange = exchange
        self._client = client
        self._outputs = outputs
        self._chunks = chunks
        self._take_logprobs = take_logprobs
        self._keepalive_s = keepalive_s
        self._is_open = False

    async def run(self, usage: Callable[[], Usage] | None) -> None:
        """Write everything. usage: makes the usage chunk, or None. Raises what a turn ended with before the first
        byte."""
        self._client.silence_s = HEADERS_AFTER_S
        self._client.on_silence = self._on_silence
        try:
            last = await self._write_choices()
        except (ClientGone, SlowClient):
            raise
        except Exception as error:  # noqa: BLE001 it becomes the stream's last event
            self._client.on_silence = None
            await self._fail(error)
            return
        self._client.on_silence = None
        if usage is not None:
            last += self._chunks.usage(usage())
        await self._client.send(last + DONE, more=False)

    async def _write_choices(self) -> bytes:
        """Write all choices. Returns the only choice's last events, so that they leave together with the end."""
        if len(self._outputs) == 1:
            return await self._write(self._outputs[0])
        tasks = [asyncio.ensure_future(self._write_and_send(output)) for output in self._outputs]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
        return b""

    async def _write_and_send(self, output: Output) -> None:
        await self._emit(await self._write(output))

    async def _write(self, output: Output) -> bytes:
        """Send a choice's text as it comes; returns its last events."""
        if self._take_logprobs is not None:
            return await self._write_with_logprobs(output, self._take_logprobs)
        template = self._chunks.template(output.index)
        pending = self._chunks.first(output.index)
        if output.echo:
            pending += template.fill(output.echo)
        while True:
            text = await output.next()
            if text:
                pending += template.fill(text)
            if output.is_over:
                break
            if text:
                await self._emit(pending)
                pending = b""
        return await self._end(output, pending)

    async def _write_with_logprobs(self, output: Output, take: Taker) -> bytes:
        pending = self._chunks.first(output.index)
        taken = 0
        while True:
            text = await output.next()
            if text or output.detokenizer.released > taken:
                pending += self._chunks.text(output.index, text, take(output, taken))
                taken = output.detokenizer.released
            if output.is_over:
                break
            if pending:
                await self._emit(pending)
                pending = b""
        return await self._end(output, pending)

    async def _end(self, output: Output, pending: bytes) -> bytes:
        if not output.turn.has_ended:  # cut short by a stop string: the text need not wait for the figures
            if pending:
                await self._emit(pending)
            await output.settle()
            pending = b""
        pending += self._chunks.finish(output.index, output.finish_reason, output.timings())
        if not self._is_open:
            await self._open()
        return pending

    async def _emit(self, data: bytes) -> None:
        if not self._is_open:
            await self._open()
        await self._client.send(data)

    async def _open(self) -> None:
        self._is_open = True
        self._client.silence_s = self._keepalive_s
        if not self._keepalive_s:
            self._client.on_silence = None
        await self._exchange.start(200, (*EVENT_STREAM_HEADERS, *placement_headers(self._outputs)))

    async def _on_silence(self) -> None:
        """Nothing was sent for a while: the headers if they are still due, else a comment."""
        if not self._is_open:
            await self._open()
        else:
            await self._exchange.send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})

    async def _fail(self, error: Exception) -> None:
        if not self._is_open:
            raise error
        await self._client.send(self._exchange.note(error).event(), more=False)


def placement_headers(outputs: Sequence[Output]) -> list[Header]:
    """Where and how late the first turn runs, if a worker has it already."""
    turn = outputs[0].turn
    if turn.worker is None:
        return []
    return [
        (b"x-ringfence-worker", str(turn.worker).encode()),
        (b"x-ringfence-queue-ms", f"{turn.queue_ms:.1f}".encode()),
    ]
