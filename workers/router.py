"""Which worker takes a turn. Pure: candidates in, a decision out.

The cost of a candidate is what its decoder would have to do that another need not:

    prompt tokens it must read again
  + EVICTION_WEIGHT x tokens of other conversations it would push out of its cache
  + LOAD_TOKENS     x turns it is running (each step is shared with them)

The cheapest wins, then the least loaded, then the one that waited longest, so that equal workers take turns. Only workers
that can take the turn now are candidates: a prefix held by a full, dead or drained worker attracts nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from workers.prefix import CacheBelief, PrefixChain

LOAD_TOKENS = 64
EVICTION_WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that can take a turn now."""

    index: int
    running: int
    last_used: int  # a counter of the pool's hand-overs: smaller is longer ago
    belief: CacheBelief


@dataclass(frozen=True, slots=True)
class Decision:
    """The worker chosen, and the prompt tokens it is believed to hold."""

    index: int
    known_tokens: int


def choose(chain: PrefixChain, candidates: Iterable[Candidate]) -> Decision | None:
    """The best candidate for a prompt, or None when there is none."""
    best: tuple[float, int, int, int] | None = None
    decision = None
    for candidate in candidates:
        known = candidate.belief.known_tokens(chain)
        cost = (
            chain.tokens
            - known
            + EVICTION_WEIGHT * candidate.belief.evicted_tokens(chain)
            + LOAD_TOKENS * candidate.running
        )
        key = (cost, candidate.running, candidate.last_used, candidate.index)
        if best is None or key < best:
            best, decision = key, Decision(candidate.index, known)
    return decision
