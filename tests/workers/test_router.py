"""Which worker a prompt goes to."""

from dataclasses import dataclass

from workers.prefix import BLOCK_TOKENS, CacheBelief, PrefixChain
from workers.router import LOAD_TOKENS
from workers.router import choose as choose_from


@dataclass
class Worker:
    index: int
    running: int
    last_run: int
    belief: CacheBelief


@dataclass(frozen=True)
class Decision:
    index: int
    known_tokens: int


def choose(chain: PrefixChain, workers: list[Worker]) -> Decision:
    worker, known_tokens = choose_from(chain, workers)
    return Decision(worker.index, known_tokens)


def prompt(first: int, blocks: int = 4) -> PrefixChain:
    return PrefixChain(list(range(first, first + blocks * BLOCK_TOKENS)))


def candidate(index: int, *held: PrefixChain, running: int = 0, last_run: int = 0, capacity: int = 4) -> Worker:
    belief = CacheBelief(capacity)
    for chain in held:
        belief.hold(chain)
    return Worker(index, running, last_run, belief)


def test_the_worker_that_holds_the_prefix_is_chosen_and_what_it_holds_is_told() -> None:
    decision = choose(prompt(0), [candidate(0), candidate(1, prompt(0)), candidate(2)])
    assert decision == Decision(1, 4 * BLOCK_TOKENS)


def test_the_longer_prefix_wins() -> None:
    assert choose(prompt(0, 8), [candidate(0, prompt(0, 2)), candidate(1, prompt(0, 5))]) == Decision(1, 320)


def test_a_prefix_held_by_a_worker_that_is_no_candidate_attracts_nothing() -> None:
    holder = candidate(0, prompt(0))
    assert choose(prompt(0), [candidate(1), candidate(2)]) == Decision(1, 0)
    assert holder.belief.weigh(prompt(0)) == (256, 0)


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


def test_of_equal_workers_the_one_whose_run_ended_longest_ago_is_chosen() -> None:
    workers = [candidate(0, last_run=24), candidate(1, last_run=8), candidate(2, last_run=16)]
    assert choose(PrefixChain([1, 2, 3]), workers) == Decision(1, 0)


def test_the_decision_does_not_depend_on_the_order_of_candidates() -> None:
    candidates = [candidate(0, running=1), candidate(1, prompt(0, 2)), candidate(2, last_run=5)]
    assert choose(prompt(0), candidates) == choose(prompt(0), candidates[::-1])
