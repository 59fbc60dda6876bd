"""From a request's fields to a decoder's options."""

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_cpp import llama_cpp as libllama

from native.sampling import SamplingOptions
from server.badrequest import BadRequest
from server.sampling import BAN, JSON_GRAMMAR, effective_seed, sampling_options, stop_strings
from server.schemas import ChatCompletionRequest, CompletionRequest, decode
from server.tokenizer import Tokenizer
from tests import tiny_model


def options(choice: int = 0, **fields: Any) -> SamplingOptions:
    request = decode(CompletionRequest, json.dumps({"prompt": "x", **fields}).encode())
    return sampling_options(request, vocabulary=100, eog=frozenset({2, 4}), context=1000, choice=choice)


def chat_options(**fields: Any) -> SamplingOptions:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    request = decode(ChatCompletionRequest, json.dumps(body).encode())
    return sampling_options(request, vocabulary=100, eog=frozenset(), context=1000)


def test_request_without_fields_is_sampled_at_temperature_1() -> None:
    assert options() == SamplingOptions(temperature=1.0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 1e-9}, {"temperature": 0.0}),
        ({"temperature": 0.7, "top_p": 0}, {"temperature": 0.0, "top_p": 1.0}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"top_k": 40}, {"top_k": 40}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"min_p": 0.05}, {"min_p": 0.05}),
        ({"repeat_penalty": 1.1}, {"penalty_repeat": 1.1}),
        ({"frequency_penalty": -2}, {"penalty_freq": -2.0}),
        ({"presence_penalty": 2}, {"penalty_present": 2.0}),
        ({"repeat_last_n": 10}, {"penalty_last_n": 10}),
        ({"penalty_last_n": 0}, {"penalty_last_n": 0}),
        ({"repeat_last_n": -1}, {"penalty_last_n": 1000}),
        ({"repeat_last_n": 10**9}, {"penalty_last_n": 1000}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"logprobs": 5}, {"logprobs": 5}),
        ({"logit_bias": {"7": 1.5, "3": -100}}, {"logit_bias": ((3, BAN), (7, 1.5))}),
        ({"ignore_eos": True}, {"logit_bias": ((2, BAN), (4, BAN))}),
        ({"ignore_eos": True, "logit_bias": {"4": 50, "1": 1}}, {"logit_bias": ((1, 1.0), (2, BAN), (4, BAN))}),
        ({"grammar": "root ::= [a]"}, {"grammar": "root ::= [a]"}),
        ({"grammar": ""}, {"grammar": None}),
        ({"response_format": {"type": "json_object"}}, {"grammar": JSON_GRAMMAR}),
        ({"response_format": {"type": "text"}}, {"grammar": None}),
    ],
)
def test_field_becomes_its_option(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    given_options = options(**fields)
    assert {name: getattr(given_options, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 4}, 4)],
)
def test_chat_asks_for_logprobs_in_two_fields(fields: dict[str, Any], logprobs: int | None) -> None:
    assert chat_options(**fields).logprobs == logprobs


@pytest.mark.parametrize(
    ("seed", "choice", "effective"),
    [
        (None, 0, 0),
        (None, 3, 0),
        (-1, 2, 0),
        (0, 0, 2**32 - 1),
        (1, 0, 1),
        (1, 3, 4),
        (2**32, 0, 2**32 - 1),
        (2**32 + 5, 0, 5),
        (2**32 - 1, 1, 2**32 - 1),
        (-2, 0, 2**32 - 2),
    ],
)
def test_seed_is_taken_into_a_decoder_s_range(seed: int | None, choice: int, effective: int) -> None:
    assert effective_seed(seed, choice=choice) == effective


@given(seed=st.integers(), choice=st.integers(0, 7))
def test_any_seed_but_minus_one_is_a_seed(seed: int, choice: int) -> None:
    assert seed == -1 or 1 <= effective_seed(seed, choice=choice) < 2**32


@pytest.mark.parametrize("key", ["100", "-1", "1.0", "one", "", "٣", "1" * 50, " 1"])
def test_logit_bias_of_what_is_no_token_is_refused(key: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        options(logit_bias={key: 1})
    assert refusal.value.param == "logit_bias"


@pytest.mark.parametrize(("stop", "stops"), [(None, ()), ("a", ("a",)), (["a", "b", "a"], ("a", "b")), ([], ())])
def test_stop_strings_are_a_tuple_without_repeats(stop: Any, stops: tuple[str, ...]) -> None:
    request = decode(CompletionRequest, json.dumps({"prompt": "x", "stop": stop}).encode())
    assert stop_strings(request) == stops


class _Grammar:
    """libllama's own judgement of a text against a grammar, one byte token at a time."""

    def __init__(self, tokenizer: Tokenizer, grammar: str) -> None:
        self._tokenizer = tokenizer  # owns the vocabulary
        self._sampler = libllama.llama_sampler_init_grammar(tokenizer._vocab, grammar.encode(), b"root")
        assert self._sampler

    def accepts(self, text: str) -> bool:
        """Whether every byte of it is allowed, and it may end there."""
        sampler = libllama.llama_sampler_clone(self._sampler)
        try:
            for byte in text.encode():
                token = tiny_model.FIRST_BYTE + byte
                if not self._allows(sampler, token):
                    return False
                libllama.llama_sampler_accept(sampler, token)
            return self._allows(sampler, tiny_model.EOS)
        finally:
            libllama.llama_sampler_free(sampler)

    def _allows(self, sampler: Any, token: int) -> bool:
        entry = (libllama.llama_token_data * 1)(libllama.llama_token_data(token, 1.0, 0.0))
        array = libllama.llama_token_data_array(entry, 1, -1, False)
        libllama.llama_sampler_apply(sampler, ctypes.byref(array))
        return bool(entry[0].logit > -1e30)


@pytest.fixture(scope="module")
def json_grammar(tmp_path_factory: pytest.TempPathFactory) -> _Grammar:
    path: Path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return _Grammar(Tokenizer.load(tiny_model.build(path)), JSON_GRAMMAR)


@pytest.mark.parametrize(
    ("text", "is_accepted"),
    [
        ("{}", True),
        ('{"a": 1}', True),
        ('{"a": [1, -2.5e10, true, null], "b": {"c": "d\\n\\u00e9é"}}', True),
        ('{\n  "a": {\n    "b": []\n  }\n}', True),
        ("[]", False),
        ('"text"', False),
        ('{"a"}', False),
        ('{"a": 01}', False),
        ('{"a": 1,}', False),
        ('{"a": "\n"}', False),
        ("{} ", False),
    ],
)
def test_json_grammar_takes_json_objects_and_nothing_else(json_grammar: _Grammar, text: str, is_accepted: bool) -> None:
    assert json_grammar.accepts(text) is is_accepted
