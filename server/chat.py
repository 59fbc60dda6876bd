"""A conversation as one text, by the model's own chat template (Jinja, in a sandbox).

The environment is the one templates are written for (Hugging Face's apply_chat_template): trim_blocks, lstrip_blocks,
loop controls, `raise_exception`, `strftime_now`, a `tojson` that leaves characters alone, and `{% generation %}`
blocks, whose body counts. The sandbox keeps a template from Python's objects, and its ranges and its output are
bounded; time is not, so callers render in a thread with a deadline unless the conversation is short.

What a template gets, besides its own variables: messages, tools, add_generation_prompt, bos_token, eos_token. A
message's text parts are joined by newlines (as llama.cpp and vLLM do), `developer` is `system`, an assistant's missing
content is an empty text, and a tool call's arguments are an object if they are the JSON of one.

A base model has no template. FALLBACK then writes a transcript ("User: ...", "Assistant:"); `is_fallback` says so, and
`stops` are the stop strings without which a base model would go on and write the user's next line as well.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.badrequest import BadRequest
from server.schemas import ChatMessage, ContentPart

OUTPUT_LIMIT = 16 * 1024 * 1024
SHORT_CHARACTERS, SHORT_MESSAGES = 20_000, 20
"""A conversation within both is rendered in well under a millisecond: 15 us per message by FALLBACK on a busy core."""

FALLBACK = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}{% else %}"
    "{{ message.role | capitalize }}: {{ message.content }}{% endif %}{{ '\n\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
FALLBACK_STOPS = ("\nUser:",)

_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


class TemplateError(BadRequest):
    """The template refused this conversation, or is broken."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param, code="chat_template_error")


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model wrote, for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. bos, eos: texts of these tokens, or "" where the model has none."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "", is_fallback: bool = False) -> None:
        """Raises TemplateError if `source` is no template."""
        self.source = source
        self.is_fallback = is_fallback
        self.stops = FALLBACK_STOPS if is_fallback else ()
        self._names = {"bos_token": bos, "eos_token": eos}
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"The chat template can't be compiled: {error}", param=None) from None

    @classmethod
    def from_gguf(
        cls, template: str | None, *, bos: str = "", eos: str = "", override: str | Path | None = None
    ) -> "ChatTemplate":
        """The template in the file `override` if given, else the model's, else FALLBACK. Raises TemplateError."""
        if override is not None:
            return cls(_contents(Path(override)), bos=bos, eos=eos)
        if template:
            return cls(template, bos=bos, eos=eos)
        return cls(FALLBACK, bos=bos, eos=eos, is_fallback=True)

    def __repr__(self) -> str:
        return f"ChatTemplate({len(self.source)} characters, is_fallback={self.is_fallback})"

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        limit: int = OUTPUT_LIMIT,
    ) -> str:
        """The conversation's text, at most `limit` characters. Raises BadRequest (a message) or TemplateError."""
        names = {
            **(variables or {}),
            **self._names,
            "messages": [_plain(message, f"messages[{place}]") for place, message in enumerate(messages)],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _joined(self._template.generate(names), limit)
        except _RENDER_ERRORS as error:
            raise TemplateError(f"The model's chat template refused the conversation: {error}") from None


def is_short(messages: Sequence[ChatMessage]) -> bool:
    """Whether `render` may run on the event loop."""
    if len(messages) > SHORT_MESSAGES:
        return False
    return sum(len(_text(message.content) or "") for message in messages) <= SHORT_CHARACTERS


def _joined(parts: Any, limit: int) -> str:
    out, size = [], 0
    for part in parts:
        out.append(part)
        size += len(part)
        if size > limit:
            raise TemplateError(f"The conversation is too long: the chat template wrote over {limit} characters.")
    return "".join(out)


def _plain(message: ChatMessage, name: str) -> dict[str, Any]:
    """A message as templates expect it. Raises BadRequest that names the part at fault."""
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(message, name),
    }
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return plain


def _content(message: ChatMessage, name: str) -> str:
    if isinstance(message.content, list):
        for place, part in enumerate(message.content):
            _check_part(part, f"{name}.content[{place}]")
    elif message.content is None and message.role != "assistant":
        raise BadRequest(f"{name}.content is missing; only an assistant's may be.", param=f"{name}.content")
    return _text(message.content) or ""


def _text(content: str | list[ContentPart] | None) -> str | None:
    return "\n".join(part.text or "" for part in content) if isinstance(content, list) else content


def _check_part(part: ContentPart, name: str) -> None:
    if part.type != "text":
        raise BadRequest(
            f"{name} is of type {part.type!r}; this server takes text only.", param=name, code="unsupported_value"
        )
    if part.text is None:
        raise BadRequest(f"{name}.text is missing; it is required.", param=f"{name}.text")


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _contents(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"The chat template file {path} can't be read: {error}", param=None) from None
