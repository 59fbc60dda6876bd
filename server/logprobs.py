"""Log probabilities of tokens in OpenAI's two shapes, sent along with the text they belong to.

A token is reported once its text has been sent whole (Detokenizer.released), so a streamed answer's entries joined
are those of the whole one, and what a stop string cut off is not reported.
"""

from collections.abc import Callable
from typing import TypeAlias

from server.output import Output
from server.schemas import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

Logprobs: TypeAlias = CompletionLogprobs | ChatLogprobs
Piece = Callable[[int], bytes]
Taker = Callable[[Output, int], Logprobs]


def completion_logprobs(piece: Piece, alternatives: int) -> Taker:
    """For /v1/completions: the tokens from `first` to those released, as parallel lists."""

    def take(output: Output, first: int) -> CompletionLogprobs:
        turn, last = output.turn, output.detokenizer.released
        tops = turn.alternatives[first:last] if alternatives else []
        return CompletionLogprobs(
            tokens=[_text(piece(token)) for token in turn.ids[first:last]],
            token_logprobs=list(turn.logprobs[first:last]),
            top_logprobs=[{_text(piece(token)): value for token, value in top[:alternatives]} for top in tops] or None,
            text_offset=output.detokenizer.text_offsets[first:last],
        )

    return take


def chat_logprobs(piece: Piece, alternatives: int) -> Taker:
    """For /v1/chat/completions: the tokens from `first` to those released, an object each."""

    def take(output: Output, first: int) -> ChatLogprobs:
        turn, last = output.turn, output.detokenizer.released
        content = []
        for place in range(first, min(last, len(turn.logprobs))):
            top = turn.alternatives[place][:alternatives] if place < len(turn.alternatives) else []
            data = piece(turn.ids[place])
            content.append(
                TokenLogprob(
                    token=_text(data),
                    logprob=turn.logprobs[place],
                    bytes=list(data),
                    top_logprobs=[_top(piece(token), value) for token, value in top],
                )
            )
        return ChatLogprobs(content=content)

    return take


def _top(data: bytes, value: float) -> TopLogprob:
    return TopLogprob(token=_text(data), logprob=value, bytes=list(data))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
