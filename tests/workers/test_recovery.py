"""Workers that die or hang again and again: found, replaced, and given work once more, by themselves."""

import signal
import time
from dataclasses import replace

import pytest

from shm.board import WorkerState
from tests.fakes.echo import echo_prompt
from tests.fakes.stage import Stage
from tests.workers.running import exact, kill, running_pool, until
from workers.router import RUN
from workers.supervisor import Phase

CALM = {"deaths_limit": 100, "backoff_first_s": 0.02, "backoff_cap_s": 0.1}


@pytest.mark.parametrize("what", ["worker", "decoder"])
async def test_a_death_is_noticed_within_half_a_second(stage: Stage, what: str) -> None:
    async with running_pool(stage, workers=2, worker={"backoff_first_s": 2.0, "backoff_cap_s": 2.0}) as running:
        kill(running.pid(0) if what == "worker" else running.decoder_pid(0))
        began_s = time.monotonic()
        await until(lambda: not running.replicas[0].is_serving, what="the death seen")
        assert time.monotonic() - began_s < 0.5
        await until(lambda: running.replicas[0].state is WorkerState.BACKOFF, what="backoff")
        assert "SIGKILL" in running.replicas[0].reason()
        assert running.pool.is_ready


async def test_a_worker_killed_again_and_again_serves_again_each_time_without_traffic(stage: Stage) -> None:
    """B32, and twice during its own restart."""
    async with running_pool(stage, worker=CALM) as running:
        for round_ in range(8):
            kill(running.pid())
            await until(lambda: not running.replicas[0].is_serving, what="the death seen")
            if round_ % 4 == 3:
                await until(lambda: running.replicas[0].supervisor.phase is Phase.STARTING, what="the next worker")
                kill(running.pid())
            await running.serving()
        await running.generate(echo_prompt(1), 5)
        assert running.counters.worker_deaths == 10


async def test_a_hung_worker_gets_nothing_until_it_has_recovered_and_then_its_share(stage: Stage) -> None:
    """B28."""
    async with running_pool(stage, workers=3, worker=CALM) as running:
        kill(running.pid(1), signal.SIGSTOP)
        await until(lambda: not running.replicas[1].is_serving, timeout_s=5.0, what="the hang seen")
        assert running.pool.is_ready
        results = [await running.generate(echo_prompt(marker), 3) for marker in range(4)]
        assert all(result.moves == 0 for result in results)
        await running.serving()
        assert {(await running.generate(echo_prompt(marker), 3)).worker for marker in range(10, 10 + 3 * RUN)} == {
            0,
            1,
            2,
        }


async def test_a_prefix_attracts_nothing_to_a_dead_worker_or_to_its_successor(stage: Stage) -> None:
    """B34."""
    conversation = echo_prompt(9, 1280)
    slow = {"backoff_first_s": 1.0, "backoff_cap_s": 1.0}
    keeping = {"prefix_cache": True}
    async with running_pool(stage, workers=2, worker=slow, decoder=keeping, queue_requests=100) as running:
        home = (await running.generate(conversation, 5)).worker
        kill(running.pid(home))
        await until(lambda: not running.replicas[home].is_serving, what="the death seen")
        turns = [running.submit(conversation, 3) for _ in range(50)]
        for turn in turns:
            assert (await exact(turn)).worker == 1 - home
        await running.serving()
        assert (await running.generate(conversation, 3)).worker == 1 - home
        assert "sequences=0" in repr(running.replicas[home].belief)


async def test_a_hot_prefix_spills_over_when_its_worker_is_full(stage: Stage) -> None:
    conversation = echo_prompt(9, 1280)
    async with running_pool(stage, workers=2, slots=2, decoder={"slots": 2, "token_delay_s": 0.01}) as running:
        await running.generate(conversation, 3)
        turns = [running.submit(conversation, 20) for _ in range(4)]
        assert {(await exact(turn)).worker for turn in turns} == {0, 1}


async def test_a_worker_over_its_memory_limit_is_ended_with_a_traceback_and_its_turns_go_on(stage: Stage) -> None:
    async with running_pool(stage, worker=CALM, memory_limit_bytes=1 << 40, decoder={"token_delay_s": 0.01}) as running:
        turn = running.submit(echo_prompt(1), 200)
        await until(lambda: running.replicas[0].memory_bytes, what="a look")
        watchdog = running.replicas[0]._watchdog
        watchdog._limits = replace(watchdog._limits, memory_limit_bytes=1 << 20)
        await until(lambda: running.counters.worker_deaths, what="its end")
        assert (await exact(turn)).moves == 1
        (incident,) = running.pool.incidents()
        assert "memory" in incident["reason"]
        assert any("Fatal Python error: Aborted" in line for line in incident["stderr"])
        assert running.counters.worker_hangs == 0


async def test_device_memory_that_is_freed_late_delays_the_next_decoder_and_no_more(stage: Stage) -> None:
    """B47, as far as starts that fail for want of memory are tried again."""
    lock = {"lock_file": str(stage.script_path.with_name("memory")), "lock_s": 0.3}
    async with running_pool(stage, worker=CALM, decoder=lock) as running:
        kill(running.decoder_pid())
        await until(lambda: not running.replicas[0].is_serving, what="the death seen")
        await running.serving()
        await running.generate(echo_prompt(1), 5)
        assert "out of device memory" in " ".join(running.replicas[0].stderr)
