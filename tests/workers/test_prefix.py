"""Beliefs about caches, against lists of ids compared one by one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.prefix import BLOCK_TOKENS, MISSES, CacheBelief, PrefixChain

# Few different blocks, so that prefixes are shared and differ again.
block = st.sampled_from([[n] * BLOCK_TOKENS for n in range(3)])
ids = st.builds(
    lambda blocks, rest: [id for part in blocks for id in part] + rest,
    st.lists(block, max_size=6),
    st.lists(st.integers(0, 2), max_size=BLOCK_TOKENS - 1),
)


def known_tokens(belief: CacheBelief, chain: PrefixChain) -> int:
    return belief.weigh(chain)[0]


def evicted_tokens(belief: CacheBelief, chain: PrefixChain) -> int:
    return belief.weigh(chain)[1]


def common_tokens(left: list[int], right: list[int]) -> int:
    """Tokens of the common prefix if it has a whole block, up to the block after the last whole one; else 0."""
    limit = min(len(left), len(right))
    same = next((at for at in range(limit) if left[at] != right[at]), limit)
    return same if same >= BLOCK_TOKENS else 0


@given(ids, st.lists(ids, max_size=5))
@settings(deadline=None)
def test_known_tokens_are_the_longest_common_prefix_of_a_block_at_least(
    prompt: list[int], held: list[list[int]]
) -> None:
    belief = CacheBelief(100)
    for one in held:
        if len(PrefixChain(one)):
            belief._held.append(PrefixChain(one))
    assert known_tokens(belief, PrefixChain(prompt)) == max((common_tokens(prompt, one) for one in held), default=0)


@given(st.lists(ids, max_size=20), st.integers(1, 4))
@settings(deadline=None)
def test_a_belief_is_bounded_and_knows_what_it_took_last(held: list[list[int]], capacity: int) -> None:
    belief = CacheBelief(capacity)
    for one in held:
        chain = PrefixChain(one)
        belief.hold(chain)
        assert len(belief._held) <= capacity
        assert known_tokens(belief, PrefixChain(one)) == (chain.tokens if len(chain) else 0)


def test_a_decoder_that_keeps_nothing_is_not_believed_until_it_shows_otherwise() -> None:
    belief, chain = CacheBelief(1), PrefixChain(range(3 * BLOCK_TOKENS))
    belief.hold(chain)
    for _ in range(MISSES):
        assert belief.weigh(chain) == (3 * BLOCK_TOKENS, 0)
        belief.correct(known_tokens=3 * BLOCK_TOKENS, cached_tokens=0)
    assert belief.weigh(chain) == (0, 0)
    belief.correct(known_tokens=0, cached_tokens=0)
    assert belief.weigh(chain) == (0, 0)
    belief.correct(known_tokens=0, cached_tokens=2 * BLOCK_TOKENS)
    assert belief.weigh(chain) == (3 * BLOCK_TOKENS, 0)


def test_a_cache_that_was_lost_once_is_believed_again() -> None:
    belief, chain = CacheBelief(1), PrefixChain(range(3 * BLOCK_TOKENS))
    belief.hold(chain)
    belief.correct(known_tokens=3 * BLOCK_TOKENS, cached_tokens=0)
    assert belief.weigh(chain) == (3 * BLOCK_TOKENS, 0)


@given(ids, ids)
@settings(deadline=None)
def test_equal_hashes_mean_equal_prefixes(left: list[int], right: list[int]) -> None:
    hashes = [[chain[at] for at in range(len(chain))] for chain in (PrefixChain(left), PrefixChain(right))]
    for index, (one, other) in enumerate(zip(*hashes, strict=False)):
        end = (index + 1) * BLOCK_TOKENS
        assert (one == other) is (left[:end] == right[:end])


def test_a_chain_is_computed_only_as_far_as_anybody_asks() -> None:
    chain = PrefixChain(range(100 * BLOCK_TOKENS))
    belief = CacheBelief(4)
    belief.hold(PrefixChain(range(1, 100 * BLOCK_TOKENS)))
    assert known_tokens(belief, chain) == 0
    assert "computed=1)" in repr(chain)


def test_a_sequence_without_a_whole_block_takes_a_slot_and_is_not_known() -> None:
    belief = CacheBelief(4)
    belief.hold(PrefixChain(range(BLOCK_TOKENS - 1)))
    assert known_tokens(belief, PrefixChain(range(BLOCK_TOKENS - 1))) == 0
    assert "sequences=1" in repr(belief)


def test_an_extended_conversation_replaces_itself_and_pushes_nothing_out() -> None:
    belief = CacheBelief(2)
    other = PrefixChain(range(10_000, 10_000 + 3 * BLOCK_TOKENS))
    belief.hold(other)
    for blocks in range(2, 8):
        belief.hold(PrefixChain(range(blocks * BLOCK_TOKENS)))
    assert known_tokens(belief, other) == 3 * BLOCK_TOKENS
    assert evicted_tokens(belief, PrefixChain(range(20 * BLOCK_TOKENS))) == 0
    assert evicted_tokens(belief, PrefixChain([5] * BLOCK_TOKENS)) == 3 * BLOCK_TOKENS


def test_a_conversation_that_only_begins_alike_takes_a_slot_of_its_own() -> None:
    system = list(range(3 * BLOCK_TOKENS))
    belief = CacheBelief(2)
    one, other, third = ([*system, *[id] * 200] for id in (1, 2, 3))
    belief.hold(PrefixChain(one))
    assert belief.weigh(PrefixChain(other)) == (len(system), 0)
    belief.hold(PrefixChain(other))
    assert known_tokens(belief, PrefixChain(one)) == len(one)
    assert belief.weigh(PrefixChain(third)) == (len(system), len(one)), "a third would push the first out"


def test_a_new_decoder_knows_nothing_and_a_smaller_one_less() -> None:
    belief = CacheBelief(3)
    chains = [PrefixChain([n] * BLOCK_TOKENS) for n in range(3)]
    for chain in chains:
        belief.hold(chain)
    belief.resize(1)
    assert [known_tokens(belief, chain) for chain in chains] == [0, 0, BLOCK_TOKENS]
    belief.forget()
    assert known_tokens(belief, chains[2]) == 0
