"""Beliefs about caches, against lists of ids compared one by one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.prefix import BLOCK_TOKENS, CacheBelief, PrefixChain

# Few different blocks, so that prefixes are shared and differ again.
block = st.sampled_from([[n] * BLOCK_TOKENS for n in range(3)])
ids = st.builds(
    lambda blocks, rest: [id for part in blocks for id in part] + rest,
    st.lists(block, max_size=6),
    st.lists(st.integers(0, 2), max_size=BLOCK_TOKENS - 1),
)


def common_tokens(left: list[int], right: list[int]) -> int:
    """Tokens of the common prefix, in whole blocks of both."""
    limit = min(len(left), len(right)) // BLOCK_TOKENS
    same = next((at for at in range(limit * BLOCK_TOKENS) if left[at] != right[at]), limit * BLOCK_TOKENS)
    return same // BLOCK_TOKENS * BLOCK_TOKENS


@given(ids, st.lists(ids, max_size=5))
@settings(deadline=None)
def test_known_tokens_are_the_longest_common_prefix_in_whole_blocks(prompt: list[int], held: list[list[int]]) -> None:
    belief = CacheBelief(100)
    for one in held:
        if len(PrefixChain(one)):
            belief._chains.append(list(PrefixChain(one).all()))
    assert belief.known_tokens(PrefixChain(prompt)) == max((common_tokens(prompt, one) for one in held), default=0)


@given(st.lists(ids, max_size=20), st.integers(1, 4))
@settings(deadline=None)
def test_a_belief_is_bounded_and_knows_what_it_took_last(held: list[list[int]], capacity: int) -> None:
    belief = CacheBelief(capacity)
    for one in held:
        chain = PrefixChain(one)
        belief.hold(chain)
        assert len(belief._chains) <= capacity
        assert belief.known_tokens(PrefixChain(one)) == len(chain) * BLOCK_TOKENS


@given(ids, ids, st.integers(0, 500))
@settings(deadline=None)
def test_a_correction_leaves_no_more_than_the_decoder_said(held: list[int], prompt: list[int], cached: int) -> None:
    belief = CacheBelief(1)
    belief.hold(PrefixChain(held))
    before = belief.known_tokens(PrefixChain(prompt))
    belief.correct(PrefixChain(prompt), cached)
    assert belief.known_tokens(PrefixChain(prompt)) == min(before, cached // BLOCK_TOKENS * BLOCK_TOKENS)


@given(ids, ids)
@settings(deadline=None)
def test_equal_hashes_mean_equal_prefixes(left: list[int], right: list[int]) -> None:
    hashes = PrefixChain(left).all(), PrefixChain(right).all()
    for index, (one, other) in enumerate(zip(*hashes, strict=False)):
        end = (index + 1) * BLOCK_TOKENS
        assert (one == other) is (left[:end] == right[:end])


def test_a_chain_is_computed_only_as_far_as_anybody_asks() -> None:
    chain = PrefixChain(range(100 * BLOCK_TOKENS))
    belief = CacheBelief(4)
    belief.hold(PrefixChain(range(1, 100 * BLOCK_TOKENS)))
    assert belief.known_tokens(chain) == 0
    assert "computed=1)" in repr(chain)


def test_a_block_that_is_not_whole_counts_for_nothing() -> None:
    belief = CacheBelief(4)
    belief.hold(PrefixChain(range(BLOCK_TOKENS - 1)))
    assert belief.known_tokens(PrefixChain(range(BLOCK_TOKENS - 1))) == 0
    assert len(belief._chains) == 0


def test_an_extended_conversation_replaces_itself_and_pushes_nothing_out() -> None:
    belief = CacheBelief(2)
    other = PrefixChain(range(10_000, 10_000 + 3 * BLOCK_TOKENS))
    belief.hold(other)
    for blocks in range(2, 8):
        belief.hold(PrefixChain(range(blocks * BLOCK_TOKENS)))
    assert belief.known_tokens(other) == 3 * BLOCK_TOKENS
    assert belief.evicted_tokens(PrefixChain(range(20 * BLOCK_TOKENS))) == 0
    assert belief.evicted_tokens(PrefixChain([5] * BLOCK_TOKENS)) == 3 * BLOCK_TOKENS


def test_a_new_decoder_knows_nothing_and_a_smaller_one_less() -> None:
    belief = CacheBelief(3)
    chains = [PrefixChain([n] * BLOCK_TOKENS) for n in range(3)]
    for chain in chains:
        belief.hold(chain)
    belief.resize(1)
    assert [belief.known_tokens(chain) for chain in chains] == [0, 0, BLOCK_TOKENS]
    belief.forget()
    assert belief.known_tokens(chains[2]) == 0
