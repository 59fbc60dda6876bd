"""A turn as its caller sees it, and the job behind it."""

import asyncio

import pytest

from tests.workers.jobs import make_job, make_request
from workers.errors import PoisonRequest
from workers.request import FinishReason, TurnResult
from workers.turn import Turn


def give(turn: Turn, *ids: int) -> None:
    for id in ids:
        turn.ids.append(id)
        turn.wake()


def result(turn: Turn) -> TurnResult:
    return TurnResult(
        finish=FinishReason.STOP,
        worker=0,
        prompt_tokens=len(turn.request.prompt),
        cached_tokens=0,
        generated=len(turn.ids),
        queue_ms=0.0,
        prompt_ms=0.0,
        decode_ms=0.0,
    )


async def test_a_waiter_gets_every_token_in_order_and_then_the_end() -> None:
    turn = Turn(make_request())
    taken: list[int] = []

    async def consume() -> None:
        seen = 0
        while (count := await turn.wait(seen)) > seen:
            taken.extend(turn.ids[seen:count])
            seen = count

    consumer = asyncio.create_task(consume())
    for first in range(0, 30, 3):
        give(turn, first, first + 1, first + 2)
        await asyncio.sleep(0)
    turn.end(result=result(turn))
    await consumer
    assert taken == list(range(30))


async def test_tokens_that_came_before_the_end_are_given_before_it() -> None:
    turn = Turn(make_request())
    give(turn, 1, 2)
    turn.end(result=result(turn))
    assert await turn.wait(0) == 2
    assert await turn.wait(2) == 2
    assert turn.has_ended


async def test_waiting_for_the_end_passes_over_tokens() -> None:
    turn = Turn(make_request())
    wait = asyncio.create_task(turn.wait_ended())
    await asyncio.sleep(0)
    give(turn, 1)
    await asyncio.sleep(0)
    assert not wait.done()
    turn.end(result=result(turn))
    await wait


async def test_a_cancelled_waiter_leaves_the_turn_to_the_next_one() -> None:
    turn = Turn(make_request())
    first = asyncio.create_task(turn.wait(0))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(turn.wait(0))
    await asyncio.sleep(0)
    give(turn, 1)
    assert await second == 1


async def test_a_second_waiter_at_once_is_refused_in_words() -> None:
    turn = Turn(make_request())
    first = asyncio.create_task(turn.wait(0))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="consumed by one task"):
        await turn.wait(0)
    give(turn, 1)
    assert await first == 1


def test_a_cancel_reaches_the_pool_once_and_not_after_the_end() -> None:
    heard: list[Turn] = []
    turn, ended = Turn(make_request()), Turn(make_request())
    for one in (turn, ended):
        one.on_cancel(heard.append)
    ended.end(result=result(ended))
    for _ in range(3):
        turn.cancel()
        ended.cancel()
    assert heard == [turn]
    assert (turn.is_cancelled, ended.is_cancelled) == (True, False)


def test_the_first_end_counts() -> None:
    turn = Turn(make_request())
    turn.end(error=PoisonRequest(2))
    turn.end(result=result(turn))
    assert turn.result is None
    with pytest.raises(PoisonRequest):
        turn.raise_for_error()


def test_a_move_keeps_tokens_and_the_first_start() -> None:
    turn = Turn(make_request())
    turn.start(0, turn.submitted_s + 0.25)
    give(turn, 7)
    turn.requeue()
    turn.start(1, turn.submitted_s + 99.0)
    assert (turn.ids, turn.moves, turn.worker) == ([7], 1, 1)
    assert turn.queue_ms == pytest.approx(250.0)


def test_a_job_sends_the_prompt_and_then_what_was_received() -> None:
    job = make_job(3)
    assert b"".join(job.prompt_text()) == b"10,11,12"
    give(job.turn, 500, 501)
    assert b"".join(job.prompt_text()) == b"10,11,12,500,501"
    assert job.prompt_bytes() == len(b"10,11,12,500,501")


def test_a_job_is_suspect_by_the_tokens_of_its_turn() -> None:
    job = make_job()
    suspicions = [job.is_suspect]
    job.record.deaths = 1
    suspicions.append(job.is_suspect)
    give(job.turn, *range(16))
    suspicions.append(job.is_suspect)
    assert suspicions == [False, True, False]
