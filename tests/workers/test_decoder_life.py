"""Decoders that start slowly, badly, never, or again and again; and those that sleep until somebody wants them."""

import asyncio
import itertools
import signal

import pytest

from shm.board import WorkerState
from shm.orders import Wanted
from tests.fakes.echo import echo_prompt
from tests.fakes.stage import Stage
from tests.workers.running import ended, exact, running_pool, until
from workers.errors import DeadlineExceeded, NoWorkers

SEGV = int(signal.SIGSEGV)


async def test_a_start_that_reports_progress_is_not_killed_however_long_it_takes(stage: Stage) -> None:
    """B24."""
    slow = {"start_delay_s": 1.6, "load_steps": 16}
    async with running_pool(stage, worker={"start_limit_s": 0.6}, decoder=slow, is_awaited=False) as running:
        await until(lambda: running.replicas[0].state is WorkerState.LOADING, what="loading")
        await until(lambda: 20 < running.board().load_percent < 100, what="half way")
        assert "loading" in running.replicas[0].reason()
        assert not running.replicas[0].is_serving
        await running.serving()
        assert len(running.events("START")) == 1
        assert running.replicas[0].reason() == ""


async def test_a_start_that_is_silent_for_too_long_is_tried_again_until_one_works(stage: Stage) -> None:
    stage.script(rules=[{"when": {"start": [1, 2]}, "never_ready": True}])
    async with running_pool(stage, worker={"start_limit_s": 0.3}, is_awaited=False) as running:
        await running.serving()
        starts = running.events("START")
        assert len(starts) == 3
        assert all(after["time"] - before["time"] >= 0.3 for before, after in itertools.pairwise(starts))
        assert "not READY" in running.board_error()
        assert running.counters.worker_deaths == 0


async def test_chatter_on_stderr_counts_as_life_while_loading(stage: Stage) -> None:
    stage.script(start_stderr="loading tensors\n", start_delay_s=0.5)
    async with running_pool(stage, worker={"start_limit_s": 0.7}) as running:
        assert len(running.events("START")) == 1


async def test_deaths_in_a_row_make_it_fatal_and_it_recovers_by_itself(stage: Stage) -> None:
    """B42, B43: the delay grows, other workers go on, and nobody has to do anything."""
    stage.script(start_exit=3, start_stderr="no such model\n")
    async with running_pool(stage, worker={"deaths_limit": 3}, is_awaited=False) as running:
        await until(lambda: running.replicas[0].state is WorkerState.FATAL, what=lambda: repr(running.replicas))
        assert running.pool.snapshot().workers[0].is_cordoned
        assert "no such model" in running.replicas[0].reason()
        with pytest.raises(NoWorkers) as refused:
            running.submit(echo_prompt(1), 5)
        assert "no such model" in refused.value.reasons[0]
        assert refused.value.retry_after_s > 0
        starts = [event["time"] for event in running.events("START")]
        assert starts[1] - starts[0] >= 0.75 * 0.05
        assert starts[2] - starts[1] >= 0.75 * 0.1
        stage.script()
        await running.serving()
        await running.generate(echo_prompt(1), 5)
        assert running.counters.worker_deaths == 0
        assert running.board().decoder_deaths >= 3


async def test_brief_successes_do_not_stop_the_backoff_from_growing(stage: Stage) -> None:
    stage.script(crash_after_s=0.02, crash_signal=SEGV)
    async with running_pool(stage, worker={"deaths_limit": 4, "backoff_cap_s": 5.0}, is_awaited=False) as running:
        await until(lambda: running.replicas[0].state is WorkerState.FATAL, what="fatal")
        ready = [event["time"] for event in running.events("READY")]
        gaps = [after - before for before, after in itertools.pairwise(ready)]
        assert all(gap >= 0.75 * 0.05 * 2**deaths for deaths, gap in enumerate(gaps)), gaps
        assert len(gaps) == 3


async def test_a_command_that_does_not_exist_is_named_and_tried_again(stage: Stage) -> None:
    missing = {"decoder_command": ("/nowhere/decoder", "--x"), "deaths_limit": 2}
    async with running_pool(stage, worker=missing, is_awaited=False) as running:
        await until(lambda: running.replicas[0].state is WorkerState.FATAL, what="fatal")
        assert "/nowhere/decoder" in running.replicas[0].reason()
        assert running.board().decoder_deaths >= 2


async def test_a_dialect_that_is_not_spoken_is_named(stage: Stage) -> None:
    batch = {"slots": None, "info": {"batch_slots": 4}}
    async with running_pool(stage, decoder=batch, worker={"deaths_limit": 2}, is_awaited=False) as running:
        await until(lambda: running.replicas[0].state is WorkerState.FATAL, what="fatal")
        assert "batch" in running.replicas[0].reason()


