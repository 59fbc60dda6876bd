"""Which worker takes a turn. Pure: candidates in, a decision out.

The cost of a candidate is what its decoder would have to do that another need not:

    prompt tokens it must read again
  + EVICTION_WEIGHT x tokens of other conversations it would push out of its cache
  + LOAD_TOKENS     x turns it is running (each step is shared with them)

The cheapest wins, then the least loaded, then the one whose turn it is. Equal workers take turns in runs of RUN hand-overs: each
gets its share, and seven of eight find a worker whose code and data are still in a core's cache (8 to 26 us of a first
token; docs/performance.md). Only workers that can take the turn now are candidates: a prefix held by a full, dead or drained
worker attracts nothing.
"""

from typing import Protocol, TypeVar

from workers.prefix import CacheBelief, PrefixChain

LOAD_TOKENS = 64
EVICTION_WEIGHT = 1.0
RUN = 8


class Candidate(Protocol):
    """A worker that can take a turn now. `last_run`: the pool's count of hand-overs when its last run of RUN ended."""

    index: int
    last_run: int
    belief: CacheBelief

    @property
    def running(self) -> int: ...


C = TypeVar("C", bound=Candidate)


def choose(chain: PrefixChain, candidates: list[C]) -> tuple[C, int]:
    """The best candidate (of one at least) for a prompt, and the prompt tokens that it is believed to hold."""
    best: tuple[float, int, int, int] | None = None
    for candidate in candidates:
        known, evicted = candidate.belief.weigh(chain)
        running = candidate.running
        cost = chain.tokens - known + EVICTION_WEIGHT * evicted + LOAD_TOKENS * running
        key = (cost, running, candidate.last_run, candidate.index)
        if best is None or key < best:
            best, chosen, chosen_known = key, candidate, known
    return chosen, chosen_known
