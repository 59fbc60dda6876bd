"""/status for people: the table of `ringfence status`, and tables in general."""

from collections.abc import Sequence
from typing import Any


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned to the left; the last one is as wide as it likes."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)


def describe_status(status: dict[str, Any]) -> str:
    """Several lines: the server, its queue, and a row for each worker."""
    queue, counters = status["queue"], status["counters"]
    head = [
        f"{status['model']}: {status['health']}" + (", draining" if status["draining"] else ""),
        f"up {duration(status['uptime_s'])}, {status['running']} of {status['capacity']} running, "
        f"{queue['requests']} waiting, {status['tokens_per_s']:.0f} tokens/s",
        f"{counters['completed']} completed, {counters['cancelled']} cancelled, {counters['failed']} failed, "
        f"{counters['rejected']} rejected, {counters['moved']} moved",
    ]
    rows: list[tuple[str, ...]] = [("worker", "state", "running", "restarts", "decoder", "device", "reason")]
    rows += [_worker_row(worker) for worker in status["workers"]]
    return "\n".join([*head, "", table(rows)])


def _worker_row(worker: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(worker["index"]),
        _state(worker),
        f"{worker['running']}/{worker['capacity']}",
        str(worker["restarts"]),
        str(worker["decoder_pid"] or "-"),
        worker["device"],
        worker["reason"],
    )


def _state(worker: dict[str, Any]) -> str:
    state = str(worker["state"])
    board = worker["board"]
    if state == "loading" and board is not None:
        percent = board["load_percent"]
        return f"{state} [{'#' * (percent // 10):<10}] {percent} %"
    return f"{state}, cordoned" if worker["is_cordoned"] else state


def duration(seconds: float) -> str:
    """3 d 4 h, 5 h 6 min, 7 min 8 s or 9 s."""
    whole = int(seconds)
    for size, unit, smaller, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {small_unit}"
    return f"{whole} s"
