"""What a decoder is believed to hold in its cache, as chains of hashes over blocks of 64 tokens.

    chain   h0 = hash(block 0), h1 = hash(h0, block 1), ...    so an equal h_k means an equal prefix of (k + 1) blocks
    belief  per worker up to `capacity` chains, one for each sequence its decoder can keep, most recently used last

A request's chain is computed as far as anybody asks: a prompt whose first block no worker knows costs one hash. Beliefs
are only beliefs: they choose a worker and never an answer. They end with the decoder's incarnation, when it reports NaN,
and are shortened when a result says that less was cached.
"""

from collections.abc import Sequence

BLOCK_TOKENS = 64


class PrefixChain:
    """The block hashes of one sequence of ids, computed on demand. Only whole blocks count."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids
        self._hashes: list[int] = []

    def __repr__(self) -> str:
        return f"PrefixChain(tokens={len(self._ids)}, computed={len(self._hashes)})"

    def __len__(self) -> int:
        return len(self._ids) // BLOCK_TOKENS

    @property
    def tokens(self) -> int:
        return len(self._ids)

    def __getitem__(self, block: int) -> int:
        hashes = self._hashes
        while len(hashes) <= block:
            start = len(hashes) * BLOCK_TOKENS
            hashes.append(hash((hashes[-1] if hashes else 0, *self._ids[start : start + BLOCK_TOKENS])))
        return hashes[block]

    def all(self) -> list[int]:
        """Every block's hash."""
        if len(self):
            self[len(self) - 1]
        return self._hashes


class CacheBelief:
    """The chains that one decoder is believed to keep."""

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._chains: list[list[int]] = []

    def __repr__(self) -> str:
        return f"CacheBelief(chains={len(self._chains)}, capacity={self._capacity})"

    def resize(self, capacity: int) -> None:
        """The decoder keeps this many sequences."""
        self._capacity = max(1, capacity)
        del self._chains[: -self._capacity]

    def forget(self) -> None:
        """The decoder holds nothing (a new one, or NaN)."""
        self._chains.clear()

    def known_tokens(self, chain: PrefixChain) -> int:
        """Tokens of this prompt that the decoder need not read again."""
        best = self._longest(chain)
        return 0 if best is None else best[1] * BLOCK_TOKENS

    def evicted_tokens(self, chain: PrefixChain) -> int:
        """Tokens of other sequences that taking this prompt would push out of the cache."""
        if len(self._chains) < self._capacity or self._longest(chain) is not None:
            return 0
        return len(self._chains[0]) * BLOCK_TOKENS

    def hold(self, chain: PrefixChain) -> None:
        """The decoder now holds this sequence: in place of the one it extends, else of the oldest when it is full."""
        hashes = list(chain.all())
        if not hashes:
            return
        best = self._longest(chain)
        if best is not None and best[1] * 2 >= len(self._chains[best[0]]):
            del self._chains[best[0]]
        elif len(self._chains) >= self._capacity:
            del self._chains[0]
        self._chains.append(hashes)

    def correct(self, chain: PrefixChain, cached_tokens: int) -> None:
        """The decoder said how much of this prompt it had kept: believe no more than that of the longest match."""
        best = self._longest(chain)
        blocks = cached_tokens // BLOCK_TOKENS
        if best is None or best[1] <= blocks:
            return
        if blocks == 0:
            del self._chains[best[0]]
        else:
            del self._chains[best[0]][blocks:]

    def _longest(self, chain: PrefixChain) -> tuple[int, int] | None:
        """(index, matching blocks) of the chain that shares most with this one."""
        best: tuple[int, int] | None = None
        first = chain[0] if len(chain) else None
        for index, hashes in enumerate(self._chains):
            if not hashes or hashes[0] != first:
                continue  # most chains, at a tenth of a call's cost
            shared = _shared_blocks(hashes, chain)
            if best is None or shared >= best[1]:
                best = (index, shared)
        return best


def _shared_blocks(hashes: list[int], chain: PrefixChain) -> int:
    """Blocks in common of two chains with the same first one. Equal up to the first difference: a binary search finds it."""
    low, high = 1, min(len(hashes), len(chain))
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] == chain[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
