"""The end of the server: readiness goes first, what runs is finished, the rest is told, and the exit code is 0 (B50, B51)."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AsyncExitStack
from pathlib import Path
from signal import SIGINT, SIGSTOP, SIGTERM, Signals

import pytest

from bench.chaos import wire
from bench.chaos.answers import Answer
from tests.lifecycle.scene import Scene, echo, running

AT_ONCE_S = 2.0
SLACK_S = 2.0


@pytest.mark.parametrize("number", [SIGTERM, SIGINT])
async def test_a_signal_drains_and_everything_that_runs_or_waits_is_finished(tmp_path: Path, number: Signals) -> None:
    with running(tmp_path, workers=2, decoder={"token_delay_s": 0.02}) as scene:
        await scene.serving()
        requests = [asyncio.create_task(scene.exact(echo(40, is_streamed=index % 2 > 0))) for index in range(12)]
        await scene.running(8)
        scene.server.signal(number)
        body = await scene.health(503, limit_s=AT_ONCE_S)
        assert body["draining"]
        assert (await scene.fetch("/readyz"))[0] == 503
        assert (await scene.fetch("/livez"))[0] == 200
        async with wire.call(scene.port, "POST", "/v1/completions", echo(5).body) as reply:
            assert reply.status == 503
            assert reply.headers["connection"] == "close"
            assert int(reply.headers["retry-after"]) >= 1
            assert (await reply.json())["error"]["code"] == "shutting_down"
        await asyncio.gather(*requests)
        assert await asyncio.to_thread(scene.server.wait) == 0
        scene.gone()


async def test_workers_ignore_the_groups_signals_and_tokens_flow_during_the_drain(tmp_path: Path) -> None:
    with running(tmp_path, workers=2, decoder={"token_delay_s": 0.02, "refuse": ["term"]}) as scene:
        status = await scene.serving()
        requests = [asyncio.create_task(scene.exact(echo(60))) for _ in range(8)]
        await scene.running(8)
        for worker in status["workers"]:  # what supervisord's stopasgroup or a terminal would send
            for number in (SIGTERM, SIGINT):
                scene.signal(worker, "pid", number)
        os.killpg(scene.server.pid, SIGTERM)
        answers = await asyncio.gather(*requests)
        assert all(answer.moves == 0 for answer in answers)
        assert await asyncio.to_thread(scene.server.wait) == 0
        scene.gone()


async def test_what_outlives_the_drain_is_told_so_whoever_does_not_read(tmp_path: Path) -> None:
    drain_s = 1.0
    with running(tmp_path, slots=16, workers=1, drain_s=drain_s, decoder={"token_delay_s": 0.02}) as scene:
        await scene.serving()
        long = [asyncio.create_task(scene.ask(echo(1500, is_streamed=index < 6))) for index in range(8)]
        async with AsyncExitStack() as stack:
            for _ in range(3):  # clients that read nothing after the headers
                body = {**echo(1500).body, "logprobs": 5}
                await stack.enter_async_context(
                    wire.call(scene.port, "POST", "/v1/completions", body, receive_bytes=4096, buffer_bytes=1024)
                )
            curl = await _stopped_curl(scene, tmp_path)
            await scene.running(12)
            began_s = time.monotonic()
            scene.server.signal(SIGTERM)
            assert await asyncio.to_thread(scene.server.wait) == 0
            assert time.monotonic() - began_s < drain_s + 6.0 + SLACK_S
            curl.kill()
            await curl.wait()
        for answer in await asyncio.gather(*long):
            assert_told(answer)
        scene.gone()


async def _stopped_curl(scene: Scene, folder: Path) -> asyncio.subprocess.Process:
    """A client in a process of its own, stopped."""
    script = (
        "import socket, sys, signal; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])));"
        "b = sys.argv[2].encode(); s.sendall(b'POST /v1/completions HTTP/1.1\\r\\nhost: x\\r\\n"
        "content-type: application/json\\r\\ncontent-length: %d\\r\\n\\r\\n' % len(b) + b); s.recv(1);"
        "print('up', flush=True); signal.pause()"
    )
    body = f'{{"prompt": {echo(5).prompt}, "max_tokens": 1500, "stream": true}}'
    client = await asyncio.create_subprocess_exec(
        "python3", "-c", script, str(scene.port), body, cwd=folder, stdout=asyncio.subprocess.PIPE
    )
    assert client.stdout is not None
    await client.stdout.readline()
    client.send_signal(SIGSTOP)
    return client


async def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with running(tmp_path, drain_s=60, decoder={"token_delay_s": 0.05, "refuse": ["quit", "eof", "term"]}) as scene:
        await scene.serving()
        requests = [asyncio.create_task(scene.ask(echo(1500))) for _ in range(3)]
        await scene.running(3)
        scene.server.signal(SIGTERM)
        await scene.health(503)
        began_s = time.monotonic()
        scene.server.signal(SIGTERM)
        assert await asyncio.to_thread(scene.server.wait) == 0
        assert time.monotonic() - began_s < AT_ONCE_S + SLACK_S
        for answer in await asyncio.gather(*requests):
            assert_told(answer)
        scene.gone()


@pytest.mark.parametrize("decoder", [{"never_ready": True}, {"start_exit": 3}])
async def test_a_server_that_is_not_ready_yet_stops_just_as_well(tmp_path: Path, decoder: dict[str, object]) -> None:
    with running(tmp_path, workers=2, decoder=decoder) as scene:
        scene.stage.wait_for("START", 2)
        scene.server.signal(SIGTERM)
        assert await asyncio.to_thread(scene.server.wait, 10.0) == 0
        scene.gone()


def assert_told(answer: Answer) -> None:
    """One clear error, after the headers or in place of them."""
    assert "shutting_down" in answer.error, answer
    assert answer.finish is None
