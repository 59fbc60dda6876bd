"""The first repair alone: the child is closed, which reads up to its DONE, before the lock is released.

No turn reads another's lines any more. The statistics still lie on the replica, where the next turn overwrites them
before the
caller of this one has looked.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing

from bench.schemes.messages import Pipes, Request, Statistics
from bench.schemes.replica import Replica, Replicas


class CloseOnlyTurn:
    def __init__(self, replica: Replica, request: Request) -> None:
        self._replica = replica
        self._request = request

    def tokens(self) -> Generator[int, None, None]:
        with self._replica.lock:
            if self._request.cancelled.is_set():
                return
            with closing(self._replica.stream(self._request)) as stream:
                for token in stream:
                    if token in self._request.stop_ids:
                        return
                    yield token

    def statistics(self) -> Statistics | None:
        return self._replica.last_statistics


class CloseOnly:
    def __init__(self, pipes: Sequence[Pipes]) -> None:
        self._replicas = Replicas(pipes)

    def turn(self, request: Request) -> CloseOnlyTurn:
        return CloseOnlyTurn(self._replicas.choose(request.prompt), request)

    def close(self) -> None:
        self._replicas.close()
