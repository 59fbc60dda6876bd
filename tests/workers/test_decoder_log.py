"""A decoder that writes to stderr as much as it likes."""

import asyncio

from tests.fakes.echo import echo_prompt
from tests.fakes.stage import Stage
from tests.workers.running import exact, running_pool, until


async def test_ten_megabytes_of_log_during_decoding_slow_nobody_and_are_bounded(stage: Stage) -> None:
    """B48."""
    flood = {"stderr_at": 5, "stderr_lines": 100_000, "stderr_line_bytes": 100}
    stage.script(rules=[{"when": {"marker": 1}, **flood}])
    async with running_pool(stage) as running:
        turns = [running.submit(echo_prompt(marker), 200) for marker in range(4)]
        async with asyncio.timeout(15.0):
            for turn in turns:
                await exact(turn)
        await until(lambda: running.board().stderr_lines == 100_000, what=lambda: str(running.board().stderr_lines))
        assert running.board().stderr_dropped > 90_000
        assert len(running.replicas[0].stderr) <= 100
        assert running.board().decoder_incarnation == 1


async def test_a_line_of_a_megabyte_and_binary_junk_are_taken_and_cut(stage: Stage) -> None:
    junk = {"stderr_at": 5, "stderr_long_bytes": 1_000_000, "stderr_junk_bytes": 1_000_000}
    stage.script(rules=[{"when": {"marker": 1}, **junk}])
    async with running_pool(stage) as running:
        await exact(running.submit(echo_prompt(1), 50))
        await running.generate(echo_prompt(2), 50)
        await until(lambda: running.board().stderr_lines > 3000, what=lambda: str(running.board().stderr_lines))
        assert max(map(len, running.replicas[0].stderr)) <= 2048


async def test_log_lines_between_all_tokens_do_not_change_them(stage: Stage) -> None:
    stage.script(stderr_every=True, stderr_lines=20, stderr_line_bytes=200)
    async with running_pool(stage) as running:
        turns = [running.submit(echo_prompt(marker), 100) for marker in range(4)]
        for turn in turns:
            await exact(turn)
        await until(lambda: running.board().stderr_lines == 4 * 100 * 20, what=lambda: str(running.board()))


async def test_a_server_that_can_not_take_the_log_for_a_while_does_not_block_the_decoder(stage: Stage) -> None:
    """The worker's own stderr is a pipe to the server: full, because nobody reads, it must only cost lines."""
    stage.script(token_delay_s=0.001, stderr_every=True, stderr_lines=50, stderr_line_bytes=1000)
    async with running_pool(stage) as running:
        incarnation = running.replicas[0].incarnation
        assert incarnation is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(incarnation._stderr_fd)
        turn = running.submit(echo_prompt(1), 200)
        await exact(turn)
        assert running.board().stderr_dropped > 0
        loop.add_reader(incarnation._stderr_fd, incarnation.read_stderr)


async def test_the_last_lines_of_a_crash_are_its_reason_and_its_incident(stage: Stage) -> None:
    stage.script(
        rules=[{"when": {"start": 1, "gen": 1}, "crash_at": 3}],
        crash_signal=6,
        crash_stderr="CUDA error: an illegal memory access\n  in function x\n",
    )
    async with running_pool(stage) as running:
        assert (await exact(running.submit(echo_prompt(1), 20))).moves == 1
        (incident,) = running.pool.incidents()
        assert incident["kind"] == "cuda_error"
        assert "SIGABRT" in incident["reason"]
        assert any("illegal memory access" in line for line in incident["stderr"])
        assert [turn["tokens"] for turn in incident["turns"]] == [3]
