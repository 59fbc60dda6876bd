"""Answers through worker processes, shared memory and scripted decoders: exact, whoever else runs."""

import asyncio
import random
import time

import pytest

from tests.fakes.echo import echo_prompt, expected
from tests.fakes.stage import Stage
from tests.workers.running import ended, exact, running_pool, tokens, until
from workers.errors import PromptTooLong, RingfenceError, SlowClient, Unsupported
from workers.request import FinishReason
from workers.router import RUN


async def test_one_request_gets_its_tokens_and_its_own_figures(stage: Stage) -> None:
    async with running_pool(stage, decoder={"prefill_s": 0.02, "cached": 3}) as running:
        result = await running.generate(echo_prompt(7, 40), 25)
        assert (result.worker, result.moves, result.cached_tokens) == (0, 0, 3)
        assert result.prompt_ms >= 20
        assert result.queue_ms < 1000
        (gen,) = running.events("GEN")
        assert (gen["ids"], gen["max_new"]) == (echo_prompt(7, 40), 25)


async def test_64_mixed_requests_over_two_workers_and_the_smallest_ring_are_exact(stage: Stage) -> None:
    numbers = random.Random(1)
    async with running_pool(stage, workers=2, slots=4, ring_records=64, decoder={"burst": 20}) as running:
        turns = [
            running.submit(echo_prompt(marker, numbers.randrange(20, 300)), numbers.choice((1, 2, 30, 500, 2000)))
            for marker in range(64)
        ]
        cancelled = numbers.sample(turns, 12)

        async def leave(at: int, turn_index: int) -> None:
            turn = cancelled[turn_index]
            if turn.request.max_new > at:
                await tokens(turn, at)
            turn.cancel()

        await asyncio.gather(*(leave(numbers.randrange(1, 50), index) for index in range(12)))
        for turn in turns:
            await ended(turn)
            whole = expected(turn.request.prompt, turn.request.max_new)
            assert list(turn.ids) == whole[: len(turn.ids)], "a foreign token"
            assert turn.result is not None
            if turn.result.finish is not FinishReason.CANCEL:
                await exact(turn)
        await running.idle()
        assert {event["pid"] for event in running.events("GEN")} == {running.decoder_pid(0), running.decoder_pid(1)}
        assert running.board(0).parked == running.board(1).parked == 0


async def test_a_sampled_request_gets_a_seed_so_that_it_can_go_on_elsewhere(stage: Stage) -> None:
    async with running_pool(stage) as running:
        await running.generate(echo_prompt(1), 3, temperature=0.7)
        await running.generate(echo_prompt(1), 3, temperature=0.7, seed=99)
        await running.generate(echo_prompt(1), 3)
        keys = [event["keys"] for event in running.events("GEN")]
        assert int(keys[0]["seed"]) > 0
        assert keys[1]["seed"] == "99"
        assert keys[2] == {}


async def test_logprobs_and_alternatives_lie_beside_their_tokens(stage: Stage) -> None:
    async with running_pool(stage, ring_records=64, decoder={"burst": 10}) as running:
        turn = running.submit(echo_prompt(3), 40, logprobs=2)
        await exact(turn)
        assert len(turn.logprobs) == len(turn.alternatives) == 40
        for token, logprob, alternatives in zip(turn.ids, turn.logprobs, turn.alternatives, strict=True):
            assert round(logprob, 4) == -(token % 100 + 1) / 100
            assert [other for other, _ in alternatives] == [token, token + 1]


async def test_progress_through_the_prompt_is_told_before_the_first_token(stage: Stage) -> None:
    async with running_pool(stage, decoder={"prefill_s": 0.2, "prefill_every_s": 0.02}) as running:
        turn = running.submit(echo_prompt(3, 1000), 5)
        await until(lambda: 0 < turn.prefilled < 1000, what=lambda: repr(turn))
        assert list(turn.ids) == []
        await exact(turn)
        assert running.board().prefill_tokens > 0


async def test_a_decoder_of_the_solo_dialect_runs_one_request_after_the_other(stage: Stage) -> None:
    async with running_pool(stage, decoder={"slots": None}) as running:
        turns = [running.submit(echo_prompt(marker), 50) for marker in range(8)]
        for turn in turns:
            await exact(turn)
        events = [event["event"] for event in running.events("GEN", "END")]
        assert events == ["GEN", "END"] * 8


async def test_a_request_is_sent_to_the_worker_that_has_read_its_prefix(stage: Stage) -> None:
    conversation = echo_prompt(9, 640)
    async with running_pool(stage, workers=3, decoder={"prefix_cache": True}) as running:
        first = await running.generate(conversation, 5)
        for length in range(641, 645):
            again = await running.generate([*conversation, *range(100, 100 + length - 640)], 5)
            assert again.worker == first.worker
            assert again.cached_tokens >= 640
        others = [await running.generate(echo_prompt(50 + marker, 640), 5) for marker in range(3 * RUN)]
        assert {result.worker for result in others} == {0, 1, 2}


async def test_prompt_and_options_that_fit_no_slot_are_refused_before_a_worker_sees_them(stage: Stage) -> None:
    async with running_pool(stage, context=512) as running:
        with pytest.raises(PromptTooLong):
            running.submit(echo_prompt(1, 512), 1)
        with pytest.raises(RingfenceError):
            running.submit(echo_prompt(1), 1, grammar="x" * 70_000)
        for bad in ([], [-5], [10**12] * 400):
            with pytest.raises((ValueError, RingfenceError)):
                running.submit(bad, 1)
        await running.idle()
        assert running.pool.snapshot().counters.submitted == 0
        assert running.events("GEN") == []
        await running.generate(echo_prompt(1, 500), 5)


async def test_what_no_decoder_announced_is_refused_by_name(stage: Stage) -> None:
    async with running_pool(stage, decoder={"info": {"grammar": None, "logprobs": None}}) as running:
        for options, capability in (({"grammar": "root ::= [a]"}, "grammar"), ({"logprobs": 0}, "logprobs")):
            with pytest.raises(Unsupported) as refused:
                running.submit(echo_prompt(1), 1, **options)
            assert refused.value.capability == capability
        await running.idle()


async def test_a_server_that_stands_still_loses_no_token_of_a_decoder_that_goes_on(stage: Stage) -> None:
    async with running_pool(stage, ring_records=64, decoder={"burst": 10, "token_delay_s": 0.001}) as running:
        turns = [running.submit(echo_prompt(marker), 600) for marker in range(4)]
        await tokens(turns[0], 1)
        stand_still(0.4)
        assert running.board().parked > 0, "the ring is too small for what came meanwhile"
        for turn in turns:
            await exact(turn)
        assert running.board().parked == 0


async def test_a_server_that_stands_still_too_long_has_its_turns_stopped(stage: Stage) -> None:
    slow = {"burst": 10, "token_delay_s": 0.005}
    async with running_pool(stage, ring_records=64, worker={"stall_limit_s": 0.2}, decoder=slow) as running:
        turn = running.submit(echo_prompt(1), 4000)
        await tokens(turn, 1)
        stand_still(1.0)
        await ended(turn)
        assert isinstance(turn.error, SlowClient)
        assert list(turn.ids) == expected(echo_prompt(1), 4000)[: len(turn.ids)]
        await running.idle()
        assert running.counters.slow_clients == 1
        await running.generate(echo_prompt(2), 5)


def stand_still(seconds: float) -> None:
    """Block the event loop, as a fault of the server would."""
    time.sleep(seconds)
