"""Requests whose worker or decoder dies or hangs go on elsewhere, token for token as if nothing had happened."""

import signal
import time
from typing import Any

import pytest

from tests.fakes.echo import echo_prompt, echo_token, expected
from tests.fakes.stage import Stage
from tests.workers.running import ended, exact, kill, running_pool, tokens, until
from workers.request import FinishReason

QUICK: dict[str, Any] = {"hang_limit_s": 0.6}
SEGV = signal.SIGSEGV


@pytest.mark.parametrize(("workers", "at"), [(1, 0), (1, 1), (2, 17), (2, 39)])
async def test_a_decoder_that_crashes_at_any_token_costs_no_token(stage: Stage, workers: int, at: int) -> None:
    stage.script(crash_signal=SEGV, rules=[{"when": {"start": 1, "gen": 1, "resumed": False}, "crash_at": at}])
    async with running_pool(stage, workers=workers) as running:
        prompt = echo_prompt(7)
        result = await exact(running.submit(prompt, 40))
        assert result.moves == 1
        first, second = running.events("GEN")
        assert second["ids"] == [*prompt, *expected(prompt, 40)[:at]]
        assert second["max_new"] == 40 - at
        assert second["keys"].get("resume", "0") == str(at)
        assert first["pid"] != second["pid"]
        await running.serving()
        assert (running.counters.decoder_deaths, running.counters.moved) == (1, 1)


async def test_a_decoder_that_dies_between_the_last_token_and_its_done_owes_nothing(stage: Stage) -> None:
    stage.script(crash_signal=SEGV)
    async with running_pool(stage) as running:
        result = await exact(running.submit(echo_prompt(7, crash_at=10), 10))
        assert result.moves == 0
        assert len(running.events("GEN")) == 1


async def test_an_end_token_that_was_received_ends_the_turn_though_its_decoder_died(stage: Stage) -> None:
    end = echo_token(7, 4)
    stage.script(crash_signal=SEGV)
    async with running_pool(stage, end_ids=(end,)) as running:
        turn = await ended(running.submit(echo_prompt(7, crash_at=5), 10))
        assert turn.result is not None
        assert (turn.result.finish, turn.ids[-1], len(turn.ids)) == (FinishReason.STOP, end, 5)


async def test_seed_and_options_go_on_with_the_request(stage: Stage) -> None:
    stage.script(crash_signal=SEGV)
    async with running_pool(stage, workers=2) as running:
        await exact(running.submit(echo_prompt(7, crash_at=5, fresh_only=1), 20, temperature=0.9, top_k=30))
        first, second = (dict(event["keys"]) for event in running.events("GEN"))
        assert second.pop("resume") == "5"
        assert first == second
        assert int(first["seed"]) > 0


async def test_a_killed_worker_continues_its_streams_on_a_sibling(stage: Stage) -> None:
    async with running_pool(stage, workers=2, decoder={"token_delay_s": 0.002}) as running:
        turns = [running.submit(echo_prompt(marker), 150) for marker in range(8)]
        for turn in turns:
            await tokens(turn, 20)
        victim = running.pid(0)
        kill(victim)
        results = [await exact(turn) for turn in turns]
        assert sorted(result.moves for result in results) == [0] * 4 + [1] * 4
        await running.serving()
        assert running.pid(0) != victim
        assert running.counters.worker_deaths == 1
        await running.idle()


async def test_a_killed_decoder_continues_its_streams_on_a_sibling_and_keeps_its_worker(stage: Stage) -> None:
    async with running_pool(stage, workers=2, decoder={"token_delay_s": 0.002}) as running:
        turns = [running.submit(echo_prompt(marker), 150) for marker in range(8)]
        for turn in turns:
            await tokens(turn, 20)
        worker, victim = running.pid(0), running.decoder_pid(0)
        kill(victim)
        for turn in turns:
            await exact(turn)
        await running.serving()
        assert running.pid(0) == worker
        assert running.decoder_pid(0) != victim
        assert (running.counters.worker_deaths, running.counters.decoder_deaths) == (0, 1)


async def test_the_only_worker_killed_again_and_again_still_delivers_every_token(stage: Stage) -> None:
    async with running_pool(stage, decoder={"token_delay_s": 0.002}) as running:
        turns = [running.submit(echo_prompt(marker), 200) for marker in range(4)]
        for round_ in range(1, 4):
            await tokens(turns[0], 40 * round_)
            await running.serving()
            kill(running.pid() if round_ % 2 else running.decoder_pid())
        for turn in turns:
            await exact(turn)
            assert turn.moves == 3
        assert running.counters.generated_tokens == 800


