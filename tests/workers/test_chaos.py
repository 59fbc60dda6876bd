"""Random kills under load: every token of every stream is known, and each comes exactly once."""

import asyncio
import random
import signal
from typing import Any

import pytest

from tests.fakes.echo import echo_prompt, expected
from tests.fakes.stage import Stage
from tests.workers.running import Running, ended, exact, kill, running_pool, tokens
from workers.request import FinishReason

CALM = {"deaths_limit": 1000, "backoff_first_s": 0.02, "backoff_cap_s": 0.05}


def strike(running: Running, numbers: random.Random) -> None:
    """Kill or stop a worker or a decoder that is there."""
    replica = numbers.choice([replica for replica in running.replicas if replica.incarnation is not None])
    assert replica.incarnation is not None
    victim = numbers.choice((replica.incarnation.pid, replica.incarnation.decoder_pid))
    if victim > 1:
        try:
            kill(
                victim, numbers.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV))
            )
        except ProcessLookupError:
            pass


@pytest.mark.parametrize("seed", [1, 2])
async def test_no_token_is_lost_doubled_or_foreign_whatever_is_killed(stage: Stage, seed: int) -> None:
    """B01 and B25, short form; `python -m bench.chaos` is the long one."""
    numbers = random.Random(seed)
    chaos: dict[str, Any] = {
        "worker": CALM,
        "ring_records": 64,
        "poison_limit": 1000,
        "decoder": {"token_delay_s": 0.002, "burst": 3},
    }
    async with running_pool(stage, workers=3, wait_for_workers_s=30.0, **chaos) as running:
        is_over = False
        served = 0

        async def client(number: int) -> None:
            nonlocal served
            own = random.Random(seed * 1000 + number)
            marker = number * 1000
            while not is_over:
                marker += 1
                prompt, max_new = echo_prompt(marker, own.randrange(10, 300)), own.choice((1, 5, 100, 400))
                turn = running.submit(prompt, max_new)
                if own.random() < 0.2:
                    await tokens(turn, 1)
                    turn.cancel()
                    await ended(turn, 30.0)
                    assert turn.result is not None
                    assert turn.result.finish in (FinishReason.CANCEL, FinishReason.LENGTH)
                    assert list(turn.ids) == expected(prompt, max_new)[: len(turn.ids)]
                else:
                    await exact(turn, 30.0)
                served += 1

        clients = [asyncio.create_task(client(number)) for number in range(16)]
        for _ in range(12):
            await asyncio.sleep(numbers.uniform(0.02, 0.3))
            strike(running, numbers)
        is_over = True
        await asyncio.gather(*clients)
        assert served >= 16
        await running.serving()
        await running.idle()
        assert running.counters.failed == 0
        await running.generate(echo_prompt(999), 20)
