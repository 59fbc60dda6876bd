"""What other workers cost: the time to the first token beside idle and busy ones, and CPU time of a pool that has nothing to do.

Idle others take their turn with the measured one, as the router wants it. Busy others stream a token every PACE_MS, as decoders
do that compute, and hold no core that a decoder would leave free.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import msgspec
import numpy as np

from bench.contracts.ringfence import RingfenceTransport
from bench.transport import VOCABULARY, decoder_command

COUNTS = (1, 2, 4, 8)
PACE_MS = 20
PROMPT_IDS = 65
PASSES, QUICK_PASSES = 5, 2
WARM_UP_ROUNDS, ROUNDS = 40, 200
MOST_GROWTH = 1.10
IDLE_WORKERS = 2
IDLE_S = 5.0
MOST_IDLE_SHARE = 0.005  # of one core: a few times what a tick a second costs


@dataclass(frozen=True, slots=True)
class Neighbours:
    """p50 of the first token beside so many others, in milliseconds, and its ratio to the p50 with none."""

    others: int
    are_busy: bool
    first_ms: float
    ratio: float

    @property
    def is_met(self) -> bool:
        return self.ratio <= MOST_GROWTH


@dataclass(frozen=True, slots=True)
class Idle:
    """CPU of an idle pool, as a share of one core."""

    seconds: float
    server: float
    workers: float
    decoders: float

    @property
    def is_met(self) -> bool:
        return self.server + self.workers <= MOST_IDLE_SHARE


def time_neighbours(*, is_quick: bool) -> list[Neighbours]:
    """Passes over all settings in an order drawn anew; each is compared with a measure without others just before it."""
    random = np.random.default_rng(0)
    settings = [(count, are_busy) for count in COUNTS for are_busy in (False, True)]
    firsts: dict[tuple[int, bool], list[float]] = {setting: [] for setting in settings}
    ratios: dict[tuple[int, bool], list[float]] = {setting: [] for setting in settings}
    for _ in range(QUICK_PASSES if is_quick else PASSES):
        for index in random.permutation(len(settings)).tolist():
            alone, beside = _pair(random, *settings[index])
            firsts[settings[index]].append(beside)
            ratios[settings[index]].append(beside / alone)
    return [
        Neighbours(
            others=count,
            are_busy=are_busy,
            first_ms=round(statistics.median(firsts[count, are_busy]) / 1e6, 4),
            ratio=round(statistics.median(ratios[count, are_busy]), 3),
        )
        for count, are_busy in settings
    ]


def time_idle(seconds: float) -> Idle:
    """The CPU that a pool uses when it has served and has nothing to do."""
    transport = RingfenceTransport(decoder_command(), IDLE_WORKERS)
    try:
        _p50(np.random.default_rng(0), transport, WARM_UP_ROUNDS)
        transport.idle(1.0)
        used = transport.idle(seconds)
    finally:
        transport.close()
    return Idle(seconds=seconds, **{name: round(cpu / seconds, 6) for name, cpu in used.items()})


def report(*, is_quick: bool, is_json: bool) -> bool:
    """Measure and print all of it; whether every bound is kept."""
    idle, neighbours = time_idle(IDLE_S), time_neighbours(is_quick=is_quick)
    is_met = idle.is_met and all(row.is_met for row in neighbours)
    if is_json:
        print(msgspec.json.encode({"idle": idle, "neighbours": neighbours, "is_met": is_met}).decode())
        return is_met
    print(f"{IDLE_WORKERS} idle workers for {idle.seconds:.0f} s, of one core: server {idle.server:.3%}, "
          f"workers {idle.workers:.3%}, decoders {idle.decoders:.3%} "
          f"(server and workers <= {MOST_IDLE_SHARE:.1%}) {_verdict(idle.is_met)}")  # fmt: skip
    print(f"first token of a prompt of {PROMPT_IDS} ids beside other workers, p50 in ms, and the ratio to none")
    for row in neighbours:
        state = f"busy, a token every {PACE_MS} ms" if row.are_busy else "idle"
        print(f"{row.others:>3} {state:<28}{row.first_ms:>8.3f}{row.ratio:>8.2f}  {_verdict(row.is_met)}")
    return is_met


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def _pair(random: np.random.Generator, count: int, are_busy: bool) -> tuple[float, float]:
    """p50 in nanoseconds of a worker alone, and just after it of one beside others."""
    alone = RingfenceTransport(decoder_command(), 1)
    try:
        alone_ns = _p50(random, alone, ROUNDS)
    finally:
        alone.close()
    other = decoder_command("--flood", "--pace", str(PACE_MS)) if are_busy else decoder_command()
    beside = RingfenceTransport(decoder_command(), 1, others=[other] * count)
    try:
        if are_busy:
            beside.occupy_others()
        return alone_ns, _p50(random, beside, ROUNDS)
    finally:
        beside.close()


def _p50(random: np.random.Generator, transport: RingfenceTransport, rounds: int) -> float:
    """Over `rounds`, after some that are not counted."""
    prompts = random.integers(0, VOCABULARY, (WARM_UP_ROUNDS + rounds, PROMPT_IDS)).tolist()
    return statistics.median([transport.request(prompt)[0] for prompt in prompts][WARM_UP_ROUNDS:])
