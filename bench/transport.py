"""`python -m bench.transport`: time to the first and the last token, beside the old scheme and its repairs.

Every adapter has two decoders of its own (bench/scripted_decoder.c, which answers at once) behind real pipes. A round
is one request of every adapter with the same list of ids, in an order drawn anew for each round: what disturbs the
machine disturbs all alike, and none always follows the same other. (Rotating one order did the latter, and made two
schemes with one hot path differ by 40 %.) The floor is the same request written and read on one pipe by one thread, its
line encoded beforehand. Figures are only compared within a run: the targets are ratios to scheme A.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from bench.contracts.process import pipes_of
from bench.schemes.c_threads import ThreadsC
from bench.schemes.messages import Engine, Pipes, Request
from bench.schemes.original import Original
from bench.schemes.scheme_a import SchemeA
from bench.schemes.scheme_b import SchemeB

REPLICAS = 2
MAX_NEW = 13
VOCABULARY = 151936
WARM_UP_ROUNDS = 100
PERCENTILES = (50, 90, 99)
FLOOD_REQUESTS = 32
SOURCE = Path(__file__).with_name("scripted_decoder.c")
BUILD = Path(__file__).resolve().parent.parent / "build" / "bench"
RINGFENCE_ADAPTER = "bench.contracts.ringfence"

# Rounds by prompt length, and the ratios to A that ringfence must not exceed at the first token: percentile -> ratio.
ROUNDS = {65: 2000, 4097: 640}
QUICK_ROUNDS = {65: 400, 4097: 150}
TARGETS = {65: {50: 0.80, 99: 1.00}, 4097: {50: 0.35, 99: 0.60}}


class TransportAdapter(Protocol):
    """A scheme over decoders of its own. The prompt comes as a list of ids and the clock starts there."""

    def request(self, prompt: list[int]) -> tuple[int, int]:
        """Run one request of MAX_NEW tokens; nanoseconds from the call to the first and to the last token."""
        ...

    def flood(self, requests: int, max_new: int) -> Flood:
        """Run so many requests at once, as fast as they stream."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Flood:
    """Tokens of concurrent streams: how many, for how long, and the CPU time of everything but the decoders."""

    tokens: int
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds by percentile (p50, p90, p99), of one adapter at one prompt length."""

    first_ms: dict[str, float]
    last_ms: dict[str, float]

    @classmethod
    def of(cls, samples: np.ndarray) -> Timing:
        """`samples` is int64[rounds, 2]: nanoseconds to the first and to the last token."""
        values = np.percentile(samples, PERCENTILES, axis=0) / 1e6
        first, last = (
            {f"p{percentile}": round(float(value), 4) for percentile, value in zip(PERCENTILES, column, strict=True)}
            for column in values.T
        )
        return cls(first_ms=first, last_ms=last)


@dataclass(frozen=True, slots=True)
class Target:
    """One ratio to A that was asked for, and what was measured; None if ringfence was not there."""

    prompt_ids: int
    percentile: int
    limit: float
    ratio: float | None

    @property
    def is_met(self) -> bool:
        return self.ratio is not None and self.ratio <= self.limit


def decoder_command(*options: str) -> list[str]:
    """The scripted decoder's argv; it is compiled at first use and whenever its source is newer."""
    program = BUILD / "scripted_decoder"
    if not program.exists() or program.stat().st_mtime < SOURCE.stat().st_mtime:
        BUILD.mkdir(parents=True, exist_ok=True)
        fresh = program.with_suffix(f".{os.getpid()}")
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-std=c11", "-D_GNU_SOURCE", "-O2", "-o", str(fresh), str(SOURCE)], check=True)
        fresh.replace(program)
    return [str(program), *options]


def spawn(*options: str, buffering: int = -1) -> subprocess.Popen[bytes]:
    return subprocess.Popen(decoder_command(*options), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=buffering)


