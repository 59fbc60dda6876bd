"""What the real server answers: the last tokens, finish_reason, usage, stop strings and characters, whole and streamed, and
through OpenAI's SDK with its strict models."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from tests import tiny_model
from tests.fakes.echo import echo_prompt
from tests.fakes.http import ids_of
from tests.whole.scripted import CONTEXT, KEY, Scripted, new_marker, text_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass
class Answer:
    """The only choice of an answer, streamed or whole, as far as both have it."""

    text: str
    reason: str
    tokens: int


async def whole(server: Scripted, body: dict[str, Any]) -> Answer:
    status, answer = await server.call("POST", COMPLETIONS, body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert answer["timings"]["predicted_n"] == answer["usage"]["completion_tokens"]
    return Answer(choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"])


async def streamed(server: Scripted, body: dict[str, Any]) -> Answer:
    async with server.peer() as peer:
        peer.ask("POST", COMPLETIONS, {**body, "stream": True, "stream_options": {"include_usage": True}})
        status, _ = await peer.head()
        assert status == 200, await peer.rest()
        *events, usage, done = await peer.events()
    assert done == "[DONE]" and usage["choices"] == []
    choices = [choice for event in events for choice in event["choices"]]
    (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return Answer("".join(choice["text"] for choice in choices), reason, usage["usage"]["completion_tokens"])


async def both(server: Scripted, body: dict[str, Any]) -> Answer:
    """The answer, which is the same whole and streamed."""
    one, other = await asyncio.gather(whole(server, body), streamed(server, body))
    assert one == other
    return one


# ---- the last tokens (B63) -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("burst", [1, 7, 64])
async def test_no_token_is_lost_however_they_come(server: Scripted, burst: int) -> None:
    server.stage.script(burst=burst)
    gate = asyncio.Semaphore(8)

    async def one(tokens: int) -> None:
        marker = new_marker()
        async with gate:
            answer = await both(server, {"prompt": echo_prompt(marker), "max_tokens": tokens})
        assert answer == Answer(text_of(marker, tokens), "length", tokens)

    await asyncio.gather(*map(one, [1, 2] * 6 + [3, 6, 7, 8, 13, 50, 63, 64, 65, 300]))


# ---- finish_reason (B65) -------------------------------------------------------------------------------------------


@dataclass
class Case:
    """What the decoder answers, what is asked of it, and what comes of that."""

    say: list[int]
    text: str
    reason: str
    tokens: int
    ask: dict[str, Any] = field(default_factory=dict)
    is_stopped: bool = False  # the decoder is told to stop


EOS = [tiny_model.EOS]
FINISHES = {
    "an end token": Case([*ids_of("done"), *EOS], "done", "stop", 5),
    "an end token on the last place": Case([*ids_of("done"), *EOS], "done", "stop", 5, {"max_tokens": 5}),
    "the first token is the end": Case(EOS, "", "stop", 1),
    "max_tokens": Case(ids_of("goes on"), "go", "length", 2, {"max_tokens": 2}),
    "max_tokens just before the end": Case([*ids_of("done"), *EOS], "done", "length", 4, {"max_tokens": 4}),
    "a stop string": Case(ids_of("one STOP two"), "one ", "stop", 8, {"stop": "STOP"}, True),
    "a stop string on the last place": Case(ids_of("one STOP"), "one ", "stop", 8, {"stop": "STOP", "max_tokens": 8}),
    "half a stop string on the last place": Case(
        ids_of("one STOP"), "one STO", "length", 7, {"stop": "STOP", "max_tokens": 7}
    ),
    "half a stop string before the end": Case([*ids_of("one STO"), *EOS], "one STO", "stop", 8, {"stop": "STOP"}),
}


@pytest.mark.parametrize("name", FINISHES)
async def test_finish_reason(server: Scripted, name: str) -> None:
    case, marker = FINISHES[name], new_marker()
    server.stage.script(rules=[{"when": {"marker": marker}, "tokens": case.say, "token_delay_s": 0.001}])
    body = {"prompt": echo_prompt(marker), "max_tokens": 100, **case.ask}
    assert await both(server, body) == Answer(case.text, case.reason, case.tokens)
    if case.is_stopped:
        await server.stops(server.gens(marker))


async def test_a_full_context_ends_with_length(server: Scripted) -> None:
    marker, room = new_marker(), 24
    answer = await both(server, {"prompt": echo_prompt(marker, CONTEXT - room), "max_tokens": 1000})
    assert (answer.reason, answer.tokens) == ("length", room)


@pytest.mark.parametrize(
    ("keys", "code"),
    [({"error_at": 3}, "decoder_error"), ({"nonfinite_at": 3}, "decoder_nonfinite")],
)
async def test_a_failure_is_an_error_and_never_a_finish_reason(server: Scripted, keys: Any, code: str) -> None:
    marker = new_marker()
    server.stage.script(rules=[{"when": {"marker": marker}, **keys}])
    body = {"prompt": echo_prompt(marker), "max_tokens": 9}
    status, answer = await server.call("POST", COMPLETIONS, body)
    assert (status, answer["error"]["code"]) == (500, code)
    async with server.peer() as peer:
        peer.ask("POST", COMPLETIONS, {**body, "stream": True})
        await peer.head()
        *texts, last = await peer.events()
    assert last["error"]["code"] == code
    assert [choice["finish_reason"] for event in texts for choice in event["choices"]] == [None] * len(texts)
    assert 'ringfence_finishes_total{model="tiny",reason="error"}' in await server.metrics()


# ---- stop strings and characters (B67, B68) ------------------------------------------------------------------------

STOPS: list[tuple[str, Any, str]] = [
    ("one STOP two", "STOP", "one "),
    ("one STOPPED", ["STOPPED", "STOP"], "one "),
    ("STOP", "STOP", ""),
    ("one STO two STOPPE", "STOPPED", "one STO two STOPPE"),
    ("ein schönes Ende, dann", "önes", "ein sch"),
    ("a 😀 b", "😀", "a "),
    ("a 😁 b", "😀", "a 😁 b"),  # the two begin with the same three bytes
    ("\n\nUser: x", ["User:", "\n\n\n"], "\n\n"),
    ("xabcdy", ["abcd", "bc"], "xa"),
    ("ababac", "abac", "ab"),
]


@pytest.mark.parametrize("burst", [1, 2, 3, 5, 100])
async def test_stop_strings_at_every_byte(server: Scripted, burst: int) -> None:
    """A token per byte; `burst` of them come together."""
    markers = [new_marker() for _ in STOPS]
    server.stage.script(
        burst=burst,
        rules=[{"when": {"marker": m}, "tokens": ids_of(text)} for m, (text, _, _) in zip(markers, STOPS, strict=True)],
    )
    answers = await asyncio.gather(
        *(
            both(server, {"prompt": echo_prompt(marker), "max_tokens": 100, "stop": stop})
            for marker, (_, stop, _) in zip(markers, STOPS, strict=True)
        )
    )
    assert [answer.text for answer in answers] == [expected for _, _, expected in STOPS]


CHARACTERS = "👩‍👩‍👧 🇩🇪🇯🇵 漢字 é ñ नमस्ते 𝄞"


@pytest.mark.parametrize("burst", [1, 2, 3])
async def test_characters_are_whole_wherever_they_are_cut(server: Scripted, burst: int) -> None:
    ids, marker = ids_of(CHARACTERS), new_marker()
    server.stage.script(burst=burst, rules=[{"when": {"marker": marker}, "tokens": ids}])
    body = {"prompt": echo_prompt(marker)}
    lengths = [1, 2, 3, 4, 7, 8, 12, 30, 31, len(ids)]
    answers = await asyncio.gather(*(both(server, {**body, "max_tokens": length}) for length in lengths))
    for length, answer in zip(lengths, answers, strict=True):
        assert answer.text == CHARACTERS.encode()[:length].decode("utf-8", "replace")


async def test_bytes_that_are_no_text_raise_nothing(server: Scripted) -> None:
    data, marker = b"a\xff\xf0\x9f\xc3(\xed\xa0\x80z\x80", new_marker()
    ids = [tiny_model.FIRST_BYTE + byte for byte in data]
    server.stage.script(rules=[{"when": {"marker": marker}, "tokens": ids}])
    answer = await both(server, {"prompt": echo_prompt(marker), "max_tokens": 100})
    assert answer.text == data.decode("utf-8", "replace")


# ---- OpenAI's SDK (B66) --------------------------------------------------------------------------------------------


@pytest.fixture
def sdk(server: Scripted) -> Iterator[openai.OpenAI]:
    base = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=base, api_key=KEY, max_retries=0, _strict_response_validation=True) as client:
        yield client


def stream_of(sdk: openai.OpenAI, path: str, fields: dict[str, Any]) -> list[Any]:
    """A stream's chunks, validated. The SDK's model of a completion has no null finish_reason, which OpenAI's own server
    sends in each chunk but the last; so these are validated with one filled in."""
    if path == CHAT:
        return list(sdk.chat.completions.create(**fields, stream=True))
    with openai.OpenAI(base_url=sdk.base_url, api_key=KEY, max_retries=0) as loose:
        chunks = list(loose.completions.create(**fields, stream=True))
    for chunk in chunks:
        data = chunk.model_dump(exclude_unset=True)
        for choice in data["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        openai.types.Completion.model_validate(data, strict=True)
    return chunks


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("include", [True, False, None])
async def test_usage_through_the_sdk_strictly(
    server: Scripted, sdk: openai.OpenAI, path: str, n: int, include: bool | None
) -> None:
    fields: dict[str, Any] = {"model": "tiny", "n": n, "max_tokens": 1, "temperature": 0}
    if path == COMPLETIONS:
        create: Any = sdk.completions.create
        fields["prompt"] = "once"
    else:
        create = sdk.chat.completions.create
        fields["messages"] = [{"role": "user", "content": "once"}]
    answer = await asyncio.to_thread(create, **fields)
    options = {} if include is None else {"stream_options": {"include_usage": include}}
    chunks = await asyncio.to_thread(stream_of, sdk, path, {**fields, **options})
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["length"] * n == [choice.finish_reason for choice in answer.choices]
    assert answer.usage.completion_tokens == n
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + n
    empty = [chunk for chunk in chunks if not chunk.choices]
    if include:
        assert empty == [chunks[-1]]
        assert chunks[-1].usage.model_dump(exclude={"prompt_tokens_details"}) == answer.usage.model_dump(
            exclude={"prompt_tokens_details"}
        )
        assert all(chunk.usage is None for chunk in chunks[:-1])
    else:
        assert not empty and all(chunk.usage is None for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1


async def test_stream_options_without_a_stream_are_refused(server: Scripted, sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="stream_options"):
        await asyncio.to_thread(
            lambda: sdk.completions.create(
                model="tiny", prompt="x", extra_body={"stream_options": {"include_usage": True}}
            )
        )
