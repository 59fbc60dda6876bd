"""Repair B: one turn object owns the lock, the iteration and the result, and lets go once its own end is read."""

from __future__ import annotations

from collections.abc import Sequence

from bench.schemes.messages import Pipes, Request, Statistics
from bench.schemes.replica import Replica, Replicas


class OwningTurn:
    def __init__(self, replica: Replica, request: Request) -> None:
        self._replica = replica
        self._request = request
        self._has_begun = False
        self._owns_replica = False
        self._statistics: Statistics | None = None

    def tokens(self) -> OwningTurn:
        return self

    def statistics(self) -> Statistics | None:
        return self._statistics

    def __iter__(self) -> OwningTurn:
        return self

    def __next__(self) -> int:
        if not self._has_begun:
            self._begin()
        if not self._owns_replica:
            raise StopIteration
        try:
            answer = self._replica.read(self._request)
        except BaseException:
            self._let_go()
            raise
        if isinstance(answer, Statistics):
            self._statistics = answer
            self._let_go()
            raise StopIteration
        if answer in self._request.stop_ids:
            self.close()
            raise StopIteration
        return answer

    def close(self) -> None:
        self._has_begun = True
        if not self._owns_replica:
            return
        try:
            self._statistics = self._replica.drain(self._request)
        finally:
            self._let_go()

    def _begin(self) -> None:
        self._has_begun = True
        self._replica.lock.acquire()
        if self._request.cancelled.is_set():
            self._replica.lock.release()
            return
        self._owns_replica = True
        try:
            self._replica.begin(self._request)
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        self._owns_replica = False
        self._replica.lock.release()


class SchemeB:
    def __init__(self, pipes: Sequence[Pipes]) -> None:
        self._replicas = Replicas(pipes)

    def turn(self, request: Request) -> OwningTurn:
        return OwningTurn(self._replicas.choose(request.prompt), request)

    def close(self) -> None:
        self._replicas.close()
