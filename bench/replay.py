"""`python -m bench.replay`: eighteen ownership contracts over the old scheme, its repairs, and ringfence.

The table shows that the contracts can fail: each scheme must break exactly those that its fault breaks, and ringfence
none.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from bench.contracts.adapter import Adapter
from bench.contracts.suite import ACCOUNTS, CONTRACTS, EARLY_ENDS, Outcome, names_of, play
from bench.contracts.threads import ThreadAdapter
from bench.schemes.close_only import CloseOnly
from bench.schemes.original import Original
from bench.schemes.scheme_a import SchemeA
from bench.schemes.scheme_b import SchemeB

RINGFENCE_ADAPTER = "bench.contracts.ringfence"
NONE: frozenset[str] = frozenset()
EXPECTED_FAILURES = {
    "original": names_of((*EARLY_ENDS, *ACCOUNTS)),
    "close-only": names_of(ACCOUNTS),
    "A": NONE,
    "B": NONE,
    "ringfence": NONE,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One adapter's line of the table."""

    adapter: str
    is_available: bool
    passed: int
    total: int
    failing: list[str]
    expected_failing: list[str]
    as_expected: bool
    seconds: float
    reasons: dict[str, str]


def ringfence_adapter() -> Callable[[], Adapter] | None:
    """The product's adapter, or None in a tree that has none."""
    if importlib.util.find_spec(RINGFENCE_ADAPTER) is None:
        return None
    make: Callable[[], Adapter] = importlib.import_module(RINGFENCE_ADAPTER).RingfenceAdapter
    return make


def adapters() -> dict[str, Callable[[], Adapter] | None]:
    return {
        "original": functools.partial(ThreadAdapter, Original),
        "close-only": functools.partial(ThreadAdapter, CloseOnly),
        "A": functools.partial(ThreadAdapter, SchemeA),
        "B": functools.partial(ThreadAdapter, SchemeB),
        "ringfence": ringfence_adapter(),
    }


def replay(name: str, make_adapter: Callable[[], Adapter] | None) -> Row:
    """Play every contract over one adapter and compare with what is expected of it."""
    started = time.monotonic()
    outcomes: list[Outcome] = [] if make_adapter is None else [play(contract, make_adapter) for contract in CONTRACTS]
    reasons = {outcome.contract: outcome.reason for outcome in outcomes if outcome.reason is not None}
    expected = EXPECTED_FAILURES[name]
    return Row(
        adapter=name,
        is_available=make_adapter is not None,
        passed=len(outcomes) - len(reasons),
        total=len(CONTRACTS),
        failing=sorted(reasons),
        expected_failing=sorted(expected),
        as_expected=make_adapter is not None and set(reasons) == expected,
        seconds=round(time.monotonic() - started, 2),
        reasons=reasons,
    )


def print_table(rows: list[Row], *, is_verbose: bool) -> None:
    print(f"{'adapter':<12}{'kept':>10}   {'':<15}{'seconds':>7}   broken")
    for row in rows:
        kept = f"{row.passed} of {row.total}" if row.is_available else "-"
        verdict = "as expected" if row.as_expected else ("NOT AS EXPECTED" if row.is_available else "NOT AVAILABLE")
        print(f"{row.adapter:<12}{kept:>10}   {verdict:<15}{row.seconds:>7.2f}   {' '.join(row.failing) or '-'}")
        for contract, reason in row.reasons.items():
            if is_verbose or contract not in row.expected_failing:
                print(f"{'':<12}  {contract}: {reason}")


def main(arguments: list[str] | None = None) -> int:
    """0 if every row is as expected; an adapter that is not available differs, unless --only leaves it out."""
    parser = argparse.ArgumentParser(prog="python -m bench.replay", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", metavar="NAMES", help=f"of {','.join(EXPECTED_FAILURES)}")
    parser.add_argument("--verbose", action="store_true", help="say how each contract was broken, expected or not")
    options = parser.parse_args(arguments)
    chosen = options.only.split(",") if options.only else list(EXPECTED_FAILURES)
    unknown = sorted(set(chosen) - set(EXPECTED_FAILURES))
    if unknown:
        parser.error(f"unknown adapters {', '.join(unknown)}; choose of {', '.join(EXPECTED_FAILURES)}")
    available = adapters()
    rows = [replay(name, available[name]) for name in chosen]
    is_good = all(row.as_expected for row in rows)
    if options.json:
        print(msgspec.json.encode({"rows": rows, "as_expected": is_good}).decode())
    else:
        print_table(rows, is_verbose=options.verbose)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
