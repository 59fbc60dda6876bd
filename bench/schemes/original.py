"""The scheme that ringfence replaces, with both of its faults.

The turn keeps the child iterator, forwards it with a plain `for`, and lets go of the lock when it leaves the loop.
The child lives as long as the turn does: when the loop is left before DONE was read, the next holder of the lock
reads that DONE as its own. The statistics are whatever the replica said last when the caller comes to look.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from bench.schemes.messages import Pipes, Request, Statistics
from bench.schemes.replica import Replica, Replicas


class OriginalTurn:
    def __init__(self, replica: Replica, request: Request) -> None:
        self._replica = replica
        self._request = request
        self._stream = replica.stream(request)

    def tokens(self) -> Generator[int, None, None]:
        with self._replica.lock:
            if self._request.cancelled.is_set():
                return
            for token in self._stream:
                if token in self._request.stop_ids:
                    return
                yield token

    def statistics(self) -> Statistics | None:
        return self._replica.last_statistics


class Original:
    def __init__(self, pipes: Sequence[Pipes]) -> None:
        self._replicas = Replicas(pipes)

    def turn(self, request: Request) -> OriginalTurn:
        return OriginalTurn(self._replicas.choose(request.prompt), request)

    def close(self) -> None:
        self._replicas.close()