async def test_queued_requests_are_not_lost_to_a_death(stage: Stage) -> None:
    async with running_pool(stage, slots=1, decoder={"slots": 1, "token_delay_s": 0.001}) as running:
        turns = [running.submit(echo_prompt(marker), 20) for marker in range(6)]
        await tokens(turns[0], 1)
        kill(running.pid())
        for turn in turns:
            await exact(turn)
        order = [echo["ids"][:9] for echo in running.events("GEN")]
        assert order == [echo_prompt(marker) for marker in (0, 0, 1, 2, 3, 4, 5)]


@pytest.mark.parametrize("happening", ["hang_at", "stall_at", "half_line_at"])
async def test_a_decoder_that_goes_silent_in_a_turn_is_replaced_and_the_turn_goes_on(
    stage: Stage, happening: str
) -> None:
    stage.script(half_line_then="hang", token_delay_s=0.001)
    async with running_pool(stage, worker=QUICK) as running:
        silent = running.submit(echo_prompt(7, fresh_only=1, **{happening: 5}), 40)
        beside = [running.submit(echo_prompt(marker), 40) for marker in range(8, 10)]
        for turn in (silent, *beside):
            await exact(turn)
        assert silent.moves == 1
        await running.serving()
        assert running.board().decoder_incarnation == 2
        assert "no progress" in running.board_error()
        assert running.counters.worker_deaths == 0


async def test_a_decoder_that_spins_is_replaced_by_its_silence_and_not_spared_for_its_cpu_time(stage: Stage) -> None:
    async with running_pool(stage, worker=QUICK) as running:
        result = await exact(running.submit(echo_prompt(7, spin_at=5, fresh_only=1), 40))
        assert result.moves == 1


async def test_silence_after_a_token_is_not_granted_the_time_of_a_long_prompt(stage: Stage) -> None:
    async with running_pool(stage, worker={**QUICK, "prefill_rate": 50.0}) as running:
        began_s = time.monotonic()
        await exact(running.submit(echo_prompt(7, 1000, stall_at=3, fresh_only=1), 10))
        assert time.monotonic() - began_s < 10.0, "the prompt alone would be granted 20 s"


async def test_a_prefill_that_shows_progress_is_not_taken_for_a_hang(stage: Stage) -> None:
    stage.script(prefill_s=1.5, prefill_every_s=0.1)
    async with running_pool(stage, worker=QUICK) as running:
        result = await exact(running.submit(echo_prompt(7, 30), 5))
        assert result.moves == 0


async def test_a_silent_prefill_is_granted_time_for_its_prompt(stage: Stage) -> None:
    stage.script(prefill_s=1.3)
    async with running_pool(stage, worker={**QUICK, "prefill_rate": 500.0}) as running:
        assert (await exact(running.submit(echo_prompt(7, 1000), 5))).moves == 0


async def test_an_idle_worker_is_never_taken_for_hung(stage: Stage) -> None:
    async with running_pool(stage, worker={"hang_limit_s": 0.1}) as running:
        heartbeat = running.board().heartbeat_ns
        await until(lambda: running.board().heartbeat_ns > heartbeat + 1_500_000_000, what="ticks")
        await running.generate(echo_prompt(1), 5)
        assert running.counters.worker_deaths == running.counters.decoder_deaths == 0


@pytest.mark.parametrize("what", ["worker", "decoder"])
async def test_a_stopped_process_is_replaced_and_its_streams_go_on(stage: Stage, what: str) -> None:
    async with running_pool(stage, workers=2, decoder={"token_delay_s": 0.002}) as running:
        turns = [running.submit(echo_prompt(marker), 100) for marker in range(8)]
        for turn in turns:
            await tokens(turn, 5)
        worker = running.pid(0)
        victim = worker if what == "worker" else running.decoder_pid(0)
        kill(victim, signal.SIGSTOP)
        for turn in turns:
            await exact(turn)
        await running.serving()
        assert (running.pid(0) == worker) is (what == "decoder")
        assert running.processes().isdisjoint({victim})


async def test_half_a_line_before_the_end_of_a_decoder_is_no_token(stage: Stage) -> None:
    stage.script(half_line_then="exit", crash_signal=SEGV)
    async with running_pool(stage) as running:
        result = await exact(running.submit(echo_prompt(7, half_line_at=6, fresh_only=1), 20))
        assert result.moves == 1
        assert running.events("GEN")[1]["max_new"] == 14


async def test_a_request_too_long_to_go_on_ends_with_what_happened(stage: Stage) -> None:
    stage.script(crash_signal=SEGV)
    async with running_pool(stage, context=64, decoder={"context": 4096}) as running:
        turn = await ended(running.submit(echo_prompt(7, 50, crash_at=20), 30))
        assert type(turn.error).__name__ == "WorkerLost"
        assert "SIGSEGV" in str(turn.error)
