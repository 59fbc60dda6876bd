"""A request that kills decoders is refused; those that ran beside it are not hurt."""

import asyncio
import signal
from typing import Any

import pytest

from tests.fakes.echo import echo_prompt, expected
from tests.fakes.stage import Stage
from tests.workers.running import ended, exact, kill, running_pool, tokens, until
from workers.errors import DecoderRefused, EngineFailed, NonFinite, PoisonRequest, RingfenceError

SEGV = signal.SIGSEGV


@pytest.mark.parametrize("workers", [1, 2, 3])
async def test_a_poison_request_costs_two_decoders_and_its_neighbours_nothing(stage: Stage, workers: int) -> None:
    stage.script(crash_signal=SEGV, token_delay_s=0.002)
    async with running_pool(stage, workers=workers) as running:
        innocents = [running.submit(echo_prompt(marker), 60) for marker in range(4 * workers - 1)]
        poison = running.submit(echo_prompt(500, crash_at=3), 60)
        await ended(poison)
        assert isinstance(poison.error, PoisonRequest)
        assert poison.error.deaths == 2
        for turn in innocents:
            await exact(turn)
        await running.serving()
        assert running.counters.decoder_deaths == 2
        assert running.counters.poisoned == 1
        assert sum(gen["ids"][:15] == echo_prompt(500, crash_at=3) for gen in running.events("GEN")) == 2
        await running.idle()


@pytest.mark.parametrize("happening", ["hang_at", "stall_at", "spin_at"])
async def test_a_request_that_hangs_decoders_is_poison_too(stage: Stage, happening: str) -> None:
    stage.script(token_delay_s=0.002)
    async with running_pool(stage, workers=2, worker={"hang_limit_s": 0.6}) as running:
        innocents = [running.submit(echo_prompt(marker), 60) for marker in range(3)]
        poison = await ended(running.submit(echo_prompt(500, **{happening: 3}), 60))
        assert isinstance(poison.error, PoisonRequest)
        for turn in innocents:
            await exact(turn)
        assert running.counters.decoder_deaths == 2


async def test_the_poison_limit_is_a_setting(stage: Stage) -> None:
    stage.script(crash_signal=SEGV)
    async with running_pool(stage, poison_limit=3) as running:
        turn = await ended(running.submit(echo_prompt(5, crash_at=3), 10))
        assert isinstance(turn.error, PoisonRequest)
        assert turn.error.deaths == 3
        assert len(running.events("GEN")) == 3


async def test_two_poison_requests_at_once_are_both_found(stage: Stage) -> None:
    stage.script(crash_signal=SEGV, token_delay_s=0.001)
    async with running_pool(stage, workers=2) as running:
        poisons = [running.submit(echo_prompt(500 + n, crash_at=3), 60) for n in range(2)]
        innocents = [running.submit(echo_prompt(marker), 40) for marker in range(6)]
        for turn in poisons:
            assert isinstance((await ended(turn)).error, PoisonRequest)
        for turn in innocents:
            await exact(turn)


async def test_kills_from_outside_make_nobody_guilty(stage: Stage) -> None:
    async with running_pool(stage, workers=2, decoder={"token_delay_s": 0.002}) as running:
        turn = running.submit(echo_prompt(1), 300)
        for round_ in range(1, 5):
            await tokens(turn, 30 * round_)
            await running.serving()
            assert turn.worker is not None
            kill(running.decoder_pid(turn.worker))
            await until(lambda: turn.moves == round_, what="a move")  # noqa: B023
        await exact(turn)
        assert running.counters.poisoned == 0


async def test_an_innocent_waits_for_nobody_while_a_suspect_must(stage: Stage) -> None:
    """Two suspects never share a decoder, but a fresh request may run while a suspect waits for its turn."""
    slow: dict[str, Any] = {"when": {"resumed": True}, "token_delay_s": 0.03}
    stage.script(crash_signal=SEGV, token_delay_s=0.002, rules=[slow])
    async with running_pool(stage) as running:
        suspects = [running.submit(echo_prompt(marker), 20) for marker in range(3)]
        for turn in suspects:
            await tokens(turn, 2)
        kill(running.decoder_pid(), SEGV)
        await until(lambda: running.pool.running == 1 and running.pool.snapshot().queue.requests == 2, what="suspects")
        await exact(running.submit(echo_prompt(50), 5))
        assert not any(turn.has_ended for turn in suspects)
        for turn in suspects:
            await exact(turn)


async def test_nonfinite_before_the_first_token_is_tried_once_more(stage: Stage) -> None:
    stage.script(rules=[{"when": {"marker": 1}, "times": 1, "nonfinite_at": 0}])
    async with running_pool(stage) as running:
        result = await exact(running.submit(echo_prompt(1), 10))
        assert result.moves == 0
        assert (running.counters.nonfinite, running.board().nonfinite) == (1, 1)
        assert running.board().decoder_incarnation == 1


async def test_nonfinite_twice_is_an_error_of_its_own(stage: Stage) -> None:
    async with running_pool(stage) as running:
        turn = await ended(running.submit(echo_prompt(1, nonfinite_at=0), 10))
        assert isinstance(turn.error, NonFinite)
        assert len(running.events("GEN")) == 2
        await running.generate(echo_prompt(2), 5)


async def test_nonfinite_after_a_token_is_not_tried_again(stage: Stage) -> None:
    async with running_pool(stage) as running:
        turn = await ended(running.submit(echo_prompt(1, nonfinite_at=4), 10))
        assert isinstance(turn.error, NonFinite)
        assert list(turn.ids) == expected(echo_prompt(1), 4)
        assert len(running.events("GEN")) == 1


