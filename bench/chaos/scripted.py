"""Requests to scripted decoders: every token of every answer is known beforehand.

The decoder echoes a function of the prompt's marker (tests/fakes/echo.py) in ids that the tiny vocabulary shows as two
letters each, so text and tokens are one-to-one.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.chaos.answers import Answer
from bench.chaos.comparison import compare
from bench.chaos.requests import Call
from bench.chaos.verdict import Verdict
from tests import tiny_model
from tests.fakes.echo import echo_prompt, expected, read_prompt
from tests.fakes.stage import Stage

BASE = tiny_model.FIRST_BYTE + 256  # the first of the letter pairs
SPAN = 26 * 26
TOKEN_DELAY_S = 0.02
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PIECE = 2
_LEAVING_SHARE = 0.04


def letters(token: int) -> str:
    """The text of an echoed token."""
    first, second = divmod(token - BASE, 26)
    return _LETTERS[first] + _LETTERS[second]


def decoder_options(stage: Stage, *, slots: int, **keys: Any) -> str:
    """The command line of a scripted decoder that speaks in letter pairs."""
    words = stage.command(
        **{"slots": slots, "vocab": tiny_model.VOCAB_SIZE, "echo_base": BASE, "echo_span": SPAN, "eos": 4, **keys}
    )
    return shlex.join(words)


def options(folder: Path, *, slots: int) -> dict[str, Any]:
    """What makes a server run scripted decoders."""
    model = tiny_model.build(folder / "tiny.gguf")
    command = decoder_options(Stage(folder), slots=slots, token_delay_s=TOKEN_DELAY_S)
    return {"decoder_command": command, "tokenizer": model}


class EchoCall(Call):
    """A completion of an echo prompt."""

    def __init__(
        self, prompt: list[int], max_tokens: int, *, is_streamed: bool = True, leave_after: int | None = None
    ) -> None:
        self.prompt = prompt
        self.path = "/v1/completions"
        self.name = f"echo {read_prompt(prompt).marker}, {max_tokens} tokens, {'streamed' if is_streamed else 'whole'}"
        self.leave_after = leave_after if is_streamed else None
        self.body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": is_streamed}
        if is_streamed:
            self.body["stream_options"] = {"include_usage": True}

    def due(self) -> list[str]:
        """The text of each token of the right answer."""
        tokens = expected(self.prompt, self.body["max_tokens"], base=BASE, span=SPAN)
        return [letters(token) for token in tokens]

    def judge(self, answer: Answer) -> Verdict:
        due, text = self.due(), answer.text
        came = [text[place : place + _PIECE] for place in range(0, len(text), _PIECE)]
        if answer.has_left or answer.error:  # what came must be right, and the rest is nobody's
            return Verdict(len(came), compare(came, due[: len(came)]))
        usage = {"prompt_tokens": len(self.prompt), "completion_tokens": len(due)}
        return Verdict(len(came), compare(came, due), fault=self.form_fault(answer, finish="length", usage=usage))


def calls(chance: random.Random) -> Iterator[EchoCall]:
    """Requests without end, each with a marker of its own."""
    for marker in range(1, 64**3):
        max_tokens = chance.randint(30, 200)
        yield EchoCall(
            echo_prompt(marker, chance.randint(9, 300)),
            max_tokens,
            is_streamed=chance.random() < 0.7,
            leave_after=chance.randint(1, max_tokens) if chance.random() < _LEAVING_SHARE else None,
        )
