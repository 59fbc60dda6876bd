"""`python -m bench.chaos`: prints what was lost, and exits with 1 if anything was."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import msgspec

from bench.chaos.stages import Plan, Report, run

STAGES = ("scripted", "model")


def main() -> None:
    options = _arguments()
    kills, streams = (20, 16) if options.quick else (options.kills, options.streams)
    plan = Plan(
        kills=kills,
        streams=streams,
        seed=options.seed,
        limit_s=options.limit_s,
        **({"questions": 12, "longest": 200} if options.quick else {}),
    )
    reports = []
    for stage in options.stage or STAGES:
        report = run(stage, plan)
        reports.append(report)
        if not options.json:
            print(table([report], has_head=len(reports) == 1), flush=True)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode([as_json(report) for report in reports]), indent=2).decode())
    sys.exit(0 if all(report.is_good for report in reports) else 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs and SIGSTOPs in each stage")
    parser.add_argument("--streams", type=int, default=32, help="requests at a time")
    parser.add_argument("--seed", type=int, default=0, help="of what is asked, and of when who is killed")
    parser.add_argument("--limit-s", type=float, default=900.0, help="most seconds that a stage goes on killing")
    parser.add_argument("--stage", choices=STAGES, action="append", help="only this one")
    parser.add_argument("--quick", action="store_true", help="20 kills under 16 streams")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


HEAD = (
    f"{'stage':<9} {'kills':>5} {'requests':>8} {'tokens':>7} {'failed':>6} {'lost':>5} {'duplicated':>10} "
    f"{'foreign':>7} {'ties':>4} {'moves':>5} {'longest gap':>11} {'longest wait':>12} {'seconds':>7}  clean"
)


def table(reports: list[Report], *, has_head: bool = True) -> str:
    lines = [HEAD] if has_head else []
    for report in reports:
        tally, difference = report.tally, report.tally.difference
        lines.append(
            f"{report.stage:<9} {sum(report.kills.values()):>5} {tally.requests:>8} {tally.checked:>7} "
            f"{tally.failed:>6} {difference.lost:>5} {difference.duplicated:>10} {difference.foreign:>7} "
            f"{tally.ties:>4} {tally.moves:>5} {tally.longest_gap_s:>9.2f} s {tally.longest_wait_s:>10.2f} s "
            f"{report.seconds:>7.0f}  {'no' if report.unclean else 'yes'}"
        )
        lines.append("          " + ", ".join(f"{name} {count}" for name, count in report.kills.items()))
        if tally.unchecked or tally.left:
            lines.append(f"          {tally.left} clients left, {tally.unchecked} tokens after ties unchecked")
        if sum(report.kills.values()) < report.kills_due:
            lines.append(f"          only {sum(report.kills.values())} of {report.kills_due} kills within the limit")
        if report.exit_code != 0:
            lines.append(f"          the server's exit code was {report.exit_code}")
        lines += [f"          {fault}" for fault in (*tally.faults, *report.unclean)]
    return "\n".join(lines)


def as_json(report: Report) -> dict[str, Any]:
    tally = report.tally
    return {
        "stage": report.stage,
        "is_good": report.is_good,
        "failed": tally.failed,
        "lost": tally.difference.lost,
        "duplicated": tally.difference.duplicated,
        "foreign": tally.difference.foreign,
        "requests": tally.requests,
        "tokens_checked": tally.checked,
        "tokens_unchecked": tally.unchecked,
        "ties": tally.ties,
        "clients_left": tally.left,
        "kills": report.kills,
        "kills_due": report.kills_due,
        "moves": tally.moves,
        "longest_gap_s": round(tally.longest_gap_s, 3),
        "longest_wait_s": round(tally.longest_wait_s, 3),
        "seconds": round(report.seconds, 1),
        "unclean": report.unclean,
        "faults": tally.faults,
        "exit_code": report.exit_code,
        "counters": report.counters,
    }


if __name__ == "__main__":
    main()
