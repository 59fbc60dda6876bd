"""How long to wait before something that died is started again.

Pure: time comes in as an argument. The delay doubles from `first_s` to `cap_s` with each death in a row, with up to a
quarter of jitter so that several workers do not start in step. A life of `stable_after_s` after READY ends the row; a
brief success does not. After `deaths_limit` deaths in a row the thing counts as failed (`is_exhausted`), which people and
dashboards should see; attempts go on at the cap, because no state may need a human to end.
"""

import random
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Backoff:
    """Deaths in a row, and the wait that follows from them. Times in seconds of a monotonic clock."""

    first_s: float
    cap_s: float
    stable_after_s: float
    deaths_limit: int
    deaths: int = 0
    ready_since: float | None = None
    jitter: random.Random = field(default_factory=random.Random, repr=False)

    @property
    def is_exhausted(self) -> bool:
        return self.deaths >= self.deaths_limit

    def ready(self, now: float) -> None:
        """It works since now."""
        self.ready_since = now

    def died(self, now: float) -> float:
        """It died: the delay in seconds before the next start."""
        if self.ready_since is not None and now - self.ready_since >= self.stable_after_s:
            self.deaths = 0
        self.ready_since = None
        delay = min(self.cap_s, self.first_s * 2.0 ** min(self.deaths, 30))
        self.deaths += 1
        return delay * (1.0 - 0.25 * self.jitter.random())

    def settle(self, now: float) -> bool:
        """Forget old deaths once the present life is long enough; True when there was something to forget."""
        if not self.deaths or self.ready_since is None or now - self.ready_since < self.stable_after_s:
            return False
        self.deaths = 0
        return True

    def forgive(self) -> None:
        """An operator lifts the cordon: the row begins anew."""
        self.deaths = 0
