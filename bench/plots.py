"""`python -m bench.plots [--out docs/plots] REPORT.json...`: plots of what the benchmarks wrote with --json.

    python -m bench.http --llama-server PATH --json >http-tiny.json
    python -m bench.frontend --json >frontend.json
    python -m bench.plots http-tiny.json frontend.json

Needs matplotlib (the extra `bench`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib
import msgspec

matplotlib.use("svg")
from matplotlib import pyplot

COLOURS = {"ringfence": "#1f6f8b", "llama-server": "#c97b3d"}
ROLES = {"decoder": "#1f6f8b", "worker": "#7fb3c4", "server": "#e0a96d"}


def plot_http(report: dict[str, Any], out: Path) -> list[Path]:
    """Rates, times to the first token and CPU time per token, by streams and server."""
    model, figures = report["model"], report["figures"]
    figure, (rate, first, cpu) = pyplot.subplots(1, 3, figsize=(11, 3.4), constrained_layout=True)
    names = list(next(iter(figures.values())))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [place + width * index for place in range(len(figures))]
        each = [by_name[name] for by_name in figures.values()]
        colour = COLOURS.get(name, "#888888")
        rate.bar(places, [one["tokens_per_s"] for one in each], width, label=name, color=colour)
        first.bar(places, [one["first_p50"] for one in each], width, color=colour)
        _stack(cpu, places, [one["cpu_us"] for one in each], width, is_whole=name != "ringfence", colour=colour)
    for axes, title in ((rate, "tokens/s"), (first, "first token, p50, ms"), (cpu, "CPU time per token, us")):
        axes.set_title(title, fontsize=10)
        axes.set_xticks([place + 0.4 - width / 2 for place in range(len(figures))], [f"{n} streams" for n in figures])
        axes.spines[["top", "right"]].set_visible(False)
    rate.legend(frameon=False, fontsize=8)
    cpu.legend(frameon=False, fontsize=8)
    return [_save(figure, out / f"http-{model}.svg")]


def plot_frontend(rows: list[dict[str, Any]], out: Path) -> list[Path]:
    """What one server process delivers by streams, and what a token costs it."""
    figure, (rate, cpu) = pyplot.subplots(1, 2, figsize=(7.5, 3.2), constrained_layout=True)
    labels = [f"{row['streams']} streams" for row in rows]
    rate.bar(labels, [row["tokens_per_s"] for row in rows], 0.6, color=COLOURS["ringfence"])
    rate.set_title("tokens/s through one server process", fontsize=10)
    _stack(
        cpu,
        list(range(len(rows))),
        [{"worker": row["worker_cpu_us"], "server": row["server_cpu_us"]} for row in rows],
        0.6,
        is_whole=False,
        colour="",
    )
    cpu.set_xticks(range(len(rows)), labels)
    cpu.set_title("CPU time per token, us", fontsize=10)
    cpu.legend(frameon=False, fontsize=8)
    for axes in (rate, cpu):
        axes.spines[["top", "right"]].set_visible(False)
    return [_save(figure, out / "frontend.svg")]


def _stack(
    axes: Any, places: list[float], used: list[dict[str, float]], width: float, *, is_whole: bool, colour: str
) -> None:
    """Bars of CPU time: by role, or whole."""
    if is_whole:
        axes.bar(places, [sum(one.values()) for one in used], width, color=colour, label="llama-server")
        return
    floor = [0.0] * len(used)
    for role, role_colour in ROLES.items():
        if role not in used[0]:
            continue
        heights = [one[role] for one in used]
        axes.bar(places, heights, width, bottom=floor, color=role_colour, label=role)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path


def plot(report: dict[str, Any], out: Path) -> list[Path]:
    if "figures" in report:
        return plot_http(report, out)
    if "frontend" in report:
        return plot_frontend(report["frontend"], out)
    raise ValueError("no report of bench.http or bench.frontend")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plots", description="Plots of the benchmarks' JSON reports.")
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.json")
    parser.add_argument("--out", type=Path, default=Path("docs/plots"), help="folder for the SVG files")
    options = parser.parse_args(arguments)
    matplotlib.rcParams["svg.hashsalt"] = "ringfence"  # the same data give the same file
    for report in options.reports:
        for path in plot(msgspec.json.decode(report.read_bytes()), options.out):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
