"""POST /v1/embeddings through OpenAI's SDK: over scripted decoders, and over the built-in one."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.fakes.echo import echo_prompt, echo_token
from tests.tiny_model import build
from tests.whole.scripted import KEY, STOP_S, Scripted, new_marker, scripted
from tests.whole.served import Served


def client_of(port: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)


def vector_of(marker: int) -> list[float]:
    """What scripted decoders make of `echo_prompt(marker)`."""
    return [echo_token(marker, index, base=-500, span=1000) / 500 for index in range(8)]


async def test_each_of_many_inputs_gets_its_own_vector(server: Scripted) -> None:
    markers = [new_marker() for _ in range(60)]
    forms: list[Any] = [{}, {"encoding_format": "float"}]  # without it the SDK asks for base64, and decodes that
    given = [echo_prompt(marker, 12 + marker % 9) for marker in markers]
    with client_of(server.port) as client:
        answers = [
            await asyncio.to_thread(partial(client.embeddings.create, model="tiny", input=given, **form))
            for form in forms
        ]
    for answer in answers:
        assert [item.index for item in answer.data] == list(range(60))
        got = np.array([item.embedding for item in answer.data], np.float32)
        assert np.array_equal(got, np.array([vector_of(marker) for marker in markers], np.float32))
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, given))
    assert not server.stage.events("VIOLATION")


async def test_a_client_that_leaves_stops_its_embeddings(server: Scripted) -> None:
    marker = new_marker()
    embs = len(server.stage.events("EMB"))
    async with server.peer() as peer:
        peer.ask("POST", "/v1/embeddings", {"input": [echo_prompt(marker, prefill_ms=60_000)] * 40})
        await server.until(lambda: len(server.stage.events("EMB")) == embs + 4, "all slots taken")
        left = time.monotonic()
        peer.leave("rst")
        assert max(await server.stops(server.stage.events("EMB")[embs:])) - left < STOP_S
    assert len(server.stage.events("EMB")) == embs + 4, "nothing more of it was run"


async def test_embeddings_go_on_in_the_decoder_that_takes_a_killed_ones_place(server: Scripted) -> None:
    markers = [new_marker() for _ in range(10)]
    embs = len(server.stage.events("EMB"))
    given = [echo_prompt(marker, prefill_ms=150) for marker in markers]
    asking = asyncio.create_task(server.call("POST", "/v1/embeddings", {"input": given}))
    await server.until(lambda: len(server.stage.events("EMB")) == embs + 4, "all slots taken")
    (worker,) = (await server.status())["workers"]
    os.kill(worker["decoder_pid"], signal.SIGKILL)
    status, answer = await asking
    assert status == 200, answer
    got = np.array([item["embedding"] for item in answer["data"]], np.float32)
    assert np.array_equal(got, np.array([vector_of(marker) for marker in markers], np.float32))
    await server.until_status(lambda status: status["workers"][0]["state"] == "ready", "its replacement")


async def test_a_decoder_that_makes_none_is_named(tmp_path: Path) -> None:
    with scripted(tmp_path, decoder={"info": {"embeddings": None}}) as server:
        status, answer = await server.call("POST", "/v1/embeddings", {"input": "x"})
        assert (status, answer["error"]["code"]) == (400, "unsupported_operation")
        assert not server.stage.events("EMB")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = build(tmp_path_factory.mktemp("model") / "tiny.gguf")
    options = ("--workers", "1", "--slots", "2", "--context", "512", "--threads", "1")
    with Served("--model", str(model), *options) as running:
        yield running


def test_the_builtin_decoder_makes_vectors_of_length_one(real: Served) -> None:
    with client_of(real.port) as client:
        texts = ["once upon a time", "there was", "once upon a time"]
        model = client.models.list().data[0].id
        data = client.embeddings.create(model=model, input=texts).data
        alone = client.embeddings.create(model=model, input=texts[1], encoding_format="float").data[0]
        real.post("/v1/completions", {"prompt": "and generations go on", "max_tokens": 4})
    first, second, third = (np.array(item.embedding, np.float32) for item in data)
    assert len(first) == 64
    assert abs(float(np.linalg.norm(first)) - 1) < 1e-3
    assert np.allclose(first, third, atol=1e-3) and not np.allclose(first, second, atol=1e-2)
    assert np.allclose(second, np.array(alone.embedding, np.float32), atol=1e-3)
