"""The two models of the benchmarks, and prompts for them.

tiny: random weights, two layers of 64 (tests/tiny_model.py). It costs next to nothing, so the server is what is measured.
demo: the demo model of the extra `demo`, 270 million parameters.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Literal

from server.demo import demo_model_path
from tests import tiny_model

ModelName = Literal["tiny", "demo"]

BUILD = Path(__file__).resolve().parent.parent / "build" / "bench"
TINY_CONTEXT = 8192
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def model_path(name: ModelName) -> Path:
    """The model's GGUF, made first if need be."""
    if name == "demo":
        return demo_model_path()
    path = BUILD / f"tiny-{TINY_CONTEXT}.gguf"
    if not path.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        tiny_model.build(fresh, context=TINY_CONTEXT)
        fresh.replace(path)
    return path


class Words:
    """Prompts of random lower-case words, a few tokens each; no two begin alike, so no cache helps."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def prompt(self, words: int) -> str:
        return " ".join("".join(self._random.choices(_LETTERS, k=self._random.randint(4, 7))) for _ in range(words))
