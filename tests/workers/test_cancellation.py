"""Turns that their callers give up: queued, running, at any moment, with STOPs late, lost or ignored."""

import asyncio

import pytest

from tests.fakes.echo import echo_prompt, expected
from tests.fakes.stage import Stage
from tests.workers.running import ended, exact, running_pool, tokens, until
from workers.errors import DeadlineExceeded
from workers.request import FinishReason


@pytest.mark.parametrize("slots", [1, 2])
async def test_a_cancelled_requests_late_tokens_never_reach_the_next_one(stage: Stage, slots: int) -> None:
    """B03: STOP is answered late, tokens go on meanwhile, and the next request wants the same slot."""
    stage.script(token_delay_s=0.001, rules=[{"when": {"marker": list(range(50))}, "stop_delay_s": 0.02}])
    async with running_pool(stage, slots=slots, decoder={"slots": slots}) as running:
        for marker in range(50):
            first = running.submit(echo_prompt(marker), 2000)
            await tokens(first, 1)
            first.cancel()
            second = running.submit(echo_prompt(1000 + marker), 8)
            await exact(second)
            await ended(first)
            assert first.result is not None
            assert first.result.finish is FinishReason.CANCEL
            assert list(first.ids) == expected(echo_prompt(marker), 2000)[: len(first.ids)]
        await running.idle()
        assert running.counters.cancelled == 50
        assert running.counters.completed == 50
        assert len(running.events("STOP")) == 50


async def test_tokens_and_ends_of_turns_that_are_over_are_counted_and_dropped(stage: Stage) -> None:
    late = ["T 5 #{rid}", "PP 1 2 3 4 #{rid}", "DONE 1 1 1 1 stop #{rid}", "ERR too late #{rid}", "T 6 #{rid}"]
    stage.script(lines_after=late)
    async with running_pool(stage, slots=1) as running:
        for marker in range(5):
            await running.generate(echo_prompt(marker), 10)
        await until(lambda: running.board().stale == 25, what=lambda: str(running.board()))
        assert running.board().decoder_incarnation == 1


async def test_cancelling_a_queued_request_never_touches_the_running_one(stage: Stage) -> None:
    """B04."""
    async with running_pool(stage, slots=1, decoder={"slots": 1, "token_delay_s": 0.001}) as running:
        first = running.submit(echo_prompt(1), 300)
        await tokens(first, 1)
        for marker in range(2, 12):
            queued = running.submit(echo_prompt(marker), 5)
            assert running.pool.snapshot().queue.requests == 1
            queued.cancel()
            assert queued.has_ended
            assert running.pool.snapshot().queue.requests == 0
        await exact(first)
        await running.idle()
        assert running.events("STOP") == []
        assert len(running.events("GEN")) == 1


async def test_queued_requests_that_were_given_up_never_reach_a_decoder(stage: Stage) -> None:
    """B13."""
    async with running_pool(stage, slots=1, decoder={"slots": 1, "token_delay_s": 0.001}) as running:
        first = running.submit(echo_prompt(1), 200)
        queued = [running.submit(echo_prompt(marker), 5) for marker in range(2, 52)]
        for turn in queued[:-1]:
            turn.cancel()
        assert running.pool.snapshot().queue.requests == 1
        await exact(first)
        await exact(queued[-1])
        gens = running.events("GEN")
        assert [gen["ids"] for gen in gens] == [echo_prompt(1), echo_prompt(51)]
        assert gens[1]["time"] - running.events("END")[0]["time"] < 1.0


async def test_a_queued_request_whose_deadline_passes_never_reaches_a_decoder(stage: Stage) -> None:
    async with running_pool(stage, slots=1, decoder={"slots": 1, "token_delay_s": 0.002}) as running:
        first = running.submit(echo_prompt(1), 200)
        queued = running.submit(echo_prompt(2), 5, deadline_s=0.1)
        await ended(queued)
        assert isinstance(queued.error, DeadlineExceeded)
        assert queued.error.waited_s > 0.09
        await exact(first)
        assert len(running.events("GEN")) == 1
        assert running.counters.expired == 1


