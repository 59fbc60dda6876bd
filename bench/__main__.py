"""`python -m bench [--quick]`: all benchmarks one after the other, each with its table.

Each is a module of its own with more options: bench.transport, bench.http, bench.frontend, bench.prefix, bench.interference.
docs/performance.md says what they measure and what was found.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable

from bench import frontend, http, interference, prefix, transport

BENCHMARKS: dict[str, Callable[[list[str]], int]] = {
    "transport": transport.main,
    "http": http.main,
    "frontend": frontend.main,
    "prefix": prefix.main,
    "interference": interference.main,
}


def run(name: str, arguments: list[str]) -> int:
    """One benchmark; its exit status, 1 too when it fails altogether."""
    print(f"--- python -m bench.{name} {' '.join(arguments)}", flush=True)
    started_s = time.monotonic()
    try:
        return BENCHMARKS[name](arguments)
    except Exception:  # noqa: BLE001 the others can still be run
        traceback.print_exc()
        return 1
    finally:
        print(f"({time.monotonic() - started_s:.0f} s)\n", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Runs all benchmarks.")
    parser.add_argument("--quick", action="store_true", help="the short form of each, under a minute")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument(
        "--llama-server", metavar="PATH", help="compare with this llama-server; see docs/performance.md"
    )
    parser.add_argument("--only", action="append", choices=list(BENCHMARKS), help="only this one; may be repeated")
    options = parser.parse_args(arguments)
    common = [flag for flag, is_given in (("--quick", options.quick), ("--check", options.check)) if is_given]
    peers = ["--llama-server", options.llama_server] if options.llama_server else []
    names = options.only or list(BENCHMARKS)
    statuses = [run(name, [*common, *(peers if name == "http" else [])]) for name in names]
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
