"""What operators ask of a running pool, and what stopping it means."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

import pytest

from shm.board import WorkerState
from tests.fakes.echo import echo_prompt
from tests.fakes.stage import Stage
from tests.workers.running import Running, ended, exact, kill, running_pool, tokens, until
from workers.errors import NoWorkers, ShuttingDown
from workers.router import RUN


@contextlib.asynccontextmanager
async def under_load(running: Running, clients: int = 4) -> AsyncIterator[list[int]]:
    """Clients that ask one thing after the other, each checked; the list counts what was answered."""
    answered = [0]
    is_over = False

    async def client(number: int) -> None:
        marker = number * 10_000
        while not is_over:
            marker += 1
            await running.generate(echo_prompt(marker), 20)
            answered[0] += 1

    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    yield answered
    is_over = True
    await asyncio.gather(*tasks)


async def test_restarting_one_worker_replaces_process_and_decoder_and_fails_no_request(stage: Stage) -> None:
    async with running_pool(stage, workers=2, decoder={"token_delay_s": 0.002}) as running:
        async with under_load(running):
            before = running.pid(0), running.decoder_pid(0), running.pid(1)
            assert await running.pool.operations.restart(0)
            assert running.pid(0) != before[0]
            assert running.decoder_pid(0) != before[1]
            assert running.pid(1) == before[2]
        assert running.counters.moved == 0
        assert running.counters.failed == 0
        assert running.replicas[0].supervisor.restarts == 1
        assert running.counters.worker_deaths == running.counters.decoder_deaths == 0


async def test_a_rolling_restart_under_load_fails_no_request(stage: Stage) -> None:
    async with running_pool(stage, workers=3, decoder={"token_delay_s": 0.002}) as running:
        before = [running.pid(worker) for worker in range(3)]
        async with under_load(running) as answered:
            assert await running.pool.operations.restart_all()
            assert answered[0] > 0
        assert set(before).isdisjoint(running.pid(worker) for worker in range(3))
        assert running.counters.failed == 0
        await running.idle()


async def test_draining_gives_nothing_new_finishes_what_runs_and_resuming_ends_it(stage: Stage) -> None:
    async with running_pool(stage, workers=2, decoder={"token_delay_s": 0.005}) as running:
        turn = running.submit(echo_prompt(1), 60)
        await tokens(turn, 1)
        assert turn.worker is not None
        drain = asyncio.create_task(running.pool.operations.drain(turn.worker))
        await until(lambda: running.replicas[turn.worker or 0].state is WorkerState.DRAINING, what="draining")
        others = [await running.generate(echo_prompt(marker), 3) for marker in range(10, 14)]
        assert {result.worker for result in others} == {1 - turn.worker}
        assert not drain.done()
        await exact(turn)
        assert await drain
        assert await running.pool.operations.resume(turn.worker)
        assert {(await running.generate(echo_prompt(marker), 3)).worker for marker in range(20, 20 + 2 * RUN)} == {0, 1}


async def test_a_cordoned_worker_gets_nothing_until_it_is_uncordoned(stage: Stage) -> None:
    async with running_pool(stage, workers=2) as running:
        await running.pool.operations.cordon(0)
        assert {(await running.generate(echo_prompt(marker), 3)).worker for marker in range(6)} == {1}
        assert "cordoned" in running.replicas[0].reason()
        await running.pool.operations.cordon(1)
        with pytest.raises(NoWorkers):
            running.submit(echo_prompt(1), 3)
        assert await running.pool.operations.uncordon(0)
        assert (await running.generate(echo_prompt(9), 3)).worker == 0


async def test_what_waits_goes_to_the_worker_that_is_resumed(stage: Stage) -> None:
    async with running_pool(stage, workers=2, slots=1, decoder={"slots": 1, "token_delay_s": 0.01}) as running:
        await running.pool.operations.cordon(1)
        long, waiting = running.submit(echo_prompt(1), 100), running.submit(echo_prompt(2), 3)
        await running.pool.operations.uncordon(1)
        assert (await exact(waiting)).worker == 1
        assert not long.has_ended


async def test_uncordoning_a_failed_worker_starts_it_at_once(stage: Stage) -> None:
    stage.script(start_exit=3)
    slow = {"deaths_limit": 1, "backoff_first_s": 60.0, "backoff_cap_s": 60.0}
    async with running_pool(stage, worker=slow, is_awaited=False) as running:
        await until(lambda: running.replicas[0].state is WorkerState.FATAL, what="fatal")
        stage.script()
        await running.pool.operations.uncordon(0)
        await running.serving(timeout_s=5.0)


async def test_unloading_frees_the_decoder_and_loading_brings_it_back(stage: Stage) -> None:
    async with running_pool(stage, workers=2, decoder={"token_delay_s": 0.002}) as running:
        async with under_load(running):
            assert await running.pool.operations.unload(0)
            assert running.decoder_pid(0) == 0
            assert await running.pool.operations.load(0)
        assert running.counters.failed == running.counters.moved == 0
        assert len(running.events("START", worker=0)) == 2


async def test_loading_what_is_loaded_and_unloading_what_is_not_do_nothing(stage: Stage) -> None:
    async with running_pool(stage, workers=2) as running:
        for _ in range(3):
            assert await running.pool.operations.load(0)
        for _ in range(3):
            assert await running.pool.operations.unload(1)
        assert await running.pool.operations.load(1)
        await running.generate(echo_prompt(1), 3)
        assert len(running.events("START")) == 3


async def test_a_sleeping_worker_can_be_restarted(stage: Stage) -> None:
    async with running_pool(stage) as running:
        await running.pool.operations.unload(0)
        assert await running.pool.operations.restart(0)
        await running.generate(echo_prompt(1), 3)


async def test_a_worker_that_is_not_there_is_an_index_error(stage: Stage) -> None:
    async with running_pool(stage) as running:
        for index in (-1, 1):
            with pytest.raises(IndexError):
                await running.pool.operations.cordon(index)


async def test_stopping_drains_what_runs_and_what_waits(stage: Stage) -> None:
    async with running_pool(stage, slots=1, decoder={"slots": 1, "token_delay_s": 0.002}) as running:
        turns = [running.submit(echo_prompt(marker), 20) for marker in range(5)]
        await running.pool.stop(drain_s=10.0)
        for turn in turns:
            await exact(turn, 0.1)
        with pytest.raises(ShuttingDown):
            running.submit(echo_prompt(1), 3)


async def test_stopping_ends_what_does_not_finish_within_the_drain_limit(stage: Stage) -> None:
    async with running_pool(stage, slots=1, decoder={"slots": 1, "token_delay_s": 0.01}) as running:
        turns = [running.submit(echo_prompt(marker), 3000) for marker in range(3)]
        await tokens(turns[0], 1)
        await running.pool.stop(drain_s=0.2)
        assert [type(turn.error) for turn in turns] == [ShuttingDown] * 3
        assert running.pool.incidents() == []
        assert len(running.events("GEN")) == 1


async def test_a_second_stop_ends_a_drain_at_once(stage: Stage) -> None:
    async with running_pool(stage, decoder={"token_delay_s": 0.01}) as running:
        turn = running.submit(echo_prompt(1), 3000)
        stopping = asyncio.create_task(running.pool.stop(drain_s=60.0))
        await tokens(turn, 3)
        assert running.pool.is_draining
        running.pool.stop_now()
        async with asyncio.timeout(5.0):
            await stopping
        assert isinstance(turn.error, ShuttingDown)


async def test_a_death_during_the_drain_does_not_end_its_turns(stage: Stage) -> None:
    async with running_pool(stage, workers=2, decoder={"token_delay_s": 0.003}) as running:
        turns = [running.submit(echo_prompt(marker), 100) for marker in range(4)]
        await tokens(turns[0], 3)
        stopping = asyncio.create_task(running.pool.stop(drain_s=20.0))
        await tokens(turns[0], 6)
        kill(running.pid(0))
        for turn in turns:
            await exact(turn)
        await stopping


@pytest.mark.parametrize("what", ["ignores", "hangs", "loads", "stopped"])
async def test_stopping_ends_within_its_limits_whatever_the_decoder_does(stage: Stage, what: str) -> None:
    stage.script(
        refuse=["quit", "eof", "term"] if what == "ignores" else [],
        hang_after_s=0.0 if what == "hangs" else None,
        start_delay_s=60.0 if what == "loads" else 0.0,
        grandchild="holding",
    )
    async with running_pool(stage, worker={"kill_grace_s": 0.4}, is_awaited=what != "loads") as running:
        await until(lambda: running.decoder_pid(), what="a decoder")
        if what == "stopped":
            kill(running.decoder_pid(), signal.SIGSTOP)
        async with asyncio.timeout(6.0):
            await running.pool.stop(drain_s=0.0)
        assert running.processes() == set()


async def test_a_stopped_worker_process_does_not_hold_up_the_end(stage: Stage) -> None:
    async with running_pool(stage, worker={"kill_grace_s": 0.3}) as running:
        kill(running.pid(), signal.SIGSTOP)
        async with asyncio.timeout(8.0):
            await running.pool.stop(drain_s=0.0)


async def test_stopping_while_everything_fails_and_twice_is_no_error(stage: Stage) -> None:
    stage.script(start_exit=3)
    async with running_pool(stage, workers=2, is_awaited=False) as running:
        await until(lambda: running.board().decoder_deaths, what="a death")
        turn_off = [asyncio.create_task(running.pool.stop(drain_s=0.0)) for _ in range(2)]
        await asyncio.gather(*turn_off)


async def test_a_stopped_pool_answers_nothing_that_had_not_ended(stage: Stage) -> None:
    async with running_pool(stage, decoder={"prefill_s": 60.0}) as running:
        turn = running.submit(echo_prompt(1), 3)
        waiter = asyncio.create_task(ended(turn))
        await running.pool.stop(drain_s=0.0)
        assert (await waiter).error is not None
