"""What became of turns, counted: totals that never decrease, and the rates computed from them. Pure but for the numbers."""

from collections import deque

from workers.snapshot import PoolCounters

_RETRY_LEAST_S, _RETRY_MOST_S = 1.0, 120.0


class Ledger:
    """Totals by the names of PoolCounters, the times of the last ends, and readings of tokens for a rate."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = dict.fromkeys(PoolCounters.__dataclass_fields__, 0)
        self._ends: deque[float] = deque(maxlen=64)
        self._readings: deque[tuple[float, int]] = deque(maxlen=10)

    def __repr__(self) -> str:
        return f"Ledger({ {name: count for name, count in self._counts.items() if count} })"

    def add(self, name: str, amount: int = 1) -> None:
        self._counts[name] += amount

    def completed(self, now_s: float) -> None:
        """A turn ended well."""
        self._counts["completed"] += 1
        self._ends.append(now_s)

    def read_tokens(self, now_s: float, tokens: int) -> None:
        """A reading of the workers' own token counts."""
        self._readings.append((now_s, tokens))

    @property
    def tokens_per_s(self) -> float:
        """Over the last readings; 0 while a replaced worker makes them fall."""
        if len(self._readings) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._readings[0], self._readings[-1]
        return max(0.0, (last - first) / max(1e-3, last_s - first_s))

    def retry_after_s(self, now_s: float, waiting: int) -> float:
        """When a place may be free, with so many before it, from the rate at which turns ended lately."""
        if len(self._ends) < 2:
            return _RETRY_LEAST_S
        rate = (len(self._ends) - 1) / max(1e-3, now_s - self._ends[0])
        return min(_RETRY_MOST_S, max(_RETRY_LEAST_S, (waiting + 1) / rate))

    def counters(self, **others: int) -> PoolCounters:
        """Everything, with totals that others keep."""
        return PoolCounters(**{**self._counts, **others})
