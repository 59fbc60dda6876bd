"""What passes between a caller, a scheme and a decoder of the solo dialect (see docs of the decoder protocol)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Protocol

BROKEN_ENGINE = (
    b"ERR verify: timed out at layer",
    b"ERR verify batch: timed out at layer",
    b"ERR verify: an earlier window never finished",
    b"ERR verify batch: an earlier window never finished",
)


class TurnFailed(Exception):
    """The decoder refused this turn or failed in it; the text is the decoder's."""


class DecoderBroken(TurnFailed):
    """The decoder is gone or must not be believed any more."""


@dataclass(frozen=True, slots=True)
class Pipes:
    """The decoder's stdin, to write commands to, and its stdout, to read answers from."""

    stdin: IO[bytes]
    stdout: IO[bytes]


@dataclass(frozen=True, slots=True)
class Statistics:
    """The fields of DONE that a caller reports to its client. Counts are tokens, times milliseconds."""

    generated: int
    prompt_tokens: int
    prompt_ms: float
    decode_ms: float
    finish: str
    reused: int = 0

    @classmethod
    def parse(cls, line: bytes) -> Statistics:
        fields = line.split()[1:]
        reused = int(fields[7]) if len(fields) > 7 else 0
        return cls(
            generated=int(fields[0]),
            prompt_tokens=int(fields[1]),
            prompt_ms=float(fields[2]),
            decode_ms=float(fields[3]),
            finish=fields[4].decode(),
            reused=reused,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One turn as its caller asks for it; `stop_ids` are the model's end-of-turn tokens, which are not passed on."""

    prompt: list[int]
    max_new: int
    stop_ids: frozenset[int] = frozenset()
    cancelled: threading.Event = field(default_factory=threading.Event)

    def gen_line(self) -> bytes:
        return f"GEN {self.max_new} {','.join(map(str, self.prompt))}\n".encode()


class Tokens(Protocol):
    """An iterator of output tokens that can be closed early."""

    def __iter__(self) -> Iterator[int]: ...

    def __next__(self) -> int: ...

    def close(self) -> None: ...


class Turn(Protocol):
    """One request in the hands of its caller: iterate it once, then ask for its statistics."""

    def tokens(self) -> Tokens: ...

    def statistics(self) -> Statistics | None: ...


class Engine(Protocol):
    """Several decoders behind one scheme."""

    def turn(self, request: Request) -> Turn: ...

    def close(self) -> None: ...
