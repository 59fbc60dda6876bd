"""Reading requests: what is accepted, and which field each refusal names."""

import json
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.badrequest import BadRequest
from server.schemas import (
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    Completion,
    CompletionChoice,
    CompletionRequest,
    DetokenizeRequest,
    ErrorBody,
    ErrorEnvelope,
    Timings,
    TokenizeRequest,
    Usage,
    decode,
)

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def completion(**fields: Any) -> CompletionRequest:
    return decode(CompletionRequest, json.dumps({"prompt": "x", **fields}).encode())


def chat(**fields: Any) -> ChatCompletionRequest:
    return decode(ChatCompletionRequest, json.dumps({**HELLO, **fields}).encode())


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], ["a", "b"], [[1, 2], [3]]])
def test_prompt_may_be_text_ids_or_a_list_of_either(prompt: Any) -> None:
    assert completion(prompt=prompt).prompt == prompt


def test_null_counts_as_absent_and_unknown_fields_are_ignored() -> None:
    request = completion(temperature=None, stop=None, stream=None, n=None, cache_prompt=True, timings_per_token=True)
    assert request == completion()


def test_openai_fields_of_a_chat_are_read() -> None:
    request = chat(max_completion_tokens=5, logprobs=True, top_logprobs=3, stop=["a"], seed=-7, user="me")
    assert (request.max_completion_tokens, request.top_logprobs, request.seed) == (5, 3, -7)
    assert request.messages[0].content == "hello"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"max_tokens": "16"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": -1}, "min_p"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"response_format": {"type": "json_schema"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "grammar": "root ::= [a]"}, "response_format"),
    ],
)
def test_refusal_of_a_completion_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        completion(**fields)
    assert refusal.value.param == param
    assert param.split("[")[0].split(".")[0] in refusal.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tools"),
    ],
)
def test_refusal_of_a_chat_names_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        chat(**fields)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": []},
        {"stop": ["a", "b", "c", "d"]},
        {"suffix": ""},
        {"n": 2, "best_of": 2},
        {"max_tokens": -1},
        {"logprobs": 0},
        {"echo": True},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {"temperature": 0},
        {"logit_bias": {}},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
    ],
)
def test_edge_of_a_range_is_accepted(fields: dict[str, Any]) -> None:
    completion(**fields)


def test_tools_that_may_not_be_called_are_no_reason_to_refuse() -> None:
    assert chat(tools=[{"type": "function"}], tool_choice="none").tools


def test_usage_chunk_is_wanted_only_by_a_stream_that_asks() -> None:
    assert completion(stream=True, stream_options={"include_usage": True}).wants_usage_chunk
    assert not completion(stream=True, stream_options={}).wants_usage_chunk
    assert not completion(stream=True).wants_usage_chunk


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{}",
        b"[]",
        b"null",
        b"\xff",
        b'{"prompt":"\xff"}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"x"} x',
        b'{"prompt":"x","top_p":NaN}',
        b'{"prompt":"x","temperature":1e999}',
        b'{"prompt":"x","z":' + b"[" * 100_000,
    ],
    ids=lambda body: repr(body[:30]),
)
def test_body_that_is_no_request_is_refused_in_one_sentence(body: bytes) -> None:
    with pytest.raises(BadRequest) as refusal:
        decode(CompletionRequest, body)
    assert refusal.value.message.endswith(".")
    assert "\n" not in refusal.value.message
    assert refusal.value.code is not None


@settings(max_examples=200, deadline=None)
@given(body=st.binary(max_size=60) | st.dictionaries(st.text(max_size=5), st.text(max_size=5)).map(msgspec.json.encode))
def test_any_body_is_read_or_refused(body: bytes) -> None:
    for read in (
        partial(decode, CompletionRequest),
        partial(decode, ChatCompletionRequest),
        partial(decode, TokenizeRequest),
        partial(decode, DetokenizeRequest),
    ):
        try:
            read(body)
        except BadRequest as refusal:
            assert refusal.message


def test_tokenize_has_the_defaults_of_llama_server() -> None:
    request = decode(TokenizeRequest, b'{"content": "x"}')
    assert (request.add_special, request.parse_special, request.with_pieces) == (False, True, False)


def test_unset_fields_are_left_out_and_none_is_null() -> None:
    chunk = ChatCompletionChunk(
        id="c", created=1, model="m", choices=[ChatChunkChoice(index=0, delta=ChatDelta(content="x"))]
    )
    assert json.loads(msgspec.json.encode(chunk)) == {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "delta": {"content": "x"}, "logprobs": None, "finish_reason": None}],
    }
    chunk.usage = None
    assert json.loads(msgspec.json.encode(chunk))["usage"] is None


def test_completion_has_openai_s_shape() -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)
    answer = Completion(id="c", created=1, model="m", choices=[CompletionChoice(index=0, text="x")], usage=usage)
    body = json.loads(msgspec.json.encode(answer))
    assert body["object"] == "text_completion"
    assert body["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    assert "timings" not in body


def test_timings_leave_out_drafts_unless_there_were_some() -> None:
    timings = Timings(
        cache_n=1,
        prompt_n=2,
        prompt_ms=1.0,
        prompt_per_token_ms=1.0,
        prompt_per_second=1.0,
        predicted_n=3,
        predicted_ms=1.0,
        predicted_per_token_ms=1.0,
        predicted_per_second=1.0,
    )
    assert "draft_n" not in json.loads(msgspec.json.encode(timings))


def test_error_envelope_always_has_its_four_members() -> None:
    body = msgspec.json.encode(ErrorEnvelope(error=ErrorBody(message="no", type="invalid_request_error")))
    assert json.loads(body) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": None, "code": None}
    }
