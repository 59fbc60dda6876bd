"""Reads an answer of the server, streamed or whole, and holds its form against the rules.

A stream ends in exactly one way: a chunk with a finish reason, then [DONE]; or one error event. Its chunks share one id.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

from bench.chaos import wire


@dataclass(slots=True)
class Answer:
    """What came for one request. Times in seconds. fault: why it is no good answer, empty if it is one."""

    id: str = ""
    text: str = ""
    tokens: list[tuple[bytes, float]] = field(default_factory=list)  # bytes and logprob, where they were asked for
    tops: list[dict[bytes, float]] = field(default_factory=list)
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    moves: int = 0
    error: str = ""
    fault: str = ""
    has_left: bool = False
    pieces: int = 0
    first_s: float = 0.0
    longest_gap_s: float = 0.0

    def is_tie(self, place: int, other: bytes, *, limit: float) -> bool:
        """Whether another token was as good as the one at this place: their logits differ by less than the limit."""
        if place >= len(self.tokens) or other not in self.tops[place]:
            return False
        return abs(self.tops[place][other] - self.tokens[place][1]) < limit


@dataclass(slots=True)
class Progress:
    """Tokens (pieces of text) that reached any client so far: the load that a kill must meet."""

    pieces: int = 0


async def ask(
    port: int,
    path: str,
    body: dict[str, Any],
    *,
    progress: Progress | None = None,
    leave_after: int | None = None,
    limit_s: float = 300.0,
) -> Answer:
    """Send a request and read all of its answer. leave_after: close the connection after this many pieces of text."""
    answer = Answer()
    try:
        async with asyncio.timeout(limit_s), wire.call(port, "POST", path, body) as reply:
            if reply.headers.get("content-type", "").startswith("text/event-stream"):
                await _Stream(answer, progress or Progress(), leave_after).read(reply)
            else:
                _take_whole(answer, reply.status, await reply.json())
    except TimeoutError:
        answer.fault = f"no end within {limit_s:.0f} s"
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        answer.fault = f"{type(error).__name__}: {error}"
    return answer


class _Stream:
    """Takes the events of one stream."""

    def __init__(self, answer: Answer, progress: Progress, leave_after: int | None) -> None:
        self._answer = answer
        self._progress = progress
        self._leave_after = leave_after
        self._began_s = self._last_s = time.monotonic()
        self._is_over = False

    async def read(self, reply: wire.Reply) -> None:
        answer = self._answer
        if reply.status != 200:
            raise ValueError(f"an event stream with status {reply.status}")
        async for data in reply.events():
            if self._is_over:
                raise ValueError(f"after the end came {data[:100]!r}")
            if data == "[DONE]":
                self._end()
            else:
                self._take(json.loads(data))
            if self._leave_after is not None and answer.pieces >= self._leave_after and not self._is_over:
                answer.has_left = True
                return
        if not self._is_over:
            raise ValueError("the stream has no end")

    def _end(self) -> None:
        self._is_over = True
        if self._answer.finish is None:
            raise ValueError("[DONE] without a finish reason")

    def _take(self, chunk: dict[str, Any]) -> None:
        answer = self._answer
        if "error" in chunk:
            self._is_over = True
            answer.error = answer.fault = f"{chunk['error']['code']}: {chunk['error']['message']}"
            if answer.finish is not None:
                raise ValueError(f"an error after finish_reason {answer.finish}")
            return
        answer.id = answer.id or chunk["id"]
        if chunk["id"] != answer.id:
            raise ValueError(f"id {chunk['id']} in the stream of {answer.id}")
        if chunk.get("usage"):
            answer.usage = chunk["usage"]
        if "timings" in chunk:
            answer.moves = chunk["timings"]["moves"]
        for choice in chunk["choices"]:
            self._take_choice(choice)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        answer = self._answer
        text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        if text or choice.get("logprobs"):
            self._tick()
            if answer.finish is not None:
                raise ValueError("text after the finish reason")
            answer.text += text
            _take_logprobs(answer, choice)
        if choice.get("finish_reason"):
            if answer.finish is not None:
                raise ValueError("two finish reasons")
            answer.finish = choice["finish_reason"]

    def _tick(self) -> None:
        now = time.monotonic()
        answer = self._answer
        if answer.pieces:
            answer.longest_gap_s = max(answer.longest_gap_s, now - self._last_s)
        else:
            answer.first_s = now - self._began_s
        self._last_s = now
        answer.pieces += 1
        self._progress.pieces += 1


def _take_whole(answer: Answer, status: int, body: dict[str, Any]) -> None:
    if "error" in body:
        answer.error = answer.fault = f"{status} {body['error']['code']}: {body['error']['message']}"
        return
    choice = body["choices"][0]
    answer.id = body["id"]
    answer.text = choice["text"] if "text" in choice else choice["message"]["content"]
    answer.finish = choice["finish_reason"]
    answer.usage = body["usage"]
    answer.moves = body["timings"]["moves"]
    _take_logprobs(answer, choice)


def _take_logprobs(answer: Answer, choice: dict[str, Any]) -> None:
    for entry in (choice.get("logprobs") or {}).get("content") or ():
        answer.tokens.append((bytes(entry["bytes"]), entry["logprob"]))
        answer.tops.append({bytes(top["bytes"]): top["logprob"] for top in entry["top_logprobs"]})
