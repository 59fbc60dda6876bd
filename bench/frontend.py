"""`python -m bench.frontend`: what one server process delivers, whatever the decoder.

    scripted decoder (bench/scripted_decoder.c --flood: endless tokens) -> worker -> ring -> server -> SSE -> client (C)

The decoder costs next to nothing and never waits, so the server process is what limits. Tokens are counted from `usage`; a
server that is behind puts several into one event (tokens per event is printed). Event-loop lag is the server's own gauge in
/metrics: how late its clock ticks came, over the last half minute.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass

import msgspec
import numpy as np

from bench.http import Round, run_round, stream_counts
from bench.http_client import Call
from bench.http_servers import Server, start_ringfence
from bench.models import model_path
from bench.transport import decoder_command

CONTEXT = 4096
FIRST_ID = 300  # the scripted decoder's token i of a prompt of n ids is n + i: from here on each has a text
TOKENS = 1300
REQUESTS = {1: 40, 8: 8, 32: 4}
QUICK_REQUESTS = {1: 10, 8: 2, 32: 1}
LAG_LIMIT_MS = 5.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """What came through at one number of streams. Times per token in microseconds; lag in milliseconds."""

    streams: int
    tokens_per_s: float
    events_per_s: float
    tokens_per_event: float
    server_cpu_us: float
    worker_cpu_us: float
    server_cpu_per_event_us: float
    first_p50: float
    first_p99: float
    lag_p99_ms: float
    lag_max_ms: float
    client_share: float

    @classmethod
    def of(cls, streams: int, done: Round, lags: tuple[float, float]) -> Capacity:
        trace = done.trace
        first = np.percentile(trace.first_ms(), (50, 99))
        return cls(
            streams=streams,
            tokens_per_s=round(trace.tokens_per_s),
            events_per_s=round(trace.texts / trace.seconds),
            tokens_per_event=round(trace.tokens / trace.texts, 2),
            server_cpu_us=round(1e6 * done.cpu_s["server"] / trace.tokens, 2),
            worker_cpu_us=round(1e6 * done.cpu_s["worker"] / trace.tokens, 2),
            server_cpu_per_event_us=round(1e6 * done.cpu_s["server"] / trace.texts, 2),
            first_p50=round(float(first[0]), 3),
            first_p99=round(float(first[1]), 3),
            lag_p99_ms=lags[0],
            lag_max_ms=lags[1],
            client_share=round(trace.client_share, 3),
        )


def lags_ms(server: Server) -> tuple[float, float]:
    """The server's event-loop lag: p99 and maximum."""
    text = server.get("/metrics").decode()
    found = {quantile: float(value) for quantile, value in _LAG.findall(text)}
    return round(1000 * found["0.99"], 3), round(1000 * found["1"], 3)


_LAG = re.compile(r'^ringfence_event_loop_lag_seconds\{quantile="([0-9.]+)"\} (\S+)$', re.MULTILINE)


def calls_of(streams: int, requests: int) -> list[Call]:
    body = {
        "prompt": list(range(FIRST_ID, 2 * FIRST_ID)),
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return [Call(connection, body) for _ in range(requests) for connection in range(streams)]


def measure(streams: int, requests: int) -> Capacity:
    """A server of its own for each number of streams, since its gauge looks back."""
    slots = ("--slots", str(streams), "--flood", "--context", str(CONTEXT))
    options = ("--decoder-command", " ".join(decoder_command(*slots)))
    with start_ringfence(model_path("tiny"), slots=streams, context=CONTEXT, threads=1, options=options) as server:
        run_round(server, calls_of(streams, 1))
        done = run_round(server, calls_of(streams, requests))
        return Capacity.of(streams, done, lags_ms(server))


def print_capacity(rows: list[Capacity]) -> None:
    print("One server process, one worker, a scripted decoder that never waits")
    print(f"{'streams':<8}{'tokens/s':>10}{'events/s':>10}{'tok/event':>10}{'server us/tok':>15}{'us/event':>10}"
          f"{'worker us/tok':>15}{'TTFT p50':>10}{'p99':>8}{'lag p99':>9}{'max':>8}{'client':>8}")  # fmt: skip
    for row in rows:
        print(f"{row.streams:<8}{row.tokens_per_s:>10,.0f}{row.events_per_s:>10,.0f}{row.tokens_per_event:>10.2f}"
              f"{row.server_cpu_us:>15.1f}{row.server_cpu_per_event_us:>10.1f}{row.worker_cpu_us:>15.1f}"
              f"{row.first_p50:>10.2f}{row.first_p99:>8.2f}{row.lag_p99_ms:>9.2f}{row.lag_max_ms:>8.2f}"
              f"{row.client_share:>8.0%}")  # fmt: skip
    worst = max(row.lag_p99_ms for row in rows)
    verdict = "met" if worst < LAG_LIMIT_MS else "MISSED"
    print(f"event-loop lag p99: {worst:.2f} ms (target < {LAG_LIMIT_MS:g}) {verdict}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.frontend", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=stream_counts, default=(1, 8, 32), help="numbers of streams, such as 1,8,32")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--quick", action="store_true", help="fewer requests, well under a minute")
    options = parser.parse_args(arguments)
    requests = QUICK_REQUESTS if options.quick else REQUESTS
    rows = [measure(streams, requests.get(streams, 2)) for streams in options.streams]
    if options.json:
        print(msgspec.json.encode({"frontend": rows}).decode())
    else:
        print_capacity(rows)
    return 1 if options.check and any(row.lag_p99_ms >= LAG_LIMIT_MS for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
