"""Bounds of the queue, and what those beyond them are told."""

import time

import pytest

from tests.fakes.echo import echo_prompt
from tests.fakes.stage import Stage
from tests.workers.running import ended, exact, request, running_pool, until
from workers.errors import Overloaded, PromptTooLong
from workers.turn import Turn


async def test_exactly_capacity_runs_the_limit_waits_and_the_rest_is_refused_at_once(stage: Stage) -> None:
    """B53."""
    capacity, limit = 2, 5
    async with running_pool(stage, slots=capacity, queue_requests=limit, decoder={"token_delay_s": 0.005}) as running:
        accepted: list[Turn] = []
        refused: list[Overloaded] = []
        slowest_s = 0.0
        for marker in range(50 * (capacity + limit)):
            began_s = time.monotonic()
            try:
                accepted.append(running.submit(echo_prompt(marker), 20))
            except Overloaded as error:
                refused.append(error)
                slowest_s = max(slowest_s, time.monotonic() - began_s)
        assert len(accepted) == capacity + limit
        assert (running.pool.running, running.pool.snapshot().queue.requests) == (capacity, limit)
        assert {(error.bound, error.limit) for error in refused} == {("requests", limit)}
        assert all(error.retry_after_s > 0 for error in refused)
        assert slowest_s < 0.1
        for turn in accepted:
            await exact(turn)
        assert len(running.events("GEN")) == capacity + limit
        assert running.counters.rejected == len(refused)
        await running.idle()
        await running.generate(echo_prompt(1), 5)


async def test_waiting_prompts_are_bounded_by_their_tokens(stage: Stage) -> None:
    async with running_pool(stage, slots=1, queue_tokens=1000, decoder={"slots": 1, "token_delay_s": 0.01}) as running:
        running_turn = running.submit(echo_prompt(1), 20)
        waiting = [running.submit(echo_prompt(marker, 300), 2) for marker in range(2, 5)]
        with pytest.raises(Overloaded) as refused:
            running.submit(echo_prompt(9, 300), 2)
        assert (refused.value.bound, refused.value.limit) == ("prompt tokens", 1000)
        assert running.pool.snapshot().queue.tokens == 900
        for turn in (running_turn, *waiting):
            await exact(turn)
        assert running.pool.snapshot().queue.tokens == 0
        await exact(running.submit(echo_prompt(9, 300), 2))


async def test_a_reserved_place_counts_until_it_is_used_or_given_back(stage: Stage) -> None:
    async with running_pool(stage, slots=1, queue_requests=1, decoder={"slots": 1}) as running:
        first, second = (running.pool.reserve(prompt_tokens=10) for _ in range(2))
        with pytest.raises(Overloaded):
            running.pool.reserve(prompt_tokens=10)
        first.release()
        third = running.pool.reserve(prompt_tokens=10)
        turns = [running.pool.submit(request(echo_prompt(n), 5), place) for n, place in enumerate((second, third))]
        assert running.pool.snapshot().queue.reserved == 0
        for turn in turns:
            await exact(turn)


async def test_a_place_is_given_back_when_the_request_turns_out_to_be_impossible(stage: Stage) -> None:
    async with running_pool(stage, queue_requests=1, context=64) as running:
        for _ in range(20):
            place = running.pool.reserve(prompt_tokens=10)
            with pytest.raises(PromptTooLong):
                running.pool.submit(request(echo_prompt(1, 100), 5), place)
            assert not place.is_held
        assert running.pool.snapshot().queue.reserved == 0


async def test_retry_after_follows_the_rate_at_which_requests_ended(stage: Stage) -> None:
    async with running_pool(stage, slots=1, queue_requests=8, decoder={"slots": 1, "token_delay_s": 0.02}) as running:
        assert running.pool.retry_after_s() == 1.0
        turns = [running.submit(echo_prompt(marker), 10) for marker in range(9)]
        await ended(turns[3])
        with pytest.raises(Overloaded) as refused:
            for marker in range(20):
                running.submit(echo_prompt(100 + marker), 10)
        assert 1.0 <= refused.value.retry_after_s <= 120.0
        assert refused.value.retry_after_s > 8 * 0.2 * 0.5, "eight before it, 0.2 s each"
        for turn in turns:
            await exact(turn)


async def test_a_worker_that_is_full_while_its_decoder_dies_lends_no_negative_room(stage: Stage) -> None:
    hang = {"hang_limit_s": 0.5}
    async with running_pool(stage, slots=4, queue_requests=1, worker=hang, decoder={"token_delay_s": 0.002}) as running:
        turns = [running.submit(echo_prompt(marker, stall_at=3, fresh_only=1), 30) for marker in range(4)]
        seen: set[int] = set()

        def has_moved() -> bool:
            seen.add(running.replicas[0].free_capacity)
            return turns[0].moves > 0

        await until(has_moved, what="a replaced decoder")
        assert min(seen) == 0
        for turn in turns:
            await exact(turn)


async def test_failures_of_every_kind_give_their_place_back(stage: Stage) -> None:
    """B17."""
    stage.script(
        token_delay_s=0.002,
        rules=[
            {"when": {"marker": 1}, "error": "bad grammar"},
            {"when": {"marker": 2}, "error": "device error"},
            {"when": {"marker": 3}, "nonfinite_at": 2},
        ],
    )
    async with running_pool(stage, slots=2, queue_requests=6) as running:
        for round_ in range(3):
            turns = [running.submit(echo_prompt(1 + (n + round_) % 5), 10, deadline_s=30.0) for n in range(8)]
            with pytest.raises(Overloaded):
                running.submit(echo_prompt(9), 10)
            turns[-1].cancel()
            turns[0].cancel()
            for turn in turns:
                await ended(turn)
            await running.serving()
            await running.idle()
        turns = [running.submit(echo_prompt(10 + n), 5) for n in range(8)]
        for turn in turns:
            await exact(turn)
