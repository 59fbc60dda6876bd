"""The JSON that goes in and out: OpenAI's names and shapes, llama.cpp's where OpenAI has none.

Requests. Ranges stand in the types, so the OpenAPI document shows the same ones that decode() enforces. A field that is
null counts as absent; a field that we don't know is ignored, as OpenAI's own server and llama.cpp's do. A field that we
know and can't honour is refused (`check`), never ignored: an answer in the wrong shape is worse than an error.

Responses. A field typed `| UnsetType` is left out of the JSON when unset; one typed `| None` is written as null.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from server.badrequest import BadRequest

STOPS_LIMIT = 4
STOP_CHARACTERS_LIMIT = 256
CHOICES_LIMIT = 8

StopString = Annotated[str, Meta(min_length=1, max_length=STOP_CHARACTERS_LIMIT)]
StopList = Annotated[list[StopString], Meta(max_length=STOPS_LIMIT)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Probability = Annotated[float, Meta(ge=0, le=1)]
MaxTokens = Annotated[int, Meta(ge=-1, description="-1: as many as the context has room for.")]
Role = Literal["system", "developer", "user", "assistant", "tool"]


# ---- requests ------------------------------------------------------------------------------------------------------


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    type: str
    json_schema: Any = None


class GenerationFields(Struct, kw_only=True):
    """What both kinds of completion request have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_LIMIT)] | None = None
    stop: StopString | StopList | None = None
    user: str | None = None

    temperature: Annotated[float, Meta(ge=0, le=10, description="1 unless given; 0 is greedy.")] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, description="0 or -1: no limit.")] | None = None
    min_p: Probability | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, description="Tokens looked back; -1: the context.")] | None = None
    penalty_last_n: Annotated[int, Meta(ge=-1, description="Other name of repeat_last_n.")] | None = None
    seed: Annotated[int, Meta(description="-1: a random one.")] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=300)] | None = None
    ignore_eos: bool | None = None

    grammar: Annotated[str, Meta(max_length=65536, description="GBNF.")] | None = None
    response_format: ResponseFormat | None = None

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream and self.stream_options and self.stream_options.include_usage)

    def forget_text(self) -> None:
        """Let go of what is of no more use once the prompts are token ids; it may be megabytes."""
        self.user = None

    def check(self) -> None:
        """Raise BadRequest for what is well formed and can't be honoured."""
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is only allowed when stream is true.", param="stream_options")
        if self.max_tokens == 0:
            raise BadRequest("max_tokens must be at least 1.", param="max_tokens")
        self._check_response_format()

    def _check_response_format(self) -> None:
        if self.response_format is None or self.response_format.type == "text":
            return
        if self.response_format.type != "json_object":
            raise BadRequest(
                f"response_format of type {self.response_format.type!r} is not supported; "
                "use text, json_object, or a GBNF grammar in the field `grammar`.",
                param="response_format.type",
                code="unsupported_value",
            )
        if self.grammar:
            raise BadRequest("Give either grammar or response_format json_object, not both.", param="response_format")


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions. prompt: a text, its token ids, or a list of either."""

    prompt: str | list[int | str | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def forget_text(self) -> None:
        GenerationFields.forget_text(self)
        self.prompt = ""

    def check(self) -> None:
        GenerationFields.check(self)
        if self.suffix:
            raise BadRequest("suffix is not supported; leave it out.", param="suffix", code="unsupported_parameter")
        if self.best_of is not None and self.best_of != self.choices_per_prompt:
            raise BadRequest(
                "best_of is not supported beyond n; leave it out and choose among n choices.",
                param="best_of",
                code="unsupported_parameter",
            )
        if self.echo and self.logprobs is not None:
            raise BadRequest(
                "echo with logprobs is not supported: the decoder gives no logprobs for prompt tokens.",
                param="echo",
                code="unsupported_parameter",
            )


class ContentPart(Struct, kw_only=True):
    type: str
    text: str | None = None


class ChatMessage(Struct, kw_only=True):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions. chat_template_kwargs: further names for the model's chat template."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def forget_text(self) -> None:
        GenerationFields.forget_text(self)
        self.messages = []
        self.tools = self.tool_choice = self.chat_template_kwargs = None

    def check(self) -> None:
        GenerationFields.check(self)
        if self.max_completion_tokens == 0:
            raise BadRequest("max_completion_tokens must be at least 1.", param="max_completion_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
        if self.tools and self.tool_choice != "none":
            raise BadRequest(
                'Tool calls are not supported; leave out tools, or set tool_choice to "none".',
                param="tools",
                code="unsupported_parameter",
            )


class EmbeddingRequest(Struct, kw_only=True):
    """POST /v1/embeddings. input: a text, its token ids, or a list of either."""

    input: str | list[int | str | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None

    def check(self) -> None:
        if self.dimensions is not None:
            raise BadRequest(
                "dimensions is not supported; leave it out, and cut the vectors yourself if the model allows that.",
                param="dimensions",
                code="unsupported_parameter",
            )


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize, as llama-server has it, with its defaults."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Struct, kw_only=True):
    tokens: list[int]


# ---- responses -----------------------------------------------------------------------------------------------------


class PromptTokensDetails(Struct, kw_only=True):
    cached_tokens: int = 0


class Usage(Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class Timings(Struct, kw_only=True):
    """llama.cpp's names, then ours. Times in milliseconds. cache_n prompt tokens came from the cache, prompt_n were
    read."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET
    queue_ms: float = 0.0
    worker: int | UnsetType = UNSET
    moves: int = 0


