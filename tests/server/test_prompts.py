"""From a request to token ids, room in the context, and choices (B71)."""

import json
from pathlib import Path
from typing import Any

import pytest

from server import prompts
from server.badrequest import BadRequest
from server.schemas import ChatCompletionRequest, CompletionRequest, decode
from server.tokenizer import Tokenizer
from tests import tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(tiny_model.build(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture(scope="module")
def without_bos(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("model") / "without_bos.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gguf.GGUFWriter.add_add_bos_token", lambda writer, _: writer.add_bool(
            "tokenizer.ggml.add_bos_token", False
        ))  # fmt: skip
        return Tokenizer.load(tiny_model.build(path))


def completion(**fields: Any) -> CompletionRequest:
    return decode(CompletionRequest, json.dumps({"prompt": "x", **fields}).encode())


def chat(**fields: Any) -> ChatCompletionRequest:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    return decode(ChatCompletionRequest, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [3]], ["a", [3]]),
    ],
)
def test_prompts_come_apart_as_openai_defines_them(prompt: Any, expected: Any) -> None:
    assert prompts.inputs(completion(prompt=prompt)) == expected


@pytest.mark.parametrize("prompt", [[], ["a", 1], [1, "a"], [1, [2]]])
def test_prompt_of_no_kind_is_refused(prompt: Any) -> None:
    with pytest.raises(BadRequest) as refusal:
        prompts.inputs(completion(prompt=prompt))
    assert refusal.value.param == "prompt"


def test_turns_of_one_request_are_bounded() -> None:
    assert len(prompts.inputs(completion(prompt=["a"] * 16, n=8))) == 16
    with pytest.raises(BadRequest, match="136 choices"):
        prompts.inputs(completion(prompt=["a"] * 17, n=8))


def test_text_gets_bos_and_its_special_tokens_count(tiny: Tokenizer) -> None:
    ids = prompts.read("<|im_start|>hi", tiny)
    assert ids[:2] == [tiny_model.BOS, tiny_model.IM_START]


def test_ids_are_taken_as_they_are(tiny: Tokenizer) -> None:
    assert prompts.read([7, 8, 9], tiny) == [7, 8, 9]


@pytest.mark.parametrize("token", [-1, tiny_model.VOCAB_SIZE, 2**63])
def test_id_outside_the_vocabulary_is_refused_by_its_place(tiny: Tokenizer, token: int) -> None:
    with pytest.raises(BadRequest, match=r"ids are 0 to 1705") as refusal:
        prompts.read_all(prompts.inputs(completion(prompt=[[5], [6, token]])), tiny)
    assert refusal.value.param == "prompt[1][1]"


def test_empty_text_is_bos_alone_where_the_model_has_one(tiny: Tokenizer, without_bos: Tokenizer) -> None:
    assert prompts.read_all(prompts.inputs(completion(prompt="")), tiny) == [[tiny_model.BOS]]
    with pytest.raises(BadRequest, match="prompt is empty"):
        prompts.read_all(prompts.inputs(completion(prompt="")), without_bos)


@pytest.mark.parametrize(("prompt", "param"), [([[]], "prompt"), ([[1], []], "prompt[1]")])
def test_empty_ids_are_refused(tiny: Tokenizer, prompt: Any, param: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        prompts.read_all(prompts.inputs(completion(prompt=prompt)), tiny)
    assert refusal.value.param == param


def test_bos_written_by_a_chat_template_is_not_doubled(tiny: Tokenizer, without_bos: Tokenizer) -> None:
    for text in ("<s>hi", "hi"):
        ids = prompts.read_chat(text, tiny)
        assert ids.count(tiny_model.BOS) == 1
        assert tiny.decode(ids) == "<s>hi"
    assert prompts.read_chat("<s>hi", without_bos)[0] == tiny_model.BOS
    assert tiny_model.BOS not in prompts.read_chat("hi", without_bos)


CONTEXT = 100


@pytest.mark.parametrize("prompt_tokens", [CONTEXT, CONTEXT + 1, 10 * CONTEXT])
@pytest.mark.parametrize("request_of", [completion, chat])
def test_prompt_that_fills_the_context_is_refused_with_the_numbers(prompt_tokens: int, request_of: Any) -> None:
    with pytest.raises(BadRequest) as refusal:
        prompts.new_tokens(request_of(max_tokens=1), prompt_tokens=prompt_tokens, context=CONTEXT)
    assert refusal.value.code == "context_length_exceeded"
    assert refusal.value.status == 400
    assert f"context is {CONTEXT} tokens" in refusal.value.message
    assert f"has {prompt_tokens}" in refusal.value.message


@pytest.mark.parametrize(
    ("fields", "prompt_tokens", "expected"),
    [
        ({}, 10, 16),
        ({}, 90, 10),
        ({"max_tokens": 5}, 10, 5),
        ({"max_tokens": 90}, 10, 90),
        ({"max_tokens": 91}, 10, 90),
        ({"max_tokens": 5}, 99, 1),
        ({"max_tokens": -1}, 10, 90),
    ],
)
def test_max_tokens_of_a_completion_is_lowered_to_the_room_left(
    fields: dict[str, Any], prompt_tokens: int, expected: int
) -> None:
    assert prompts.new_tokens(completion(**fields), prompt_tokens=prompt_tokens, context=CONTEXT) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 90),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_completion_tokens": 1000}, 90),
    ],
)
def test_chat_may_use_the_room_left_unless_it_says(fields: dict[str, Any], expected: int) -> None:
    assert prompts.new_tokens(chat(**fields), prompt_tokens=10, context=CONTEXT) == expected


def test_refusal_for_the_context_names_the_prompt_of_a_list() -> None:
    with pytest.raises(BadRequest) as refusal:
        prompts.new_tokens(completion(), prompt_tokens=200, context=CONTEXT, param="prompt[3]")
    assert refusal.value.param == "prompt[3]"


def test_choices_are_numbered_prompt_by_prompt() -> None:
    listed = [(c.index, c.prompt_index, c.number) for c in prompts.choices(completion(n=2), prompts=2)]
    assert listed == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]


def test_only_long_texts_need_a_thread(tiny: Tokenizer) -> None:
    assert not prompts.needs_thread(["short", [1] * 10_000], tiny)
    assert prompts.needs_thread([[1] * 100_000], tiny)
    assert prompts.needs_thread(["short", "long " * 10_000], tiny)
    assert prompts.needs_thread(["many"] * 10_000, tiny)