async def test_a_deadline_does_not_end_a_request_that_runs(stage: Stage) -> None:
    async with running_pool(stage, decoder={"token_delay_s": 0.01}) as running:
        await exact(running.submit(echo_prompt(1), 30, deadline_s=0.1))


async def test_a_stop_that_was_lost_is_sent_again_until_the_turn_ends(stage: Stage) -> None:
    stage.script(token_delay_s=0.002, lose_stops=2)
    async with running_pool(stage, worker={"stop_grace_s": 0.05}) as running:
        turn = running.submit(echo_prompt(1), 4000)
        await tokens(turn, 1)
        turn.cancel()
        await ended(turn)
        assert len(running.events("STOP")) == 3
        assert running.board().stops_resent == 2
        await running.idle()


async def test_a_decoder_that_ignores_stop_costs_its_slot_until_the_turn_has_ended_by_itself(stage: Stage) -> None:
    stage.script(token_delay_s=0.001, rules=[{"when": {"marker": 1}, "ignore_stop": True}])
    async with running_pool(stage, slots=1, decoder={"slots": 1}) as running:
        turn = running.submit(echo_prompt(1), 100)
        await tokens(turn, 1)
        turn.cancel()
        following = running.submit(echo_prompt(2), 5)
        await exact(following)
        await ended(turn)
        assert turn.result is not None
        assert turn.result.finish is FinishReason.CANCEL
        assert len(turn.ids) < 100, "a caller that has left gets nothing more"


async def test_a_cancel_during_prefill_stops_it(stage: Stage) -> None:
    async with running_pool(stage, decoder={"prefill_s": 60.0}) as running:
        turn = running.submit(echo_prompt(1), 10)
        await until(lambda: running.events("GEN"), what="the GEN")
        turn.cancel()
        await ended(turn, 2.0)
        assert [event["sent"] for event in running.events("STOP")] == [0]
        assert list(turn.ids) == []


async def test_a_cancel_at_the_same_moment_as_the_submission_writes_stop_after_gen(stage: Stage) -> None:
    async with running_pool(stage, decoder={"token_delay_s": 0.001}) as running:
        turns = [running.submit(echo_prompt(marker), 4000) for marker in range(4)]
        for turn in turns:
            turn.cancel()
        for turn in turns:
            await ended(turn, 5.0)
        await running.idle()
        assert len(running.events("GEN")) == 4
        await until(lambda: len(running.events("END")) == 4, what="an end of each")


async def test_a_cancel_after_the_end_and_a_second_one_do_nothing(stage: Stage) -> None:
    async with running_pool(stage) as running:
        turn = running.submit(echo_prompt(1), 5)
        await exact(turn)
        turn.cancel()
        turn.cancel()
        await running.generate(echo_prompt(2), 5)
        assert running.events("STOP") == []
        assert running.counters.cancelled == 0


async def test_a_turn_that_was_given_up_does_not_go_on_after_its_decoders_death(stage: Stage) -> None:
    stage.script(token_delay_s=0.005, ignore_stop=True, rules=[{"when": {"gen": 1, "start": 1}, "crash_at": 40}])
    async with running_pool(stage) as running:
        turn = running.submit(echo_prompt(1), 1000)
        await tokens(turn, 1)
        turn.cancel()
        await ended(turn)
        assert turn.result is not None
        assert turn.result.finish is FinishReason.CANCEL
        await running.serving()
        await running.generate(echo_prompt(2), 3)
        assert len(running.events("GEN")) == 2


async def test_cancelling_hundreds_at_once_frees_every_slot(stage: Stage) -> None:
    """B11, short form."""
    async with running_pool(stage, workers=2, decoder={"token_delay_s": 0.001}) as running:
        for burst in range(5):
            turns = [running.submit(echo_prompt(burst * 100 + n), 1000) for n in range(60)]
            await asyncio.gather(*(tokens(turn, 2) for turn in turns[:8]))
            for turn in turns:
                turn.cancel()
            for turn in turns:
                await ended(turn)
            await running.idle()
        await running.generate(echo_prompt(9999), 20)
        assert running.counters.cancelled == 300