class CompletionLogprobs(Struct, kw_only=True):
    """Parallel lists, one entry per token. text_offset: characters from the start of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(Struct, kw_only=True):
    """Answer of /v1/completions, and each of its chunks."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET


class TopLogprob(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(Struct, kw_only=True):
    content: list[TokenLogprob]


class AssistantMessage(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletion(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings | UnsetType = UNSET


class ChatDelta(Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET


class Embedding(Struct, kw_only=True):
    """embedding: numbers, or base64 of little-endian float32."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class EmbeddingUsage(Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class TokenPiece(Struct, kw_only=True):
    """piece: its text, or its bytes where these are no text."""

    id: int
    piece: str | list[int]


class TokenizeResponse(Struct, kw_only=True):
    tokens: Sequence[int | TokenPiece]


class DetokenizeResponse(Struct, kw_only=True):
    content: str


class Model(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ringfence"


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class ErrorBody(Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorEnvelope(Struct, kw_only=True):
    error: ErrorBody


# ---- reading a request ---------------------------------------------------------------------------------------------

Request = TypeVar(
    "Request", CompletionRequest, ChatCompletionRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest
)

_DECODERS: dict[type[Struct], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind)
    for kind in (CompletionRequest, ChatCompletionRequest, EmbeddingRequest, TokenizeRequest, DetokenizeRequest)
}
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")


def decode(kind: type[Request], body: bytes | bytearray | memoryview) -> Request:
    """A checked request from a JSON body. Raises BadRequest that names the field at fault."""
    try:
        request = _DECODERS[kind].decode(body)
    except msgspec.ValidationError as error:
        raise _misfit(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The body is not valid JSON: {_first_line(error)}.", code="invalid_json") from None
    if isinstance(request, GenerationFields | EmbeddingRequest):
        request.check()
    checked: Request = request
    return checked


def _misfit(text: str) -> BadRequest:
    match = _PATH.match(text)
    what, path = (match["what"], match["path"]) if match else (text, None)
    missing = _MISSING.search(what)
    if missing:
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return BadRequest(f"{name} is missing; it is required.", param=name, code="missing_required_parameter")
    if not path:
        return BadRequest(f"{what}.", code="invalid_type")
    return BadRequest(f"{path}: {what[:1].lower()}{what[1:]}.", param=path, code="invalid_value")


def _first_line(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return (str(error).splitlines() or [""])[0].removeprefix("JSON is malformed: ").rstrip(".")
