"""The adapter for the in-process schemes: each turn has a caller thread, as a request handler would be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing

from bench.contracts.adapter import LIMIT_S, DecoderSource
from bench.schemes.messages import Engine, Pipes, Request, Statistics, Turn, TurnFailed


class ConsumerLeft(Exception):
    """The caller stopped reading; it is not told of this."""


class CallerTurn:
    """A caller that iterates its turn, one token for each that the contract asks for.

    The caller sits between two tokens until the next is wanted, as a handler does that is busy writing to its client.
    So a turn that is closed is always closed from the loop's body. The first token is fetched unasked: the turn must
    start by itself.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._request = request
        self._turn: Turn | None = None
        self._changed = threading.Condition()
        self._offered: int | None = None
        self._is_wanted = False
        self._leaving: Exception | None = None
        self._is_over = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="caller", daemon=True)
        self._thread.start()

    def next_token(self, timeout_s: float = LIMIT_S) -> int | None:
        with self._changed:
            self._is_wanted = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._offered is not None or self._is_over, timeout_s):
                raise TimeoutError("no token came")
            token, self._offered = self._offered, None
            self._is_wanted = False
            if token is None and self._error is not None:
                raise self._error
            return token

    def close(self) -> None:
        self.throw(ConsumerLeft())

    def throw(self, error: Exception) -> None:
        with self._changed:
            self._leaving = error
            self._changed.notify_all()

    def cancel(self) -> None:
        self._request.cancelled.set()
        self.close()

    def error(self, timeout_s: float = LIMIT_S) -> Exception | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_over, timeout_s):
                raise TimeoutError("the turn did not end")
        return self._error

    def result(self, timeout_s: float = LIMIT_S) -> Statistics:
        error = self.error(timeout_s)
        if error is not None:
            raise error
        statistics = None if self._turn is None else self._turn.statistics()
        if statistics is None:
            raise TurnFailed("the caller finds no statistics")
        return statistics

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        error: Exception | None = None
        try:
            self._turn = self._engine.turn(self._request)
            with closing(self._turn.tokens()) as tokens:
                for token in tokens:
                    self._consume(token)
        except ConsumerLeft:
            pass
        except Exception as failure:  # noqa: BLE001  top of the caller's thread: the contract asks for it
            error = failure
        with self._changed:
            self._error = error
            self._is_over = True
            self._changed.notify_all()

    def _consume(self, token: int) -> None:
        with self._changed:
            self._offered = token
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._leaving is not None or (self._offered is None and self._is_wanted))
            if self._leaving is not None:
                self._offered = None
                raise self._leaving


class ThreadAdapter:
    """Runs the contracts over one of bench.schemes."""

    def __init__(self, make: Callable[[Sequence[Pipes]], Engine]) -> None:
        self._make = make
        self._engine: Engine | None = None
        self._turns: list[CallerTurn] = []

    def open(self, decoders: Sequence[DecoderSource]) -> None:
        self._engine = self._make([decoder.connect() for decoder in decoders])

    def start_turn(self, prompt: list[int], max_new: int, *, stop_ids: frozenset[int] = frozenset()) -> CallerTurn:
        if self._engine is None:
            raise RuntimeError("open the adapter before starting a turn")
        turn = CallerTurn(self._engine, Request(prompt, max_new, stop_ids))
        self._turns.append(turn)
        return turn

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        for turn in self._turns:
            turn.cancel()
        for turn in self._turns:
            turn.join(5.0)
