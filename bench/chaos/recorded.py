"""Requests to the tiny model and its real decoder: each is answered once undisturbed, and every later answer must be that.

llama.cpp's results depend in their last bits on what else is in the batch. A first difference therefore counts as a tie,
and only then, when the two candidates' logits (the recorded distribution's logprobs of both) differ by less than TIE. What
follows a tie is another text, which nothing was recorded for; it is counted as unchecked.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.chaos.answers import Answer
from bench.chaos.comparison import compare, first_difference
from bench.chaos.requests import Call
from bench.chaos.verdict import Verdict
from tests import tiny_model

TIE = 1e-3
TOP = 5
_WORDS = [
    "light",
    "water",
    "stone",
    "bread",
    "river",
    "night",
    "garden",
    "window",
    "winter",
    "paper",
    "silver",
    "morning",
]


def options(folder: Path) -> dict[str, Any]:
    """What makes a server run the tiny model on the real decoder."""
    return {
        "model": tiny_model.build(folder / "tiny.gguf"),
        "threads": 1,
        "kv_type": "f32",
        "decoder_options": "--exact",
    }


class ModelCall(Call):
    """A chat of which logprobs are asked, because they carry each token's bytes."""

    def __init__(
        self, name: str, sampling: dict[str, Any], *, is_streamed: bool, recorded: Answer | None = None
    ) -> None:
        self.path = "/v1/chat/completions"
        self.name = f"{name}, {'streamed' if is_streamed else 'whole'}"
        self.sampling = sampling
        self.recorded = recorded
        self.body = {**sampling, "stream": is_streamed, "logprobs": True, "top_logprobs": 1 if recorded else TOP}
        if is_streamed:
            self.body["stream_options"] = {"include_usage": True}

    def judge(self, answer: Answer) -> Verdict:
        assert self.recorded is not None
        due = [token for token, _ in self.recorded.tokens]
        came = [token for token, _ in answer.tokens]
        place = first_difference(came, due)
        if place is not None and self.recorded.is_tie(place, came[place], limit=TIE):
            return Verdict(place, ties=1, unchecked=len(came) - place)
        if answer.error:
            return Verdict(len(came), compare(came, due[: len(came)]))
        figures = ("prompt_tokens", "completion_tokens")
        usage = {name: self.recorded.usage[name] for name in figures}
        fault = self.form_fault(answer, finish=str(self.recorded.finish), usage=usage)
        if not fault and place is None and answer.text != self.recorded.text:
            fault = "the tokens are right, and their text is not"
        return Verdict(len(came), compare(came, due), fault=fault)


def questions(chance: random.Random, count: int, *, longest: int) -> Iterator[ModelCall]:
    """Different requests, greedy and seeded at temperature 1 by turns, to be recorded."""
    for number in range(count):
        words = " ".join(chance.choices(_WORDS, k=chance.randint(3, 40)))
        sampling: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"{number} {words}"}],
            "max_tokens": chance.randint(longest // 3, longest),
            "temperature": number % 2,
        }
        if number % 2:
            sampling["seed"] = chance.randint(1, 2**31)
        yield ModelCall(f"question {number}", sampling, is_streamed=False)


def calls(chance: random.Random, asked: Sequence[ModelCall], answers: Sequence[Answer]) -> Iterator[ModelCall]:
    """The recorded requests without end, in random order."""
    while True:
        place = chance.randrange(len(asked))
        question = asked[place]
        yield ModelCall(
            question.name.partition(",")[0],
            question.sampling,
            is_streamed=chance.random() < 0.7,
            recorded=answers[place],
        )
