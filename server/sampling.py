"""A request's sampling fields, as the decoder protocol has them.

Ranges are checked when a request is read (server/schemas.py). Here are the rules that need more than one field, or the
model:

- temperature is 1 unless given, as OpenAI has it. Below 1e-4, and with top_p 0, the draw is greedy (temperature 0).
- seed is any integer, taken modulo 2**32; 0 becomes 2**32 - 1, because 0 means "none" to a decoder. No seed, or -1
  (llama.cpp's "random"), leaves it to the pool to draw one. Choice j of a prompt is drawn with seed + j.
- top_k 0 and -1 say no limit, which is 0 to a decoder; absent, the decoder's own default counts.
- A logit bias of -100 bans the token (OpenAI's words); so does ignore_eos for every token that ends a generation.
- repeat_last_n (or penalty_last_n) is 64 unless given, at most the context; -1 is the context.
- response_format json_object is a grammar.
"""

from collections.abc import Mapping

from native.sampling import SamplingOptions
from server.badrequest import BadRequest
from server.schemas import ChatCompletionRequest, CompletionRequest, GenerationFields

BAN = -1_000.0
"""Added to a banned token's logit: below any logit, finite in float16."""

GREEDY_BELOW = 1e-4
LOOK_BACK = 64

JSON_GRAMMAR = r"""
root ::= object
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws ( member ( "," ws member )* )? "}"
member ::= string ":" ws value ws
array ::= "[" ws ( value ws ( "," ws value ws )* )? "]"
string ::= "\"" ( [^"\\\x00-\x1F] | "\\" ( ["\\/bfnrt] | "u" [0-9a-fA-F]{4} ) )* "\""
number ::= "-"? ( "0" | [1-9] [0-9]{0,15} ) ( "." [0-9]{1,16} )? ( [eE] [-+]? [0-9]{1,3} )?
ws ::= | " " | "\n" [ \t]{0,20}
"""
"""GBNF of a JSON object. White space and digits are bounded, or a model could write them for ever."""


def sampling_options(
    request: CompletionRequest | ChatCompletionRequest,
    *,
    vocabulary: int,
    eog: frozenset[int],
    context: int,
    choice: int = 0,
) -> SamplingOptions:
    """Options of choice number `choice` of each of the request's prompts. Raises BadRequest (logit_bias)."""
    return SamplingOptions(
        temperature=_temperature(request),
        top_k=None if request.top_k is None else max(0, request.top_k),
        top_p=request.top_p or 1.0,  # 0 is greedy, see _temperature
        min_p=request.min_p or 0.0,
        penalty_repeat=request.repeat_penalty or 1.0,
        penalty_freq=request.frequency_penalty or 0.0,
        penalty_present=request.presence_penalty or 0.0,
        penalty_last_n=_look_back(request, context=context),
        seed=effective_seed(request.seed, choice=choice),
        logit_bias=_logit_bias(request, vocabulary=vocabulary, eog=eog),
        logprobs=alternatives(request),
        grammar=_grammar(request),
    )


def effective_seed(seed: int | None, *, choice: int = 0) -> int:
    """A decoder's seed, 1 to 2**32 - 1, or 0 for none."""
    if seed is None or seed == -1:
        return 0
    return (seed + choice) % 2**32 or 2**32 - 1


def alternatives(request: CompletionRequest | ChatCompletionRequest) -> int | None:
    """How many alternatives per token are asked for: 0 for the chosen token only, None for no logprobs."""
    if isinstance(request, CompletionRequest):
        return request.logprobs
    return (request.top_logprobs or 0) if request.logprobs else None


def stop_strings(request: GenerationFields) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(dict.fromkeys(request.stop))


def _temperature(request: GenerationFields) -> float:
    temperature = 1.0 if request.temperature is None else request.temperature
    return 0.0 if temperature < GREEDY_BELOW or request.top_p == 0 else temperature


def _look_back(request: GenerationFields, *, context: int) -> int:
    given = request.repeat_last_n if request.repeat_last_n is not None else request.penalty_last_n
    if given is None:
        return LOOK_BACK
    return context if given < 0 else min(given, context)


def _logit_bias(request: GenerationFields, *, vocabulary: int, eog: frozenset[int]) -> tuple[tuple[int, float], ...]:
    biases = _parsed_biases(request.logit_bias or {}, vocabulary=vocabulary)
    if request.ignore_eos:
        biases |= dict.fromkeys(eog, BAN)
    return tuple(sorted(biases.items()))


def _parsed_biases(given: Mapping[str, float], *, vocabulary: int) -> dict[int, float]:
    biases = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < vocabulary):
            raise BadRequest(
                f"logit_bias: {key[:32]!r} is not a token id of this model; ids are 0 to {vocabulary - 1}.",
                param="logit_bias",
                code="invalid_value",
            )
        biases[int(key)] = BAN if bias <= -100 else bias
    return biases


def _grammar(request: GenerationFields) -> str | None:
    if request.response_format is not None and request.response_format.type == "json_object":
        return JSON_GRAMMAR
    return request.grammar or None
