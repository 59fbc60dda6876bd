"""Which worker a prompt goes to."""

from collections import Counter

from workers.prefix import BLOCK_TOKENS, CacheBelief, PrefixChain
from workers.router import LOAD_TOKENS, Candidate, Decision, choose


def prompt(first: int, blocks: int = 4) -> PrefixChain:
    return PrefixChain(list(range(first, first + blocks * BLOCK_TOKENS)))


def candidate(index: int, *held: PrefixChain, running: int = 0, last_used: int = 0, capacity: int = 4) -> Candidate:
    belief = CacheBelief(capacity)
    for chain in held:
        belief.hold(chain)
    return Candidate(index, running, last_used, belief)


def test_nobody_is_chosen_from_nobody() -> None:
    assert choose(prompt(0), []) is None


def test_the_worker_that_holds_the_prefix_is_chosen_and_what_it_holds_is_told() -> None:
    decision = choose(prompt(0), [candidate(0), candidate(1, prompt(0)), candidate(2)])
    assert decision == Decision(1, 4 * BLOCK_TOKENS)


def test_the_longer_prefix_wins() -> None:
    assert choose(prompt(0, 8), [candidate(0, prompt(0, 2)), candidate(1, prompt(0, 5))]) == Decision(1, 320)


def test_a_prefix_held_by_a_worker_that_is_no_candidate_attracts_nothing() -> None:
    holder = candidate(0, prompt(0))
    assert choose(prompt(0), [candidate(1), candidate(2)]) == Decision(1, 0)
    assert holder.belief.known_tokens(prompt(0)) == 256


def test_a_prefix_outweighs_a_little_load_and_not_much_load() -> None:
    held = prompt(0, 4)
    light = candidate(0, held, running=3)
    heavy = candidate(0, held, running=held.tokens // LOAD_TOKENS + 1)
    assert choose(held, [light, candidate(1)]) == Decision(0, 256)
    assert choose(held, [heavy, candidate(1)]) == Decision(1, 0)


def test_the_less_loaded_worker_wins_among_equals() -> None:
    assert choose(prompt(0), [candidate(0, running=2), candidate(1, running=1)]) == Decision(1, 0)


def test_a_worker_with_room_in_its_cache_is_spared_another_conversation() -> None:
    full = candidate(0, prompt(1000), capacity=1)
    roomy = candidate(1, prompt(2000), capacity=2)
    assert choose(prompt(0), [full, roomy]) == Decision(1, 0)


def test_the_shorter_conversation_is_pushed_out() -> None:
    long, short = candidate(0, prompt(1000, 30), capacity=1), candidate(1, prompt(2000, 2), capacity=1)
    assert choose(prompt(0), [long, short]) == Decision(1, 0)


def test_going_on_with_a_held_conversation_pushes_nothing_out() -> None:
    full = candidate(0, prompt(0), capacity=1)
    assert choose(prompt(0, 5), [full, candidate(1)]) == Decision(0, 256)


def test_equal_workers_take_turns() -> None:
    last_used = [0, 0, 0]
    chosen = []
    for hand_over in range(1, 10):
        decision = choose(PrefixChain([1, 2, 3]), [candidate(i, last_used=last_used[i]) for i in range(3)])
        assert decision is not None
        last_used[decision.index] = hand_over
        chosen.append(decision.index)
    assert chosen == [0, 1, 2] * 3
    assert Counter(chosen) == {0: 3, 1: 3, 2: 3}


def test_the_decision_does_not_depend_on_the_order_of_candidates() -> None:
    candidates = [candidate(0, running=1), candidate(1, prompt(0, 2)), candidate(2, last_used=5)]
    assert choose(prompt(0), candidates) == choose(prompt(0), reversed(candidates))
