"""Chat templates: what they get, what they may do, and what becomes of their errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from server.badrequest import BadRequest
from server.chat import ChatTemplate, TemplateError, is_short
from server.schemas import ChatCompletionRequest, ChatMessage, decode
from tests import tiny_model


def messages(*items: dict[str, Any]) -> list[ChatMessage]:
    return decode(ChatCompletionRequest, json.dumps({"messages": items}).encode()).messages


def render(source: str, *items: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(source, bos="<s>", eos="</s>").render(messages(*items or [USER]), **options)


USER = {"role": "user", "content": "hello"}
SHOW = "{{ messages | tojson }}"


def test_model_s_template_is_used() -> None:
    template = ChatTemplate.from_gguf(tiny_model.CHAT_TEMPLATE)
    assert template.render(messages(USER)) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert not template.is_fallback
    assert template.stops == ()


def test_generation_prompt_may_be_left_out() -> None:
    assert render(tiny_model.CHAT_TEMPLATE, add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"


def test_base_model_gets_a_transcript_and_a_stop_string() -> None:
    template = ChatTemplate.from_gguf(None)
    text = template.render(
        messages(
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "content": "Hi!"},
            {"role": "user", "content": "Bye"},
        )
    )
    assert text == "Be brief.\n\nUser: hello\n\nAssistant: Hi!\n\nUser: Bye\n\nAssistant:"
    assert template.is_fallback
    assert template.stops == ("\nUser:",)


def test_file_overrides_the_model_s_template(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("mine: {{ messages[0].content }}", "utf-8")
    template = ChatTemplate.from_gguf(tiny_model.CHAT_TEMPLATE, override=path)
    assert template.render(messages(USER)) == "mine: hello"


def test_missing_override_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="absent"):
        ChatTemplate.from_gguf(None, override=tmp_path / "absent.jinja")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hello"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ tools is none }}", "True"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ undefined_name }}", ""),
    ],
)
def test_environment_is_the_one_templates_are_written_for(source: str, expected: str) -> None:
    assert render(source) == expected


def test_tools_and_further_variables_reach_the_template_but_replace_none_of_ours() -> None:
    source = "{{ tools[0].type }} {{ enable_thinking }} {{ bos_token }}"
    text = render(source, tools=[{"type": "function"}], variables={"enable_thinking": False, "bos_token": "evil"})
    assert text == "function False <s>"


@pytest.mark.parametrize(
    ("message", "plain"),
    [
        ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
        ({"role": "user", "content": "x", "name": "Ann"}, {"role": "user", "content": "x", "name": "Ann"}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "a\nb"},
        ),
        ({"role": "user", "content": []}, {"role": "user", "content": ""}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        (
            {"role": "tool", "content": "4", "tool_call_id": "t"},
            {"role": "tool", "content": "4", "tool_call_id": "t"},
        ),
    ],
)
def test_message_is_plain_for_the_template(message: dict[str, Any], plain: dict[str, Any]) -> None:
    assert json.loads(render(SHOW, message)) == [plain]


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [('{"x": 1}', {"x": 1}), ("not json", "not json"), ("[1]", "[1]"), ("[" * 10_000, "[" * 10_000)],
)
def test_tool_call_arguments_are_an_object_if_they_are_one(arguments: str, seen: Any) -> None:
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert json.loads(render(SHOW, message))[0]["tool_calls"][0]["function"]["arguments"] == seen


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "system", "content": None}, "messages[1].content"),
    ],
)
def test_message_that_can_t_be_rendered_is_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        render(SHOW, USER, message)
    assert refusal.value.param == param


def test_template_s_own_refusal_is_passed_on() -> None:
    with pytest.raises(TemplateError, match="roles must alternate") as refusal:
        render("{{ raise_exception('roles must alternate') }}")
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].missing.deeper }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{% for i in range(1000000) %}x{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_template_s_misdeed_is_a_refusal(source: str) -> None:
    with pytest.raises(TemplateError, match="refused the conversation"):
        render(source)


def test_output_is_bounded() -> None:
    with pytest.raises(TemplateError, match="over 100 characters"):
        render("{% for i in range(200) %}x{% endfor %}", limit=100)


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% unknown %}", "{% for %}"])
def test_text_that_is_no_template_is_refused_when_compiled(source: str) -> None:
    with pytest.raises(TemplateError, match="can't be compiled"):
        ChatTemplate(source)


def test_long_conversation_is_not_for_the_event_loop() -> None:
    assert is_short(messages(USER))
    assert not is_short(messages({"role": "user", "content": "x" * 50_000}))
    assert not is_short(messages(*[USER] * 21))