async def test_a_decoder_that_closes_its_stdout_is_replaced(stage: Stage) -> None:
    shell = "printf 'INFO engine=sh\\nREADY 4096 stop slots=4\\n'; exec >&-; sleep 60"
    worker = {"decoder_command": ("/bin/sh", "-c", shell), "kill_grace_s": 0.2, "deaths_limit": 2}
    async with running_pool(stage, worker=worker, is_awaited=False) as running:
        await until(lambda: running.board().decoder_deaths >= 1, what="its end")
        assert "stdout" in running.board_error()


async def test_a_request_waits_for_a_worker_when_that_is_configured(stage: Stage) -> None:
    async with running_pool(
        stage, wait_for_workers_s=10.0, decoder={"start_delay_s": 0.3}, is_awaited=False
    ) as running:
        await running.generate(echo_prompt(1), 5)


async def test_a_request_that_waits_for_workers_in_vain_ends_at_that_limit(stage: Stage) -> None:
    async with running_pool(stage, wait_for_workers_s=0.2, decoder={"never_ready": True}, is_awaited=False) as running:
        turn = await ended(running.submit(echo_prompt(1), 5))
        assert isinstance(turn.error, DeadlineExceeded)


async def test_a_request_that_waited_for_workers_has_its_whole_deadline_once_they_serve(stage: Stage) -> None:
    slow = {"slots": 1, "start_delay_s": 0.2, "token_delay_s": 0.02}
    async with running_pool(stage, slots=1, wait_for_workers_s=0.8, decoder=slow, is_awaited=False) as running:
        first, second = running.submit(echo_prompt(1), 60), running.submit(echo_prompt(2), 3)
        await exact(first)
        assert first.ended_s is not None and first.ended_s - first.submitted_s > 0.8, (
            "the second must outwait the limit"
        )
        await exact(second)


async def test_without_a_worker_a_request_is_refused_at_once(stage: Stage) -> None:
    async with running_pool(stage, decoder={"start_delay_s": 0.3}, is_awaited=False) as running:
        with pytest.raises(NoWorkers):
            running.submit(echo_prompt(1), 5)
        assert not running.pool.is_ready
        await running.serving()
        assert running.pool.is_ready


async def test_an_idle_decoder_is_unloaded_and_loaded_once_for_many_requests(stage: Stage) -> None:
    """B81."""
    stage.script(start_delay_s=0.1)
    async with running_pool(stage, worker={"unload_idle_s": 0.3}) as running:
        await running.generate(echo_prompt(1), 5)
        await until(lambda: running.replicas[0].state is WorkerState.UNLOADED, what="unloaded")
        assert running.decoder_pid() == 0
        assert running.pool.is_ready, "it would serve a request"
        turns = [running.submit(echo_prompt(marker), 5) for marker in range(20)]
        for turn in turns:
            await exact(turn)
        assert len(running.events("START")) == 2
        assert running.counters.decoder_deaths == running.counters.worker_deaths == 0


async def test_a_sleeper_is_not_woken_while_another_worker_serves(stage: Stage) -> None:
    async with running_pool(stage, workers=2) as running:
        assert await running.pool.operations.unload(0)
        for marker in range(8):
            await running.generate(echo_prompt(marker), 5)
        assert running.replicas[0].state is WorkerState.UNLOADED


async def test_one_sleeper_is_woken_when_the_others_are_full(stage: Stage) -> None:
    async with running_pool(stage, workers=3, slots=1, decoder={"slots": 1, "token_delay_s": 0.01}) as running:
        await asyncio.gather(running.pool.operations.unload(0), running.pool.operations.unload(1))
        turns = [running.submit(echo_prompt(marker), 30) for marker in range(2)]
        for turn in turns:
            await exact(turn)
        await until(lambda: sorted(r.is_serving for r in running.replicas) == [False, True, True], what="one woken")
        assert len(running.events("START")) == 4


async def test_a_request_that_races_with_the_unloading_is_served(stage: Stage) -> None:
    """B81: the request comes at any moment after the decision to unload, also before the worker has heard of it."""
    async with running_pool(stage) as running:
        for round_ in range(40):
            running.replicas[0].want(Wanted.UNLOAD)
            if round_ % 2:
                for _ in range(round_ // 2):
                    await asyncio.sleep(0)
            else:
                await asyncio.sleep(round_ * 0.0005)
            turns = [running.submit(echo_prompt(100 * round_ + n), 3) for n in range(3)]
            for turn in turns:
                await exact(turn, 5.0)
        assert running.counters.failed == 0


async def test_requests_that_wait_for_a_decoder_that_can_not_be_loaded_are_told(stage: Stage) -> None:
    async with running_pool(stage) as running:
        await running.pool.operations.unload(0)
        stage.script(start_exit=4, start_stderr="the disk is gone\n")
        turns = [running.submit(echo_prompt(marker), 5) for marker in range(3)]
        for turn in turns:
            error = (await ended(turn)).error
            assert isinstance(error, NoWorkers)
            assert "the disk is gone" in error.reasons[0]
        stage.script()
        await running.serving()
        await running.generate(echo_prompt(9), 5)
