"""From a request to the turns it asks for: prompts as token ids, how much may be generated, and one turn per choice.

    inputs(request)             texts or ids as given                 cheap, raises BadRequest
    read(input, tokenizer)      ids, checked                          may need a thread: see needs_thread
    new_tokens(...)             max_new of a prompt, context checked
    choices(request, prompts)   prompt x n, in the order of `index`

Rules:

- A text of /v1/completions is tokenised with the model's bos, and special tokens written in it count as such
  (llama-server's rule: callers who format a chat by themselves depend on it). Ids are taken as they are, without bos.
- The text of a chat template likewise; if the template writes the bos itself and the tokenizer adds one, one of them
  goes.
- An empty text is the bos alone; a model without one can't start from nothing: 400.
- A prompt that leaves no room for one token in the context is refused (`context_length_exceeded`); it is never
  truncated.
- max_tokens beyond the room left is lowered to it, and the choice then ends with finish_reason `length`. Absent: 16 for
  /v1/completions (OpenAI's legacy default), the room left for chat. -1: the room left.
- A list of prompts with n choices makes prompts x n turns; choice j of prompt i has index i * n + j.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from server.badrequest import BadRequest
from server.schemas import ChatCompletionRequest, CompletionRequest
from server.tokenizer import Tokenizer, TooManyTokens

COMPLETION_MAX_TOKENS = 16
MANY_IDS = 32_768
TURNS_LIMIT = 128
"""Turns of one request: prompts x n."""

PromptInput = str | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One turn of a request. index: as in the response. number: of this prompt's choices, which the seed depends on."""

    index: int
    prompt_index: int
    number: int


def inputs(request: CompletionRequest) -> list[PromptInput]:
    """The prompts as given, each a text or ids. Raises BadRequest for a mixture, an empty list, or too many turns."""
    prompts = split(request.prompt)
    turns = len(prompts) * request.choices_per_prompt
    if turns > TURNS_LIMIT:
        raise BadRequest(
            f"This request asks for {turns} choices (prompts times n), and at most {TURNS_LIMIT} are allowed. "
            "Send several requests.",
            param="prompt",
        )
    return prompts


def split(given: str | list[int | str | list[int]], *, param: str = "prompt") -> list[PromptInput]:
    """What was given, as a list of texts and ids. Raises BadRequest for a mixture or an empty list."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise BadRequest(f"{param} is an empty list; give a text, token ids, or a list of either.", param=param)
    kinds = set(map(type, given))
    if kinds == {int}:
        return [cast(list[int], given)]
    if int in kinds:
        raise BadRequest(f"{param} mixes token ids with texts or lists; put the ids of each in a list.", param=param)
    return cast(list[PromptInput], given)


def needs_thread(prompts: Sequence[PromptInput], tokenizer: Tokenizer) -> bool:
    """Whether reading them would hold the event loop for more than a millisecond or two."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts) and sum(map(len, prompts)) > MANY_IDS:
        return True
    return bool(texts) and not tokenizer.is_short("".join(texts))


def read(
    prompt: PromptInput, tokenizer: Tokenizer, *, param: str = "prompt", context: int | None = None, output: int = 1
) -> list[int]:
    """Token ids of one prompt, at least one, that leave room for `output` tokens in the context. Raises BadRequest."""
    limit = None if context is None else context - output
    try:
        ids = _read(prompt, tokenizer, param=param, limit=limit)
    except TooManyTokens as error:
        assert context is not None
        raise _too_long(error.count, context, output=output, param=param) from None
    if not ids:
        raise BadRequest(f"{param} is empty, and this model has no token to begin a text with.", param=param)
    return ids


def _read(prompt: PromptInput, tokenizer: Tokenizer, *, param: str, limit: int | None) -> list[int]:
    """Raises TooManyTokens before anything is done for each of them."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, add_special=True, parse_special=True, limit=limit)
    if limit is not None and len(prompt) > limit:
        raise TooManyTokens(len(prompt))
    _check_ids(prompt, tokenizer.vocabulary, param=param)
    return prompt


def read_all(
    prompts: Sequence[PromptInput],
    tokenizer: Tokenizer,
    *,
    param: str = "prompt",
    context: int | None = None,
    output: int = 1,
) -> list[list[int]]:
    """`read` of each; errors name the one at fault (`prompt[2]`)."""
    names = [param] if len(prompts) == 1 else [f"{param}[{place}]" for place in range(len(prompts))]
    return [
        read(prompt, tokenizer, param=name, context=context, output=output)
        for prompt, name in zip(prompts, names, strict=True)
    ]


def read_chat(text: str, tokenizer: Tokenizer, *, context: int | None = None) -> list[int]:
    """Token ids of a rendered chat. Raises BadRequest."""
    if tokenizer.adds_bos and tokenizer.bos is not None:
        bos = tokenizer.piece(tokenizer.bos, special=True).decode("utf-8", "replace")
        text = text.removeprefix(bos) if bos else text
    return read(text, tokenizer, param="messages", context=context)


def _check_ids(ids: list[int], vocabulary: int, *, param: str) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocabulary):
        place, token = next((p, t) for p, t in enumerate(ids) if not 0 <= t < vocabulary)
        raise BadRequest(
            f"{param}[{place}] is {token}, which is no token of this model; ids are 0 to {vocabulary - 1}.",
            param=f"{param}[{place}]",
            code="invalid_value",
        )


def new_tokens(
    request: CompletionRequest | ChatCompletionRequest, *, prompt_tokens: int, context: int, param: str | None = None
) -> int:
    """How many tokens this prompt's choices may have, at least 1. Raises BadRequest if there is no room for any."""
    room = context - prompt_tokens
    asked, default = _asked(request)
    if room < 1:
        name = param or ("prompt" if isinstance(request, CompletionRequest) else "messages")
        raise _too_long(prompt_tokens, context, output=1, param=name)
    if asked is None:
        asked = default
    return room if asked is None or asked < 0 else min(asked, room)


def _too_long(tokens: int, context: int, *, output: int, param: str) -> BadRequest:
    room = "; it must leave room for at least one" if output else ""
    return BadRequest(
        f"This model's context is {context} tokens, and {param} has {tokens}{room}. Shorten it by "
        f"{tokens + output - context} tokens or more.",
        param=param,
        code="context_length_exceeded",
    )


def _asked(request: CompletionRequest | ChatCompletionRequest) -> tuple[int | None, int | None]:
    """max_tokens as given, and what counts without it (None: the room left)."""
    if isinstance(request, CompletionRequest):
        return request.max_tokens, COMPLETION_MAX_TOKENS
    given = request.max_completion_tokens
    return (request.max_tokens if given is None else given), None


def choices(request: CompletionRequest | ChatCompletionRequest, *, prompts: int = 1) -> Iterator[Choice]:
    """Every turn of the request, in the order of `index`."""
    n = request.choices_per_prompt
    for index in range(prompts * n):
        yield Choice(index=index, prompt_index=index // n, number=index % n)
