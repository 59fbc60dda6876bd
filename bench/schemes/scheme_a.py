"""Repair A: under the lock, close the child and copy the statistics for the caller."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from bench.schemes.messages import Pipes, Request, Statistics
from bench.schemes.replica import Replica, Replicas


class CopiedTurn:
    def __init__(self, replica: Replica, request: Request) -> None:
        self._replica = replica
        self._request = request
        self._statistics: Statistics | None = None

    def tokens(self) -> Generator[int, None, None]:
        with self._replica.lock:
            if self._request.cancelled.is_set():
                return
            stream = self._replica.stream(self._request)
            try:
                for token in stream:
                    if token in self._request.stop_ids:
                        return
                    yield token
            finally:
                stream.close()
                self._statistics = self._replica.last_statistics

    def statistics(self) -> Statistics | None:
        return self._statistics


class SchemeA:
    def __init__(self, pipes: Sequence[Pipes]) -> None:
        self._replicas = Replicas(pipes)

    def turn(self, request: Request) -> CopiedTurn:
        return CopiedTurn(self._replicas.choose(request.prompt), request)

    def close(self) -> None:
        self._replicas.close()