class SchemeTransport:
    """One of bench.schemes, called as its caller would: the tokens are iterated by the thread that asked."""

    def __init__(self, make: Callable[[Sequence[Pipes]], Engine], *options: str) -> None:
        self._processes = [spawn(*options) for _ in range(REPLICAS)]
        self._engine = make([pipes_of(process) for process in self._processes])

    def request(self, prompt: list[int]) -> tuple[int, int]:
        called_ns = time.perf_counter_ns()
        tokens = self._engine.turn(Request(prompt, MAX_NEW)).tokens()
        first = next(tokens)
        first_ns = time.perf_counter_ns()
        last = first
        for _ in range(MAX_NEW - 1):
            last = next(tokens)
        last_ns = time.perf_counter_ns()
        demand_own(prompt, first, last)
        if next(tokens, None) is not None:
            raise AssertionError("more tokens came than were asked for")
        return first_ns - called_ns, last_ns - called_ns

    def flood(self, requests: int, max_new: int) -> Flood:
        counts: list[int] = []

        def call() -> None:
            counts.append(sum(1 for _ in self._engine.turn(Request([1, 2, 3], max_new)).tokens()))

        callers = [threading.Thread(target=call) for _ in range(requests)]
        started, cpu = time.perf_counter(), time.process_time()
        for thread in callers:
            thread.start()
        for thread in callers:
            thread.join()
        return Flood(sum(counts), time.perf_counter() - started, time.process_time() - cpu)

    def close(self) -> None:
        self._engine.close()
        for process in self._processes:
            process.wait(5.0)


class Floor:
    """The request on one pipe with nothing in between: one write, and reads up to what is looked for."""

    def __init__(self) -> None:
        self._process = spawn(buffering=0)
        pipes = pipes_of(self._process)
        self._stdin, self._stdout = pipes.stdin.fileno(), pipes.stdout.fileno()
        self._pipes = pipes
        self._read_to(b"READY", b"")

    def request(self, prompt: list[int]) -> tuple[int, int]:
        line = Request(prompt, MAX_NEW).gen_line()
        first_line, last_line = (b"T %d\n" % (len(prompt) + position) for position in (0, MAX_NEW - 1))
        called_ns = time.perf_counter_ns()
        os.write(self._stdin, line)
        answer = self._read_to(first_line, b"")
        first_ns = time.perf_counter_ns()
        answer = self._read_to(last_line, answer)
        last_ns = time.perf_counter_ns()
        self._read_to(b"DONE", answer)
        return first_ns - called_ns, last_ns - called_ns

    def flood(self, requests: int, max_new: int) -> Flood:
        raise NotImplementedError("the floor is one request at a time")

    def close(self) -> None:
        self._pipes.stdin.close()
        self._process.wait(5.0)
        self._pipes.stdout.close()

    def _read_to(self, mark: bytes, answer: bytes) -> bytes:
        while mark not in answer:
            chunk = os.read(self._stdout, 1 << 16)
            if not chunk:
                raise EOFError("the scripted decoder has ended")
            answer += chunk
        return answer


def demand_own(prompt: list[int], first: int, last: int) -> None:
    """Token i of a prompt of n ids is n + i."""
    if (first, last) != (len(prompt), len(prompt) + MAX_NEW - 1):
        raise AssertionError(f"tokens {first} to {last} are not those of a prompt of {len(prompt)} ids")


def ringfence_transport() -> Callable[..., TransportAdapter] | None:
    """The product's adapter, made with (argv of the decoder, replicas), or None in a tree that has none."""
    if importlib.util.find_spec(RINGFENCE_ADAPTER) is None:
        return None
    make: Callable[..., TransportAdapter] | None = getattr(
        importlib.import_module(RINGFENCE_ADAPTER), "RingfenceTransport", None
    )
    return make


def open_adapters(*options: str) -> dict[str, TransportAdapter]:
    """Every scheme over decoders with these options, and ringfence if it is there."""
    adapters: dict[str, TransportAdapter] = {
        "original": SchemeTransport(Original, *options),
        "A": SchemeTransport(SchemeA, *options),
        "B": SchemeTransport(SchemeB, *options),
        "c-threads": SchemeTransport(ThreadsC, *options),
    }
    make = ringfence_transport()
    if make is not None:
        adapters["ringfence"] = make(decoder_command(*options), REPLICAS)
    return adapters


def measure(adapters: dict[str, TransportAdapter], prompt_ids: int, rounds: int) -> dict[str, Timing]:
    """Interleaved rounds, each with a prompt of its own (so that no router finds a prefix), in an order of its own."""
    random = np.random.default_rng(prompt_ids)
    names = list(adapters)
    samples = np.zeros((len(names), rounds, 2), dtype=np.int64)
    for number in range(-WARM_UP_ROUNDS, rounds):
        prompt: list[int] = random.integers(0, VOCABULARY, prompt_ids).tolist()
        for index in random.permutation(len(names)).tolist():
            timed = adapters[names[index]].request(prompt)
            if number >= 0:
                samples[index, number] = timed
    return {name: Timing.of(samples[index]) for index, name in enumerate(names)}


