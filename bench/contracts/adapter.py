"""What a contract needs of a serving scheme, and what it gives it.

    contract --start_turn, next_token, close, result--> Adapter --GEN, STOP--> decoder
        |                                                                         |
        +------------- decides every line, sees every command -------------------+

A contract is plain blocking code. An adapter may use threads, or an event loop in a thread of its own, or processes.
It reaches each decoder in one of two ways that lead to the same script: `connect()` for pipes within this process,
`command` for an argv that a worker process spawns and whose stdin and stdout are those pipes. Each connection, by
either way, is a new incarnation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bench.schemes.messages import Pipes, Statistics

LIMIT_S = 10.0  # how long a contract waits for something that must happen


class DecoderSource(Protocol):
    """A decoder that the adapter may start, any number of times."""

    @property
    def command(self) -> list[str]:
        """An argv to spawn; it speaks the solo dialect on its stdin and stdout and exits when its stdin ends."""
        ...

    def connect(self) -> Pipes:
        """The same decoder within this process; closing its stdin ends it."""
        ...


class TurnHandle(Protocol):
    """One turn in the hands of its caller. Its methods are called by one thread at a time."""

    def next_token(self, timeout_s: float = LIMIT_S) -> int | None:
        """The next output token, or None when the turn is over.

        A turn is over only when the decoder's DONE or ERR has been read (or when it was cancelled before its GEN was
        written). Ids of `stop_ids` are not delivered, they end the turn. Raises TurnFailed if the turn ended in an
        error, TimeoutError if nothing came.
        """
        ...

    def close(self) -> None:
        """The consumer wants no more: it found its stop string, or its client left. Returns at once."""
        ...

    def throw(self, error: Exception) -> None:
        """Make the consumer raise `error` while it holds a token. Returns at once; `error()` then returns it."""
        ...

    def cancel(self) -> None:
        """Cancel from outside, whether the turn is queued or running. Returns at once."""
        ...

    def error(self, timeout_s: float = LIMIT_S) -> Exception | None:
        """Wait for the end of the turn; what its caller was told went wrong, None if it ended well or was closed."""
        ...

    def result(self, timeout_s: float = LIMIT_S) -> Statistics:
        """Wait for the end of the turn, then look at its statistics as its caller would at this moment.

        Raises the turn's error if there is one, TurnFailed if the caller finds no statistics.
        """
        ...


class Adapter(Protocol):
    """One scheme over the given decoders. Made for one contract, opened once, closed once."""

    def open(self, decoders: Sequence[DecoderSource]) -> None:
        """Returns when every decoder has said READY and can be given a turn."""
        ...

    def start_turn(self, prompt: list[int], max_new: int, *, stop_ids: frozenset[int] = frozenset()) -> TurnHandle:
        """Submit a greedy turn and return at once. It starts by itself when the scheme has a decoder for it."""
        ...

    def close(self) -> None:
        """End the scheme and its decoders, whatever state its turns are in. Never raises, never hangs."""
        ...
