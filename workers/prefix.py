"""What a decoder is believed to hold in its cache, as chains of hashes over blocks of 64 tokens.

    chain   h0 = hash(block 0), h1 = hash(h0, block 1), ...    so an equal h_k means an equal prefix of (k + 1) blocks
    belief  per worker up to `capacity` chains, one for each sequence its decoder can keep, most recently used last

A request's chain is computed as far as anybody asks: a prompt whose first block no worker knows costs one hash. Beliefs
are only beliefs: they choose a worker and never an answer. They end with the decoder's incarnation and when it reports NaN, and
count for nothing while results say that nothing is kept.
"""

from collections.abc import Sequence

BLOCK_TOKENS = 64
MISSES = 3  # after which a decoder is not believed to keep anything


class PrefixChain:
    """The block hashes of one sequence of ids, computed on demand. Only whole blocks count."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids
        self._hashes: list[int] = []
        self._blocks = len(ids) // BLOCK_TOKENS

    def __repr__(self) -> str:
        return f"PrefixChain(tokens={len(self._ids)}, computed={len(self._hashes)})"

    def __len__(self) -> int:
        return self._blocks

    def extended(self, ids: Sequence[int]) -> "PrefixChain":
        """The chain of this sequence and what follows it."""
        chain = PrefixChain([*self._ids, *ids])
        chain._hashes = self._hashes.copy()
        return chain

    @property
    def tokens(self) -> int:
        return len(self._ids)

    def __getitem__(self, block: int) -> int:
        if block >= self._blocks:
            raise IndexError(block)
        hashes = self._hashes
        while len(hashes) <= block:
            start = len(hashes) * BLOCK_TOKENS
            hashes.append(hash((hashes[-1] if hashes else 0, *self._ids[start : start + BLOCK_TOKENS])))
        return hashes[block]


class CacheBelief:
    """The chains that one decoder is believed to keep."""

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._chains: list[PrefixChain] = []
        self._misses = 0  # results in a row that had nothing cached where something was believed to be

    def __repr__(self) -> str:
        return f"CacheBelief(chains={len(self._chains)}, capacity={self._capacity})"

    def resize(self, capacity: int) -> None:
        """The decoder keeps this many sequences."""
        self._capacity = max(1, capacity)
        del self._chains[: -self._capacity]

    def forget(self) -> None:
        """The decoder holds nothing (a new one, or NaN)."""
        self._chains.clear()
        self._misses = 0

    def weigh(self, chain: PrefixChain) -> tuple[int, int]:
        """Tokens of this prompt that the decoder need not read again, and tokens of others that it would push out."""
        if not self._chains or self._misses >= MISSES:
            return 0, 0
        best = self._longest(chain)
        if best is not None:
            return best[1] * BLOCK_TOKENS, 0
        return 0, len(self._chains[0]) * BLOCK_TOKENS if len(self._chains) >= self._capacity else 0

    def hold(self, chain: PrefixChain) -> None:
        """The decoder now holds this sequence: in place of the one it extends, else of the oldest when it is full."""
        if not len(chain):
            return
        best = self._longest(chain)
        if best is not None and best[1] * 2 >= len(self._chains[best[0]]):
            del self._chains[best[0]]
        elif len(self._chains) >= self._capacity:
            del self._chains[0]
        self._chains.append(chain)

    def correct(self, *, known_tokens: int, cached_tokens: int) -> None:
        """What a result says of the belief behind its turn: tokens believed to be cached, and those that were.

        The turn itself has brought the prompt back, so one miss changes nothing. A decoder that keeps nothing time after
        time is not believed to keep anything until it shows otherwise.
        """
        if cached_tokens >= BLOCK_TOKENS:
            self._misses = 0
        elif known_tokens >= BLOCK_TOKENS:
            self._misses += 1

    def _longest(self, chain: PrefixChain) -> tuple[int, int] | None:
        """(index, matching blocks) of the chain that shares most with this one."""
        best: tuple[int, int] | None = None
        first = chain[0] if len(chain) else None
        for index, held in enumerate(self._chains):
            if held[0] != first:
                continue  # most chains, at a tenth of a call's cost
            shared = _shared_blocks(held, chain)
            if best is None or shared >= best[1]:
                best = (index, shared)
        return best


def _shared_blocks(held: PrefixChain, chain: PrefixChain) -> int:
    """Blocks in common of two chains with the same first one. Equal up to the first difference: a binary search finds it."""
    low, high = 1, min(len(held), len(chain))
    while low < high:
        middle = (low + high + 1) // 2
        if held[middle - 1] == chain[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
