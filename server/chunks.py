"""Server-sent events of a stream, from prepared templates.

A chunk differs from the next in its text only, so everything around the text is encoded once per choice:

    data: {"id":"cmpl-1",...,"choices":[{"index":0,"text":  "escaped"  ,"logprobs":null,"finish_reason":null}]}\\n\\n
    |------------------ head ----------------------------|            |----------------- tail -----------------|

The template comes out of the same structs as every other answer (schemas.py), so the shapes can't drift apart. Chunks
that carry more than text (logprobs, the finish reason, usage) are encoded whole; there are few of them, or they were
asked for.
"""

import msgspec
from msgspec import UNSET, UnsetType

from server.schemas import (
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Timings,
    Usage,
)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_MARK = "\ue000text\ue000"
_ENCODED_MARK = msgspec.json.encode(_MARK)

encode = msgspec.json.encode


def event(chunk: msgspec.Struct) -> bytes:
    return b"data: " + encode(chunk) + b"\n\n"


class Template:
    """One choice's chunk, to be filled with a text."""

    __slots__ = ("_head", "_tail")

    def __init__(self, chunk: msgspec.Struct) -> None:
        """chunk: an example whose text is the mark."""
        self._head, _, self._tail = event(chunk).rpartition(_ENCODED_MARK)

    def fill(self, text: str) -> bytes:
        return self._head + encode(text) + self._tail


class CompletionChunks:
    """Events of one streamed /v1/completions. usage is null in every chunk but the last when it was asked for."""

    __slots__ = ("_created", "_id", "_model", "_usage")

    def __init__(self, *, id: str, model: str, created: int, has_usage: bool) -> None:
        self._id = id
        self._model = model
        self._created = created
        self._usage: UnsetType | None = None if has_usage else UNSET

    def template(self, index: int) -> Template:
        return Template(self._chunk([CompletionChoice(index=index, text=_MARK)]))

    def first(self, index: int) -> bytes:
        """What a choice begins with: nothing here."""
        return b""

    def text(self, index: int, text: str, logprobs: CompletionLogprobs | None) -> bytes:
        return event(self._chunk([CompletionChoice(index=index, text=text, logprobs=logprobs)]))

    def finish(self, index: int, reason: str, timings: Timings) -> bytes:
        chunk = self._chunk([CompletionChoice(index=index, text="", finish_reason=reason)])
        chunk.timings = timings
        return event(chunk)

    def usage(self, usage: Usage) -> bytes:
        chunk = self._chunk([])
        chunk.usage = usage
        return event(chunk)

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=self._usage)


class ChatChunks:
    """Events of one streamed /v1/chat/completions."""

    __slots__ = ("_created", "_id", "_model", "_usage")

    def __init__(self, *, id: str, model: str, created: int, has_usage: bool) -> None:
        self._id = id
        self._model = model
        self._created = created
        self._usage: UnsetType | None = None if has_usage else UNSET

    def template(self, index: int) -> Template:
        return Template(self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(content=_MARK))]))

    def first(self, index: int) -> bytes:
        """The role, before any text."""
        return event(self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))]))

    def text(self, index: int, text: str, logprobs: ChatLogprobs | None) -> bytes:
        return event(self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(content=text), logprobs=logprobs)]))

    def finish(self, index: int, reason: str, timings: Timings) -> bytes:
        chunk = self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=reason)])
        chunk.timings = timings
        return event(chunk)

    def usage(self, usage: Usage) -> bytes:
        chunk = self._chunk([])
        chunk.usage = usage
        return event(chunk)

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=self._usage
        )
