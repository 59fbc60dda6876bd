"""`python -m bench.interference`: what a long prompt does to the streams beside it.

Some streams run; now and then one more request with a prompt of 4,000 tokens comes. The gaps between a stream's tokens while
that prompt is read (from its sending to its first text) are set against those while none is.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from bench.http_client import Answer, Call, Milliseconds, drive
from bench.http_servers import start_ringfence
from bench.models import ModelName, Words, model_path

PROMPT_TOKENS = 4000
CONTEXT = 8192
MOST_RATIO = 3.0
_IDS = range(300, 1700)  # plain pieces in both vocabularies


@dataclass(frozen=True, slots=True)
class Scene:
    """streams: how many run, each with one request of `tokens`. prompts: long ones, each `pause_s` after the last."""

    threads: int
    streams: int
    tokens: int
    prompts: int
    pause_s: float


SCENES: dict[ModelName, Scene] = {"tiny": Scene(1, 4, 4000, 6, 0.3), "demo": Scene(2, 2, 600, 1, 4.0)}
QUICK_SCENES: dict[ModelName, Scene] = {"tiny": Scene(1, 4, 4000, 4, 0.3), "demo": Scene(2, 2, 300, 1, 2.0)}


@dataclass(frozen=True, slots=True)
class Interference:
    """Gaps in milliseconds without and beside a long prompt; first_ms: the long prompts' own first token, median."""

    model: ModelName
    scene: Scene
    normal_p50: float
    normal_p99: float
    beside_p50: float
    beside_p99: float
    beside_max: float
    normal_gaps: int
    beside_gaps: int
    first_ms: float

    @property
    def ratio(self) -> float:
        return self.beside_p99 / self.normal_p99


def long_prompt(number: int) -> list[int]:
    return random.Random(number).choices(_IDS, k=PROMPT_TOKENS)


def calls_of(scene: Scene) -> list[Call]:
    """The streams' connections first, the long prompts' last."""
    words = Words(0)
    plain = {"temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    calls = [
        Call(connection, {**plain, "prompt": words.prompt(8), "max_tokens": scene.tokens})
        for connection in range(scene.streams)
    ]
    calls += [
        Call(scene.streams, {**plain, "prompt": long_prompt(number), "max_tokens": 4}, after_s=scene.pause_s)
        for number in range(scene.prompts)
    ]
    return calls


def split_gaps(streams: Sequence[Answer], windows: Sequence[tuple[float, float]]) -> tuple[Milliseconds, Milliseconds]:
    """Gaps between texts that touch none of the windows, and those that touch one; only while all streams run."""
    until = min(answer.end_ms for answer in streams)
    normal, beside = [], []
    for answer in streams:
        at = answer.text_ms[answer.text_ms <= until]
        begins, ends = at[:-1], at[1:]
        is_beside: npt.NDArray[np.bool_] = np.zeros(len(begins), dtype=bool)
        for first, last in windows:
            is_beside |= (begins < last) & (ends > first)
        gaps = ends - begins
        normal.append(gaps[~is_beside])
        beside.append(gaps[is_beside])
    return np.concatenate(normal), np.concatenate(beside)


def measure(name: ModelName, scene: Scene) -> Interference:
    slots = scene.streams + 1
    with start_ringfence(model_path(name), slots=slots, context=CONTEXT, threads=scene.threads) as server:
        trace = drive(server.port, calls_of(scene))
    streams = [answer for answer in trace.answers if answer.connection < scene.streams]
    long = [answer for answer in trace.answers if answer.connection == scene.streams]
    windows = [(answer.sent_ms, answer.sent_ms + answer.first_ms) for answer in long]
    normal, beside = split_gaps(streams, windows)
    return Interference(
        model=name,
        scene=scene,
        normal_p50=_percentile(normal, 50),
        normal_p99=_percentile(normal, 99),
        beside_p50=_percentile(beside, 50),
        beside_p99=_percentile(beside, 99),
        beside_max=_percentile(beside, 100),
        normal_gaps=len(normal),
        beside_gaps=len(beside),
        first_ms=round(float(np.median([answer.first_ms for answer in long])), 1),
    )


def _percentile(values: Milliseconds, percentile: float) -> float:
    return round(float(np.percentile(values, percentile)), 3) if len(values) else math.nan


def print_rows(rows: Sequence[Interference]) -> None:
    print(f"Gaps between a stream's tokens, ms, without and beside a prompt of {PROMPT_TOKENS:,} tokens")
    print(f"{'model':<7}{'streams':>8}{'normal p50':>12}{'p99':>9}{'beside p50':>12}{'p99':>9}{'max':>9}"
          f"{'gaps':>14}{'its TTFT':>10}")  # fmt: skip
    for row in rows:
        print(f"{row.model:<7}{row.scene.streams:>8}{row.normal_p50:>12.2f}{row.normal_p99:>9.2f}"
              f"{row.beside_p50:>12.2f}{row.beside_p99:>9.2f}{row.beside_max:>9.2f}"
              f"{f'{row.normal_gaps}/{row.beside_gaps}':>14}{row.first_ms:>10.0f}")  # fmt: skip
    for row in rows:
        verdict = "met" if row.ratio <= MOST_RATIO else "MISSED"
        print(f"{row.model}: p99 beside a long prompt is {row.ratio:.2f} times the normal p99 "
              f"(target <= {MOST_RATIO:g}) {verdict}")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.interference", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(SCENES), action="append", help="tiny or demo; both by default")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--quick", action="store_true", help="fewer tokens and prompts, under a minute")
    options = parser.parse_args(arguments)
    scenes = QUICK_SCENES if options.quick else SCENES
    rows = [measure(name, scenes[name]) for name in options.model or scenes]
    if options.json:
        print(msgspec.json.encode({"interference": rows}).decode())
    else:
        print_rows(rows)
    return 1 if options.check and not all(row.ratio <= MOST_RATIO for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
