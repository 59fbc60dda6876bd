"""Drives a server with many HTTP streams from a process of its own (bench/http_client.c), and reads what it saw.

The C program only notes when what came; every figure is computed here, so that a server under test and this interpreter
don't compete while the clock runs.
"""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

SOURCE = Path(__file__).with_name("http_client.c")
BUILD = Path(__file__).resolve().parent.parent / "build" / "bench"
LIMIT_S = 300.0

_CALL = struct.Struct("<IIQ")
_SUMMARY = struct.Struct("<6Q")
_EVENT = np.dtype([("ns", "<u8"), ("connection", "<u2"), ("kind", "<u2"), ("value", "<u4")])

Milliseconds = npt.NDArray[np.float64]


class ClientFailed(Exception):
    """The client could not do its work, or the server did not answer every request."""


class Event(IntEnum):
    """What the client notes; see bench/http_client.c."""

    SENT = 1
    TEXT = 2
    PROMPT = 3
    CACHED = 4
    END = 5
    FAILED = 6


@dataclass(frozen=True, slots=True)
class Call:
    """One POST. Those of a connection follow each other, each `after_s` after the end of the one before it."""

    connection: int
    body: dict[str, Any]
    path: str = "/v1/completions"
    after_s: float = 0.0

    def encode(self, host: str) -> bytes:
        content = msgspec.json.encode(self.body)
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            f"accept: text/event-stream\r\ncontent-length: {len(content)}\r\n\r\n"
        )
        data = head.encode() + content
        return _CALL.pack(self.connection, len(data), int(self.after_s * 1e9)) + data


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """One answered request. Times in milliseconds since the start; text_ms: when text came, once per read."""

    connection: int
    sent_ms: float
    end_ms: float
    text_ms: Milliseconds
    texts: int
    tokens: int
    prompt_tokens: int
    cached_tokens: int

    @property
    def first_ms(self) -> float:
        """From the request to its first text."""
        return float(self.text_ms[0]) - self.sent_ms

    @property
    def gaps_ms(self) -> Milliseconds:
        """Between successive tokens. Those that came together with another had no gap: it is 0."""
        gaps = np.diff(self.text_ms)
        return np.concatenate([gaps, np.zeros(max(0, self.tokens - 1 - len(gaps)))])


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """All answers of one drive, and what it cost the client."""

    answers: list[Answer] = field(repr=False)
    seconds: float
    client_cpu_s: float
    reads: int
    reconnects: int

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def texts(self) -> int:
        return sum(answer.texts for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def client_share(self) -> float:
        """The client's use of one core."""
        return self.client_cpu_s / self.seconds

    def first_ms(self) -> Milliseconds:
        return np.array([answer.first_ms for answer in self.answers])

    def gaps_ms(self) -> Milliseconds:
        return np.concatenate([answer.gaps_ms for answer in self.answers])


def client_program() -> Path:
    """The client; it is compiled at first use and whenever its source is newer."""
    program = BUILD / "http_client"
    if not program.exists() or program.stat().st_mtime < SOURCE.stat().st_mtime:
        BUILD.mkdir(parents=True, exist_ok=True)
        fresh = program.with_suffix(f".{os.getpid()}")
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-std=c11", "-D_GNU_SOURCE", "-O2", "-o", str(fresh), str(SOURCE)], check=True)
        fresh.replace(program)
    return program


def drive(
    port: int,
    calls: Iterable[Call],
    *,
    address: str = "127.0.0.1",
    keeps_alive: bool = True,
    limit_s: float = LIMIT_S,
) -> Trace:
    """Make the calls and return once all are answered. Raises ClientFailed unless every one was answered well."""
    listed = list(calls)
    connections = 1 + max(call.connection for call in listed)
    host = f"{address}:{port}"
    done = subprocess.run(
        [str(client_program()), address, str(port), str(connections), str(limit_s), "keep" if keeps_alive else "fresh"],
        input=b"".join(call.encode(host) for call in listed),
        capture_output=True,
        timeout=limit_s + 10,
        check=False,
    )
    if done.returncode != 0:
        raise ClientFailed(done.stderr.decode(errors="replace").strip())
    trace = read_trace(done.stdout)
    if len(trace.answers) != len(listed):
        raise ClientFailed(f"{len(trace.answers)} of {len(listed)} requests were answered")
    return trace


def does_keep_alive(port: int, *, address: str = "127.0.0.1") -> bool:
    """Whether a second request on the same connection is answered. llama-server promises it, and closes."""
    body = {"prompt": "one two three", "max_tokens": 8, "temperature": 0, "stream": True}
    try:
        drive(port, [Call(0, body), Call(0, body)], address=address)
    except ClientFailed:
        return False
    return True


def read_trace(data: bytes) -> Trace:
    """The client's output. Raises ClientFailed for an answer that is an error."""
    count, wall_ns, cpu_ns, reads, _, reconnects = _SUMMARY.unpack_from(data)
    events = np.frombuffer(data, _EVENT, count, _SUMMARY.size)
    failed = events[events["kind"] == Event.FAILED]
    if len(failed):
        statuses = sorted({int(value) for value in failed["value"]})
        raise ClientFailed(f"{len(failed)} requests failed; status {statuses}")
    answers: list[Answer] = []
    for connection in np.unique(events["connection"]):
        own = events[events["connection"] == connection]
        ends = np.flatnonzero(own["kind"] == Event.END)
        answers += [_answer(own[first : last + 1]) for first, last in zip((0, *(ends + 1)), ends, strict=False)]
    return Trace(answers, wall_ns / 1e9, cpu_ns / 1e9, reads, reconnects)


def _answer(events: npt.NDArray[Any]) -> Answer:
    kinds, values, at_ms = events["kind"], events["value"], events["ns"] / 1e6
    texts = kinds == Event.TEXT
    if not texts.any():
        raise ClientFailed("an answer without any text; choose another prompt or more tokens")
    return Answer(
        connection=int(events["connection"][0]),
        sent_ms=float(at_ms[kinds == Event.SENT][0]),
        end_ms=float(at_ms[-1]),
        text_ms=at_ms[texts],
        texts=int(values[texts].sum()),
        tokens=int(values[-1]),
        prompt_tokens=_last(values[kinds == Event.PROMPT]),
        cached_tokens=_last(values[kinds == Event.CACHED]),
    )


def _last(values: Sequence[int]) -> int:
    return int(values[-1]) if len(values) else 0
