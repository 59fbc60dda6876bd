"""One clock for everything that must be looked at now and then while requests run, and the measure of the loop's own
lag.

Ten ticks a second while there is anything to watch, none otherwise: an idle server sets no timer. The lag is how late
a tick comes; anything that holds the event loop shows in it.
"""

import asyncio
import time
from collections import deque
from typing import Protocol

INTERVAL_S = 0.1
WINDOW = 300  # ticks looked back: half a minute of work


class Watched(Protocol):
    def on_tick(self, now_s: float) -> None: ...


class Ticker:
    """Calls `on_tick` of what was added. Belongs to one event loop."""

    def __init__(self) -> None:
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._lags: deque[float] = deque(maxlen=WINDOW)

    def __repr__(self) -> str:
        return f"Ticker(watched={len(self._watched)}, running={self._timer is not None})"

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, watched: Watched) -> None:
        self._watched.add(watched)
        if self._timer is None:
            self._arm()

    def discard(self, watched: Watched) -> None:
        """Take it off the list. The timer that is set runs out by itself when the list is empty."""
        self._watched.discard(watched)

    def lag_max_s(self) -> float:
        """The longest that the loop was held, among the last ticks."""
        return max(self._lags, default=0.0)

    def lag_p99_s(self) -> float:
        ordered = sorted(self._lags)
        return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] if ordered else 0.0

    def _arm(self) -> None:
        self._due_s = time.monotonic() + INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._tick)

    def _tick(self) -> None:
        now_s = time.monotonic()
        self._timer = None
        self._lags.append(max(0.0, now_s - self._due_s))
        for watched in tuple(self._watched):
            watched.on_tick(now_s)
        if self._watched:
            self._arm()