def compare(timings: dict[int, dict[str, Timing]]) -> list[Target]:
    """The targets against what was measured."""
    targets = []
    for prompt_ids, limits in TARGETS.items():
        measured = timings[prompt_ids]
        for percentile, limit in limits.items():
            ratio = None
            if "ringfence" in measured:
                ratio = _ratio(measured["ringfence"].first_ms, measured["A"].first_ms, percentile)
            targets.append(Target(prompt_ids, percentile, limit, ratio))
    return targets


def _ratio(mine: dict[str, float], reference: dict[str, float], percentile: int) -> float:
    return round(mine[f"p{percentile}"] / reference[f"p{percentile}"], 3)


def print_timings(timings: dict[int, dict[str, Timing]], rounds: dict[int, int]) -> None:
    for prompt_ids, measured in timings.items():
        print(f"prompt of {prompt_ids:,} ids, {MAX_NEW} tokens, {rounds[prompt_ids]:,} rounds, ms (ratio to A)")
        print(f"{'':<10}{'first p50':>16}{'p90':>16}{'p99':>16}{'last p50':>18}{'p90':>16}{'p99':>16}")
        reference = measured["A"]
        for name, timing in measured.items():
            cells = []
            for mine, base in ((timing.first_ms, reference.first_ms), (timing.last_ms, reference.last_ms)):
                cells += [f"{mine[f'p{p}']:.3f} ({_ratio(mine, base, p):.2f})" for p in PERCENTILES]
            print(f"{name:<10}" + "".join(f"{cell:>{18 if i == 3 else 16}}" for i, cell in enumerate(cells)))
        print()


def print_targets(targets: list[Target]) -> None:
    for target in targets:
        measured = "ringfence is not available" if target.ratio is None else f"{target.ratio:.2f}"
        verdict = "met" if target.is_met else "MISSED"
        print(f"p{target.percentile} first token, {target.prompt_ids:,} ids, ringfence to A: "
              f"{measured} (target <= {target.limit:.2f}) {verdict}")  # fmt: skip


def time_transport(options: argparse.Namespace) -> int:
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    adapters: dict[str, TransportAdapter] = {"floor": Floor(), **open_adapters()}
    try:
        timings = {prompt_ids: measure(adapters, prompt_ids, count) for prompt_ids, count in rounds.items()}
    finally:
        for adapter in adapters.values():
            adapter.close()
    targets = compare(timings)
    if options.json:
        report = {"rounds": rounds, "timings": timings, "targets": targets}
        print(msgspec.json.encode(report).decode())
    else:
        print_timings(timings, rounds)
        print_targets(targets)
    return 1 if options.check and not all(target.is_met for target in targets) else 0


def time_flood(options: argparse.Namespace) -> int:
    """FLOOD_REQUESTS streams at once, in turn for each adapter."""
    max_new = 2000 if options.quick else 10000
    adapters = open_adapters("--flood")
    floods: dict[str, Flood] = {}
    try:
        for name, adapter in adapters.items():
            floods[name] = adapter.flood(FLOOD_REQUESTS, max_new)
    finally:
        for adapter in adapters.values():
            adapter.close()
    if options.json:
        print(msgspec.json.encode({"requests": FLOOD_REQUESTS, "max_new": max_new, "floods": floods}).decode())
        return 0
    print(f"{FLOOD_REQUESTS} requests of {max_new:,} tokens at once\n{'':<10}{'tokens/s':>12}{'CPU us/token':>14}")
    for name, flood in floods.items():
        print(f"{name:<10}{flood.tokens / flood.seconds:>12,.0f}{1e6 * flood.cpu_seconds / flood.tokens:>14.2f}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.transport", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, well under a minute")
    parser.add_argument("--flood", action="store_true", help="stream as fast as possible instead")
    parser.add_argument("--neighbours", action="store_true", help="what other workers cost instead, idle and busy ones")
    options = parser.parse_args(arguments)
    if options.neighbours:
        neighbours = importlib.import_module("bench.neighbours")
        is_met: bool = neighbours.report(is_quick=options.quick, is_json=options.json)
        return 1 if options.check and not is_met else 0
    return time_flood(options) if options.flood else time_transport(options)


if __name__ == "__main__":
    sys.exit(main())
