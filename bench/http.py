"""`python -m bench.http`: tokens per second, time to the first token and between tokens, beside llama-server.

    client (C, one process) ==N streams, keep-alive==> ringfence: server, one worker, one decoder   \\  the same libllama,
                            ==N streams, keep-alive==> llama-server                                  /  model and threads

A round is the same work for each server, one after the other, in an order drawn anew for each round: every connection makes
its requests one after the other, each with a prompt of its own, temperature 0, no end before the last token. Tokens are counted
from `usage`, not from events: both servers may put several tokens into one. Connections are kept alive where the server does;
a new one is opened before the clock of its request starts. A token that came together with another has a
gap of 0. Rates are medians of the rounds, ratios medians of each round's ratio, so that a disturbed round counts once.
`cpu` is CPU time of all of a server's processes per token; on a machine whose cores are all busy it decides the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from bench.http_client import Call, Trace, does_keep_alive, drive
from bench.http_servers import Server, libllama_dir, peer, start_llama_server, start_ringfence
from bench.models import ModelName, Words, model_path


@dataclass(frozen=True, slots=True)
class Load:
    """What one model is loaded with. requests: per connection, by the number of streams."""

    threads: int
    context: int
    words: int
    tokens: int
    streams: tuple[int, ...]
    requests: dict[int, int]
    rounds: int
    quick_rounds: int

    def requests_for(self, streams: int) -> int:
        return self.requests.get(streams) or max(1, 64 // streams)


LOADS: dict[ModelName, Load] = {
    "tiny": Load(1, 2048, 24, 128, (1, 8, 32), {1: 24, 8: 6, 32: 4}, rounds=15, quick_rounds=3),
    "demo": Load(2, 1024, 6, 96, (1, 4), {1: 1, 4: 1}, rounds=8, quick_rounds=2),
}
WARM_UP_ROUNDS = 1

# Ratios to llama-server, by model and number of streams.
LEAST_RATE: dict[ModelName, dict[int, float]] = {"tiny": {1: 1.5, 8: 1.5, 32: 1.5}, "demo": {1: 1.0, 4: 1.08}}
MOST_FIRST: dict[ModelName, dict[int, float]] = {"tiny": {1: 0.8, 8: 0.7, 32: 0.6}, "demo": {}}
LEAST_SHARE: dict[ModelName, dict[int, float]] = {"tiny": {}, "demo": {1: 0.95, 4: 0.95}}


@dataclass(frozen=True, slots=True)
class Figures:
    """One server at one number of streams. Times in milliseconds; cpu_us: per token and role."""

    tokens_per_s: float
    first_p50: float
    first_p99: float
    gap_p50: float
    gap_p99: float
    tokens_per_chunk: float
    cpu_us: dict[str, float]
    client_share: float

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> Figures:
        first = np.concatenate([each.trace.first_ms() for each in rounds])
        gaps = np.concatenate([each.trace.gaps_ms() for each in rounds])
        tokens = sum(each.trace.tokens for each in rounds)
        roles = {role for each in rounds for role in each.cpu_s}
        return cls(
            tokens_per_s=round(statistics.median(each.trace.tokens_per_s for each in rounds), 1),
            first_p50=_percentile(first, 50),
            first_p99=_percentile(first, 99),
            gap_p50=_percentile(gaps, 50),
            gap_p99=_percentile(gaps, 99),
            tokens_per_chunk=round(tokens / sum(each.trace.texts for each in rounds), 2),
            cpu_us={
                role: round(1e6 * sum(each.cpu_s.get(role, 0.0) for each in rounds) / tokens, 2)
                for role in sorted(roles, reverse=True)
            },
            client_share=round(statistics.median(each.trace.client_share for each in rounds), 3),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One server's part of a round."""

    trace: Trace
    cpu_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio that was asked for, and what was measured; None if there was nothing to compare with."""

    what: str
    streams: int
    limit: float
    is_least: bool
    ratio: float | None

    @property
    def is_met(self) -> bool:
        if self.ratio is None:
            return False
        return self.ratio >= self.limit if self.is_least else self.ratio <= self.limit


@dataclass(slots=True)
class Report:
    """All that a run found out. ratios: tokens/s and first token of ringfence to each other server, by streams."""

    model: ModelName
    load: Load
    rounds: int
    figures: dict[int, dict[str, Figures]] = field(default_factory=dict)
    rate_ratios: dict[int, dict[str, float]] = field(default_factory=dict)
    first_ratios: dict[int, dict[str, float]] = field(default_factory=dict)
    batched: dict[int, float] = field(default_factory=dict)
    libllama: dict[str, list[str]] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)


def calls_of(load: Load, streams: int, words: Words) -> list[Call]:
    """One round's requests."""
    return [
        Call(
            connection,
            {
                "prompt": words.prompt(load.words),
                "max_tokens": load.tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )
        for _ in range(load.requests_for(streams))
        for connection in range(streams)
    ]


def run_round(server: Server, calls: Sequence[Call]) -> Round:
    before = server.cpu_s()
    trace = drive(server.port, calls, address=server.address, keeps_alive=server.keeps_alive)
    after = server.cpu_s()
    return Round(trace, {role: used - before.get(role, 0.0) for role, used in after.items()})


def measure(servers: Sequence[Server], load: Load, streams: int, rounds: int) -> dict[str, list[Round]]:
    """The rounds of every server, in the same order."""
    random = np.random.default_rng(streams)
    words = Words(streams)
    done: dict[str, list[Round]] = {server.name: [] for server in servers}
    for number in range(-WARM_UP_ROUNDS, rounds):
        calls = calls_of(load, streams, words)
        for index in random.permutation(len(servers)).tolist():
            one = run_round(servers[index], calls)
            if number >= 0:
                done[servers[index].name].append(one)
    return done


def compare(report: Report, streams: int, rounds: dict[str, list[Round]]) -> None:
    """Enter the figures and the ratios of ringfence to the others."""
    figures = report.figures[streams] = {name: Figures.of(each) for name, each in rounds.items()}
    mine = rounds["ringfence"]
    report.rate_ratios[streams], report.first_ratios[streams] = {}, {}
    for name, others in rounds.items():
        if name == "ringfence":
            continue
        pairs = zip(mine, others, strict=True)
        ratio = statistics.median(own.trace.tokens_per_s / other.trace.tokens_per_s for own, other in pairs)
        report.rate_ratios[streams][name] = round(ratio, 3)
        report.first_ratios[streams][name] = round(figures["ringfence"].first_p50 / figures[name].first_p50, 3)


def batched_rates(
    program: Path, model: Path, load: Load, streams: Sequence[int], prompt_tokens: int
) -> dict[int, float]:
    """Tokens per second of llama.cpp's own batched benchmark: decoding alone, without HTTP and sampling."""
    most = max(streams)
    command = [str(program), "-m", str(model), "-t", str(load.threads), "-ngl", "0", "--no-kv-unified"]
    command += ["-c", str(most * load.context), "-npp", str(prompt_tokens), "-ntg", str(load.tokens)]
    command += ["-npl", ",".join(map(str, streams)), "--output-format", "jsonl"]
    environment = {"LD_LIBRARY_PATH": str(libllama_dir())}
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    lines = (line for line in done.stdout.decode().splitlines() if line.startswith("{"))
    return {found["pl"]: float(found["speed_tg"]) for found in map(json.loads, lines)}


def targets_of(report: Report) -> list[Target]:
    targets = []
    for streams, figures in report.figures.items():
        rate = report.rate_ratios[streams].get("llama-server")
        first = report.first_ratios[streams].get("llama-server")
        if (limit := LEAST_RATE[report.model].get(streams)) is not None:
            targets.append(Target("tokens/s to llama-server", streams, limit, True, rate))
        if (limit := MOST_FIRST[report.model].get(streams)) is not None:
            targets.append(Target("TTFT p50 to llama-server", streams, limit, False, first))
        if (limit := LEAST_SHARE[report.model].get(streams)) is not None:
            alone = report.batched.get(streams)
            share = None if alone is None else round(figures["ringfence"].tokens_per_s / alone, 3)
            targets.append(Target("tokens/s to the batched benchmark", streams, limit, True, share))
    return targets


def run(options: argparse.Namespace) -> Report:
    name: ModelName = options.model
    load = LOADS[name]
    streams = options.streams or load.streams
    report = Report(name, load, load.quick_rounds if options.quick else load.rounds)
    model = model_path(name)
    batched: dict[int, list[float]] = {count: [] for count in streams}
    with started(options, model, load, max(streams)) as servers:
        report.libllama = {server.name: sorted(server.libllama()) for server in servers}
        for count in streams:
            rounds = measure(servers, load, count, report.rounds)
            compare(report, count, rounds)
            prompt = rounds["ringfence"][0].trace.answers[0].prompt_tokens
            for _ in range(3 if options.batched_bench else 0):
                rates = batched_rates(options.batched_bench, model, load, (count,), prompt)
                batched[count].append(rates[count])
    report.batched = {count: round(statistics.median(found), 1) for count, found in batched.items() if found}
    report.targets = targets_of(report)
    return report


@contextlib.contextmanager
def started(options: argparse.Namespace, model: Path, load: Load, slots: int) -> Iterator[list[Server]]:
    """ringfence first, then whatever it is compared with."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(start_ringfence(model, slots=slots, context=load.context, threads=load.threads))]
        if options.llama_server is not None:
            other = start_llama_server(
                options.llama_server, model, slots=slots, context=load.context, threads=load.threads
            )
            servers.append(stack.enter_context(other))
        servers += [peer(url) for url in options.peer]
        for server in servers:
            server.keeps_alive = does_keep_alive(server.port, address=server.address)
        yield servers


def print_report(report: Report) -> None:
    load = report.load
    print(f"{report.model} model, {load.tokens} tokens a request, {load.threads} decoder threads, {report.rounds} rounds; "
          f"ms; ratio of ringfence in brackets")  # fmt: skip
    print(f"{'streams':<8}{'':<14}{'tokens/s':>17}{'TTFT p50':>16}{'p99':>9}{'gap p50':>9}{'p99':>9}"
          f"{'tok/chunk':>11}{'client':>8}  CPU us/token")  # fmt: skip
    for streams, figures in report.figures.items():
        for name, each in figures.items():
            rate = f"{each.tokens_per_s:,.0f}" + _bracket(report.rate_ratios[streams].get(name))
            first = f"{each.first_p50:.2f}" + _bracket(report.first_ratios[streams].get(name))
            cpu = " + ".join(f"{role} {used:.1f}" for role, used in each.cpu_us.items())
            total = f" = {sum(each.cpu_us.values()):.1f}" if len(each.cpu_us) > 1 else ""
            print(f"{streams:<8}{name:<14}{rate:>17}{first:>16}{each.first_p99:>9.2f}{each.gap_p50:>9.3f}"
                  f"{each.gap_p99:>9.3f}{each.tokens_per_chunk:>11.2f}{each.client_share:>8.0%}  {cpu}{total}")  # fmt: skip
        if streams in report.batched:
            print(f"{streams:<8}{'batched-bench':<14}{report.batched[streams]:>17,.1f}")
    for name, files in report.libllama.items():
        print(f"{name}: {', '.join(files)}")


def print_targets(targets: Sequence[Target]) -> None:
    for target in targets:
        measured = "nothing to compare with" if target.ratio is None else f"{target.ratio:.2f}"
        sign = ">=" if target.is_least else "<="
        verdict = "met" if target.is_met else "MISSED" if target.ratio is not None else ""
        print(f"{target.what}, {target.streams} streams: {measured} (target {sign} {target.limit:.2f}) {verdict}")


def _bracket(ratio: float | None) -> str:
    return "" if ratio is None else f" ({ratio:.2f})"


def _percentile(values: np.ndarray, percentile: float) -> float:
    return round(float(np.percentile(values, percentile)), 4) if len(values) else math.nan


def stream_counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(word) for word in text.split(","))
    if not counts or min(counts) < 1 or max(counts) > 256:
        raise argparse.ArgumentTypeError("give numbers from 1 to 256, such as 1,8,32")
    return counts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.http", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(LOADS), default="tiny", help="tiny (the default) or demo")
    parser.add_argument("--streams", type=stream_counts, help="numbers of streams, such as 1,8,32")
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="a llama-server; see docs/performance.md")
    parser.add_argument("--batched-bench", type=Path, metavar="PATH", help="llama.cpp's llama-batched-bench")
    parser.add_argument("--peer", action="append", default=[], metavar="URL", help="a running server to compare with")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under a minute")
    options = parser.parse_args(arguments)
    report = run(options)
    if options.json:
        print(msgspec.json.encode(report).decode())
    else:
        print_report(report)
        print_targets(report.targets)
    return 1 if options.check and not all(target.is_met for target in report.targets) else 0


if __name__ == "__main__":
    sys.exit(main())
