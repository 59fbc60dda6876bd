"""POST /v1/embeddings: shapes, one turn for each input, and what is refused."""

import base64
import struct
from typing import Any

import pytest

from server.embeddings import AT_ONCE, INPUTS_LIMIT
from tests.fakes.http import Call, app_of, call
from tests.fakes.pool import FakePool, Script
from workers.errors import Overloaded, Unsupported, WorkerLost
from workers.request import RequestKind

PATH = "/v1/embeddings"
NUMBERS = (0.5, -0.25, 2.0)
PACKED = struct.pack("<3f", *NUMBERS)


def pool_of(**script: Any) -> FakePool:
    return FakePool(Script(**{"embedding": PACKED, **script}))


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("ab", [[1, 263]]),  # bos, and the vocabulary's token of "ab"
        (["ab", "ab"], [[1, 263]] * 2),
        ([7, 8], [[7, 8]]),
        ([[7], [8, 9]], [[7], [8, 9]]),
    ],
)
async def test_each_input_is_a_turn_of_its_own(given: Any, prompts: list[list[int]]) -> None:
    pool = pool_of()
    answer = await call(app_of(pool), "POST", PATH, {"input": given, "model": "tiny"})
    assert answer.status == 200, answer.body
    assert [turn.request.prompt for turn in pool.turns] == prompts
    assert {turn.request.kind for turn in pool.turns} == {RequestKind.EMBED}
    assert answer.json["object"] == "list" and answer.json["model"] == "tiny"
    assert answer.json["data"] == [
        {"index": index, "object": "embedding", "embedding": list(NUMBERS)} for index in range(len(prompts))
    ]
    tokens = sum(map(len, prompts))
    assert answer.json["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert "x-ringfence-worker" in answer.headers


async def test_base64_is_little_endian_float32() -> None:
    answer = await call(app_of(pool_of()), "POST", PATH, {"input": "x", "encoding_format": "base64"})
    assert base64.b64decode(answer.json["data"][0]["embedding"]) == PACKED


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"dimensions": 2}, "unsupported_parameter", "dimensions"),
        ({"encoding_format": "int8"}, "invalid_value", "encoding_format"),
        ({"input": []}, None, "input"),
        ({"input": [1, "x"]}, None, "input"),
        ({"input": ["x"] * (INPUTS_LIMIT + 1)}, None, "input"),
        ({"input": [[5], [99999]]}, "invalid_value", "input[1][0]"),
        ({"input": [[5], [7] * 513]}, "context_length_exceeded", "input[1]"),
        ({"input": "ab" * 600}, "context_length_exceeded", "input"),
    ],
)
async def test_refusals_name_their_field_and_reach_no_decoder(fields: Any, code: str | None, param: str) -> None:
    pool = pool_of()
    answer = await call(app_of(pool), "POST", PATH, {"input": "x", **fields})
    assert (answer.status, answer.json["error"]["code"], answer.json["error"]["param"]) == (400, code, param)
    assert not pool.turns and not pool.reserved


async def test_an_input_may_fill_the_context() -> None:
    assert (await call(app_of(pool_of()), "POST", PATH, {"input": [7] * 512})).status == 200


async def test_a_decoder_without_embeddings_is_a_400() -> None:
    pool = pool_of()
    pool.submit_error = Unsupported("embeddings")
    answer = await call(app_of(pool), "POST", PATH, {"input": "x"})
    assert (answer.status, answer.json["error"]["code"]) == (400, "unsupported_operation")


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        ({"embedding": b""}, 500, "decoder_error"),
        ({"embedding": struct.pack("<2f", 1, float("nan"))}, 500, "decoder_nonfinite"),
        ({"error": WorkerLost(0, "x")}, 503, "worker_lost"),
    ],
)
async def test_what_is_no_embedding_is_an_error(script: Any, status: int, code: str) -> None:
    answer = await call(app_of(pool_of(**script)), "POST", PATH, {"input": "x"})
    assert (answer.status, answer.json["error"]["code"]) == (status, code)


async def test_a_long_list_has_few_turns_at_once_and_leaving_cancels_them() -> None:
    pool = pool_of(by_hand=True)
    async with Call(app_of(pool), "POST", PATH, {"input": ["x"] * 100}) as request:
        await pool.submitted(AT_ONCE)
        pool.finish(pool.turns[1])  # not the first: it is waited for in order
        pool.turns[0].embedding = pool.turns[1].embedding = PACKED
        pool.finish(pool.turns[0])
        await pool.submitted(AT_ONCE + 2)
        assert len(pool.live_turns) == AT_ONCE
        request.leave()
    assert len(pool.turns) == AT_ONCE + 2 and not pool.live_turns


async def test_a_queue_that_fills_on_the_way_cancels_the_rest() -> None:
    pool = pool_of(by_hand=True)
    async with Call(app_of(pool), "POST", PATH, {"input": ["x"] * 100}) as request:
        await pool.submitted(AT_ONCE)
        pool.submit_error = Overloaded("requests", 1, 3.0)
        pool.turns[0].embedding = PACKED
        pool.finish(pool.turns[0])
        await request.finished()
    assert (request.status, request.headers["retry-after"]) == (429, "3")
    assert not pool.live_turns