async def test_nonfinite_makes_the_router_forget_what_the_decoder_held(stage: Stage) -> None:
    async with running_pool(stage, workers=2) as running:
        conversation = echo_prompt(9, 640)
        first = await running.generate(conversation, 5)
        belief = running.replicas[first.worker].belief
        assert "sequences=1" in repr(belief)
        await ended(running.submit([*conversation, *echo_prompt(1)], 5))
        stage.script(nonfinite_at=1)
        assert isinstance((await ended(running.submit(conversation, 5))).error, NonFinite)
        assert "sequences=0" in repr(belief)


async def test_a_request_that_the_decoder_refuses_says_nothing_against_the_decoder(stage: Stage) -> None:
    stage.script(rules=[{"when": {"marker": 1}, "error": "grammar is not one"}])
    async with running_pool(stage, worker={"engine_failures_limit": 2}) as running:
        for _ in range(6):
            turn = await ended(running.submit(echo_prompt(1), 5))
            assert isinstance(turn.error, DecoderRefused)
            assert "grammar is not one" in turn.error.text
        await running.generate(echo_prompt(2), 5)
        assert running.board().decoder_incarnation == 1


async def test_engine_errors_in_a_row_replace_the_decoder_once(stage: Stage) -> None:
    """B21."""
    stage.script(rules=[{"when": {"start": 1, "gen_from": 3}, "error": "device error 7"}])
    async with running_pool(stage, slots=1, worker={"engine_failures_limit": 3}) as running:
        outcomes: list[RingfenceError | None] = []
        for marker in range(8):
            outcomes.append((await ended(running.submit(echo_prompt(marker), 5))).error)
            await running.serving()
        assert [isinstance(error, EngineFailed) for error in outcomes] == [False] * 2 + [True] * 3 + [False] * 3
        assert running.board().decoder_incarnation == 2
        assert len(running.events("START")) == 2


async def test_engine_errors_with_successes_between_replace_nothing(stage: Stage) -> None:
    stage.script(rules=[{"when": {"gen": list(range(1, 20, 2))}, "error": "device error 7"}])
    async with running_pool(stage, worker={"engine_failures_limit": 2}) as running:
        for marker in range(8):
            turn = await ended(running.submit(echo_prompt(marker), 5))
            assert (turn.error is None) is (marker % 2 == 1)
        assert running.board().decoder_incarnation == 1


@pytest.mark.parametrize("is_tagged", [True, False])
async def test_an_error_that_says_the_engine_is_broken_replaces_it_and_its_done_is_not_believed(
    stage: Stage, is_tagged: bool
) -> None:
    broken = "verify: timed out at layer 12"
    stage.script(rules=[{"when": {"start": 1, "gen": 1}, "error": broken, "error_at": 5, "error_done": True}])
    async with running_pool(stage, slots=1, decoder={"slots": 1 if is_tagged else None}) as running:
        result = await exact(running.submit(echo_prompt(1), 20))
        assert result.moves == 1
        await running.serving()
        assert running.board().decoder_incarnation == 2
        assert running.counters.decoder_deaths == 1


async def test_garbage_on_stdout_is_counted_and_reaches_no_client(stage: Stage) -> None:
    garbage = [
        "T abc #{rid}", "T 5", "T 99999999 #{rid}", "T -1 #{rid}", "DONE #{rid}", "DONE 1 2 3 4 nonsense #{rid}",
        "PP x #{rid}", "\x00\xff\xfe", "hello", "RESUME #{rid}", "T 5 #99999999999", "", " ", "#{rid}", "E !!! #{rid}",
    ]  # fmt: skip
    stage.script(lines_before=garbage, lines_at={"3": garbage}, lines_after=garbage)
    async with running_pool(stage) as running:
        turns = [running.submit(echo_prompt(marker), 20) for marker in range(4)]
        for turn in turns:
            await exact(turn)
        await until(lambda: running.board().violations >= 4 * 3 * 9, what=lambda: str(running.board()))
        assert running.board().decoder_incarnation == 1


async def test_tokens_for_other_requests_ids_that_do_not_run_are_stale(stage: Stage) -> None:
    stage.script(lines_at={"2": ["T 5 #4000000000", "DONE 1 1 1 1 stop #4000000000"]})
    async with running_pool(stage) as running:
        await running.generate(echo_prompt(1), 10)
        assert running.board().stale == 2


async def test_more_tokens_than_asked_for_are_violations_and_not_delivered(stage: Stage) -> None:
    stage.script(lines_at={"9": ["T 5 #{rid}"] * 3})
    async with running_pool(stage) as running:
        turn = await ended(running.submit(echo_prompt(1), 10))
        assert len(turn.ids) == 10
        assert running.board().violations == 3


async def test_a_crowd_of_poison_and_good_requests_sorts_itself_out(stage: Stage) -> None:
    stage.script(crash_signal=SEGV, token_delay_s=0.001)
    async with running_pool(stage, workers=2, worker={"deaths_limit": 100, "backoff_cap_s": 0.05}) as running:
        poison = [running.submit(echo_prompt(500 + n, crash_at=n % 4), 30) for n in range(4)]
        good = [running.submit(echo_prompt(marker), 30) for marker in range(20)]
        async with asyncio.timeout(60):
            for turn in poison:
                assert isinstance((await ended(turn, 60)).error, PoisonRequest)
            for turn in good:
                await exact(turn, 60)
        await running.serving()
        await running.idle()
