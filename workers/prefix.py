"""What a decoder is believed to hold in its cache, as chains of hashes over blocks of 64 tokens.

    chain   h0 = hash(block 0), h1 = hash(h0, block 1), ...    so an equal h_k means an equal prefix of (k + 1) blocks
    belief  per worker up to `capacity` sequences, as many as its decoder has slots, least recently used first

A request's chain is computed as far as anybody asks: a prompt whose first block no worker knows costs one hash. Beliefs
are only beliefs: they choose a worker and never an answer. They end with the decoder's incarnation and when it reports NaN, and
count for nothing while results say that nothing is kept.
"""

from collections.abc import Sequence

BLOCK_TOKENS = 64
SLACK = 16  # tokens that the next turn of a conversation may drop (admission.cpp)
MISSES = 3  # after which a decoder is not believed to keep anything


class PrefixChain:
    """The block hashes of one sequence of ids, computed on demand. Only whole blocks have one."""

    def __init__(self, ids: Sequence[int], rest: Sequence[int] = ()) -> None:
        self._ids = ids
        self._rest = rest  # what follows `ids`, joined when somebody looks at it
        self._hashes: list[int] = []
        self.tokens = len(ids) + len(rest)
        self._blocks = self.tokens // BLOCK_TOKENS

    def __repr__(self) -> str:
        return f"PrefixChain(tokens={self.tokens}, computed={len(self._hashes)})"

    def __len__(self) -> int:
        return self._blocks

    def extended(self, ids: Sequence[int]) -> "PrefixChain":
        """The chain of this sequence and what follows it."""
        chain = PrefixChain(self._joined(), ids)
        chain._hashes = self._hashes.copy()
        return chain

    def __getitem__(self, block: int) -> int:
        if block >= self._blocks:
            raise IndexError(block)
        hashes = self._hashes
        while len(hashes) <= block:
            ids, start = self._joined(), len(hashes) * BLOCK_TOKENS
            hashes.append(hash((hashes[-1] if hashes else 0, *ids[start : start + BLOCK_TOKENS])))
        return hashes[block]

    def shared_tokens(self, other: "PrefixChain") -> int:
        """Tokens in common with a sequence whose first block is the same."""
        start = _shared_blocks(self, other) * BLOCK_TOKENS
        own, others = self._joined()[start : start + BLOCK_TOKENS], other._joined()[start : start + BLOCK_TOKENS]
        limit = min(len(own), len(others))
        return start + next((at for at in range(limit) if own[at] != others[at]), limit)

    def _joined(self) -> Sequence[int]:
        if self._rest:
            self._ids, self._rest = [*self._ids, *self._rest], ()
        return self._ids


class CacheBelief:
    """The sequences that one decoder is believed to keep, one a slot, placed as the decoder's own admission places them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._held: list[PrefixChain] = []  # the least recently used first
        self._misses = 0  # results in a row that had nothing cached where something was believed to be

    def __repr__(self) -> str:
        return f"CacheBelief(sequences={len(self._held)}, capacity={self._capacity})"

    def resize(self, capacity: int) -> None:
        """The decoder keeps this many sequences."""
        self._capacity = max(1, capacity)
        del self._held[: -self._capacity]

    def forget(self) -> None:
        """The decoder holds nothing (a new one, or NaN)."""
        self._held.clear()
        self._misses = 0

    def weigh(self, chain: PrefixChain) -> tuple[int, int]:
        """Tokens of this prompt that the decoder need not read again, and the cost in tokens of what it would push out.

        A conversation's next turn, or the same one once more, pushes nothing out. Another that would take the slot of one
        with the same beginning (all slots being full) costs what that loses and half of what it has: so an edited
        conversation stays while it keeps three times what it drops, and a new one with a common system prompt goes where
        there is room.
        """
        if not self._held or self._misses >= MISSES:
            return 0, 0
        best = self._longest(chain)
        if best is None:
            return 0, 0 if len(self._held) < self._capacity else self._held[0].tokens
        index, shared = best
        if self._continued(best) is not None:
            held = self._held[index].tokens
            is_next_turn = held - shared <= SLACK or shared == chain.tokens
            return shared, 0 if is_next_turn else held - shared + held // 2
        return shared, 0 if len(self._held) < self._capacity else self._held[0].tokens

    def hold(self, chain: PrefixChain) -> None:
        """The decoder now holds this sequence: in place of the one it continues, else of the oldest when it is full."""
        continued = self._continued(self._longest(chain))
        if continued is not None:
            del self._held[continued]
        elif len(self._held) >= self._capacity:
            del self._held[0]
        self._held.append(chain)

    def correct(self, *, known_tokens: int, cached_tokens: int) -> None:
        """What a result says of the belief behind its turn: tokens believed to be cached, and those that were.

        The turn itself has brought the prompt back, so one miss changes nothing. A decoder that keeps nothing time after
        time is not believed to keep anything until it shows otherwise.
        """
        if cached_tokens >= BLOCK_TOKENS:
            self._misses = 0
        elif known_tokens >= BLOCK_TOKENS:
            self._misses += 1

    def _continued(self, best: tuple[int, int] | None) -> int | None:
        """The sequence that a prompt continues, so that the decoder takes its slot; not one that only begins alike.

        The rule is that of native/decoder/admission.cpp.
        """
        if best is None:
            return None
        index, shared = best
        spare = 0 if len(self._held) < self._capacity else shared // 2
        return index if self._held[index].tokens - shared <= SLACK + spare else None

    def _longest(self, chain: PrefixChain) -> tuple[int, int] | None:
        """(index, tokens in common) of the sequence that shares most with this one, a block at least."""
        if not len(chain):
            return None
        best: tuple[int, int] | None = None
        first = chain[0]
        for index, held in enumerate(self._held):
            if not len(held) or held[0] != first:
                continue  # most sequences, at a tenth of a call's cost
            shared = held.shared_tokens(chain)
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
