"""Clients that leave the real server, which has all its middleware on: their generations stop at once, and nothing of
them stays."""

import asyncio
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.fakes.echo import echo_prompt
from tests.whole.peer import Peer
from tests.whole.scripted import STOP_S, Scripted, new_marker, text_of, visit

MAX_TOKENS = 400
PHASES: dict[str, dict[str, int]] = {
    "prefill": {"prefill_ms": 60_000},
    "token 1": {"stall_at": 1},
    "mid": {"stall_at": 200},
    "last chunk": {"stall_at": MAX_TOKENS - 1},
}


def request_of(marker: int, *, stream: bool, max_tokens: int = MAX_TOKENS, **orders: int) -> dict[str, Any]:
    return {"prompt": echo_prompt(marker, **orders), "max_tokens": max_tokens, "stream": stream}


async def reached(server: Scripted, base: int, tokens: int) -> None:
    """Wait until decoders have made that many tokens more."""
    while await server.tokens_out() < base + tokens:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_stops_its_generation(server: Scripted, phase: str, stream: bool) -> None:
    server.stage.script(burst=20)
    orders = PHASES[phase]
    markers = [new_marker() for _ in range(3)]
    base = await server.tokens_out()
    left: list[float] = []
    process = await visit(server, request_of(markers[2], stream=stream, **orders))
    async with server.peer() as fin, server.peer() as rst:
        for peer, marker in ((fin, markers[0]), (rst, markers[1])):
            peer.ask("POST", "/v1/completions", request_of(marker, stream=stream, **orders))
        gens = [(await server.running(marker))[0] for marker in markers]
        await reached(server, base, 3 * orders.get("stall_at", 0))
        leaves: list[Callable[[], None]] = [partial(fin.leave, "fin"), partial(rst.leave, "rst"), process.kill]
        for leave in leaves:
            left.append(time.monotonic())
            leave()
        stopped = await server.stops(gens)
    assert max(stop - leave for stop, leave in zip(stopped, left, strict=True)) < STOP_S
    await process.wait()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_queued_request_whose_client_left_is_never_run(server: Scripted, stream: bool) -> None:
    """B13: everybody who waits leaves but the last; it is the next to run."""
    running = [new_marker() for _ in range(4)]
    waiting = [new_marker() for _ in range(20)]
    last = new_marker()
    peers = [server.peer() for _ in (*running, *waiting, last)]
    for peer in peers:
        await peer.__aenter__()
    try:
        for peer, marker in zip(peers, running, strict=False):
            peer.ask("POST", "/v1/completions", request_of(marker, stream=stream, prefill_ms=60_000))
        for marker in running:
            await server.running(marker)
        for peer, marker in zip(peers[4:], [*waiting, last], strict=True):
            peer.ask("POST", "/v1/completions", request_of(marker, stream=stream, max_tokens=2))
        await server.until_status(lambda status: status["queue"]["requests"] == 21, "21 in the queue")
        for place, peer in enumerate(peers[4:-1]):
            peer.leave("rst" if place % 2 else "fin")
        left = time.monotonic()
        await server.until_status(lambda status: status["queue"]["requests"] == 1, "one in the queue")
        assert time.monotonic() - left < STOP_S
        peers[0].leave()
        status, _, _ = await peers[-1].answer()
        assert status == 200
        assert not [marker for marker in waiting if server.gens(marker)]
    finally:
        for peer in peers:
            peer.leave()


async def test_a_silent_prefill_is_left_by_its_own_listener(server: Scripted) -> None:
    """B14: no write fails in a prefill; with and without headers sent, long after the request."""
    markers = [new_marker(), new_marker()]
    async with server.peer() as streamed, server.peer() as whole:
        for peer, marker, stream in ((streamed, markers[0], True), (whole, markers[1], False)):
            peer.ask("POST", "/v1/completions", request_of(marker, stream=stream, prefill_ms=60_000))
        gens = [(await server.running(marker))[0] for marker in markers]
        assert (await streamed.head())[0] == 200
        assert await streamed.event() == ": keep-alive"
        left = time.monotonic()
        streamed.leave()
        whole.leave()
        assert max(await server.stops(gens)) - left < STOP_S


@pytest.mark.parametrize("ended", [0, 1], ids=["all run", "one has ended"])
async def test_leaving_stops_every_choice_that_still_runs(server: Scripted, ended: int) -> None:
    """B16: n=4; after the first chunk of choice 2."""
    for _ in range(5):
        marker, before = new_marker(), len(server.stage.events("END"))
        rules = [{"when": {"marker": marker}, "times": 1, "eos_at": 3}] * ended
        server.stage.script(token_delay_s=0.02, rules=rules)
        async with server.peer() as peer:
            peer.ask("POST", "/v1/completions", {**request_of(marker, stream=True), "n": 4})
            await peer.head()
            while not has_text(await peer.event(), 2):
                pass
            await ends(server, before + ended)
            gens = server.gens(marker)
            assert len(gens) == 4
            peer.leave("rst")
        finishes = {event["rid"]: event["finish"] for event in await ends(server, before + 4)}
        assert sorted(finishes[gen["rid"]] for gen in gens) == ["cancel"] * (4 - ended) + ["stop"] * ended


def has_text(event: Any, index: int) -> bool:
    return any(choice["index"] == index and choice["text"] for choice in event["choices"])


async def ends(server: Scripted, count: int) -> list[dict[str, Any]]:
    """Wait until that many turns have ended in decoders."""
    await server.until(lambda: len(server.stage.events("END")) >= count, f"{count} ends")
    return server.stage.events("END")


async def test_hundreds_of_requests_of_which_most_are_left_leave_nothing(server: Scripted) -> None:
    """B11: 300 requests, 60 % left at random phases, 16 at a time; then 60 at once."""
    server.stage.script(burst=5, token_delay_s=0.001)
    numbers = random.Random(11)
    gate = asyncio.Semaphore(16)
    memory: list[int] = []

    async def one(number: int) -> None:
        async with gate, server.peer() as peer:
            await request(peer, number)
        if number in (60, 299):
            memory.append(server.process.memory_info().rss)

    async def request(peer: Peer, number: int) -> None:
        marker, stream = new_marker(), bool(number % 2)
        tokens = numbers.randrange(1, 60)
        peer.ask("POST", "/v1/completions", request_of(marker, stream=stream, max_tokens=tokens))
        if numbers.random() < 0.6:
            await asyncio.sleep(numbers.random() * 0.03)  # somewhere between its queueing and its end
            peer.leave("rst" if number % 3 else "fin")
            return
        status, _, body = await peer.answer()
        assert status == 200
        if not stream:
            assert f'"text":"{text_of(marker, tokens)}"'.encode() in body

    await asyncio.gather(*map(one, range(300)))
    await server.clean()
    peers = [server.peer() for _ in range(60)]
    for peer in peers:
        await peer.__aenter__()
        peer.ask("POST", "/v1/completions", request_of(new_marker(), stream=True, prefill_ms=60_000))
    await server.until_status(lambda status: status["running"] == 4, "all slots taken")
    for peer in peers:
        peer.leave("rst")
    await server.clean()
    assert memory[-1] - memory[0] < 20 << 20, memory
