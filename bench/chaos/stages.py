"""One run of the bench: a server, its load, its killer, and the report."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.chaos import recorded, scripted
from bench.chaos.answers import Progress
from bench.chaos.killer import Killer
from bench.chaos.requests import Call
from bench.chaos.served import Served
from bench.chaos.traces import Baseline, serving, unclean
from bench.chaos.verdict import Tally

WORKERS = 3
REQUESTS_PER_KILL = 40  # a bound, far above what a run needs
_QUESTIONS = 48
_RECORDERS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How hard and how long. limit_s: of each stage; longest: tokens of the tiny model's longest answer."""

    kills: int
    streams: int
    seed: int
    limit_s: float
    questions: int = _QUESTIONS
    longest: int = 400

    @property
    def slots(self) -> int:
        """Fewer than streams over all workers, so that some always wait."""
        return max(1, self.streams // (WORKERS + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one stage showed. unclean: what was left of it."""

    stage: str
    tally: Tally
    kills: dict[str, int]
    kills_due: int
    seconds: float
    unclean: list[str]
    exit_code: int | None
    counters: dict[str, int]

    @property
    def is_good(self) -> bool:
        return (
            self.tally.is_lossless
            and sum(self.kills.values()) >= self.kills_due
            and not self.unclean
            and self.exit_code == 0
        )


def common_options(plan: Plan) -> dict[str, Any]:
    """Limits for a server that is killed twice a second: short waits, nothing refused, no worker given up."""
    return {
        "host": "127.0.0.1",
        "workers": WORKERS,
        "gpus": "none",
        "slots": plan.slots,
        "context": 1024,
        "wait_for_workers_s": 120,
        "deadline_s": 240,
        "hang_limit_s": 60,
        "start_limit_s": 60,
        "kill_grace_s": 2,
        "backoff_first_s": 0.05,
        "backoff_cap_s": 0.5,
        "stable_after_s": 1,
        "deaths_limit": 1000,
        "watchdog_interval_s": 0.2,
        "drain_s": 10,
    }


def run(stage: str, plan: Plan) -> Report:
    """One stage from the server's start to its end."""
    with tempfile.TemporaryDirectory(prefix="ringfence-chaos-") as name:
        folder = Path(name)
        chance = random.Random(f"{stage} {plan.seed}")
        own = scripted.options(folder, slots=plan.slots) if stage == "scripted" else recorded.options(folder)
        log = Path(os.environ.get("CHAOS_LOG", folder / "server")).with_suffix(f".{stage}.log")
        with Served(log, {**common_options(plan), **own}) as server:
            return asyncio.run(_Run(stage, plan, chance, server).report())


class _Run:
    """The clients and the killer of one stage, and what they counted."""

    def __init__(self, stage: str, plan: Plan, chance: random.Random, server: Served) -> None:
        self._stage = stage
        self._plan = plan
        self._chance = chance
        self._server = server
        self._tally = Tally()
        self._progress = Progress()
        self._killer = Killer(server, self._progress, chance, plan.kills, load=plan.streams)

    async def report(self) -> Report:
        began_s = time.monotonic()
        await serving(self._server)
        calls = await self._calls()
        fresh = next(calls)
        await fresh.send(self._server.port)
        before = await Baseline.of(self._server)
        await self._load(calls, began_s + self._plan.limit_s)
        left = await unclean(self._server, before, fresh)
        counters = (await self._server.status())["counters"]
        exit_code = await asyncio.to_thread(self._stop)
        left += [f"process {seen.pid} after the end: {seen.command}" for seen in self._server.descendants()]
        return Report(
            stage=self._stage,
            tally=self._tally,
            kills=self._killer.kills,
            kills_due=self._plan.kills,
            seconds=time.monotonic() - began_s,
            unclean=left,
            exit_code=exit_code,
            counters=counters,
        )

    async def _calls(self) -> Iterator[Call]:
        if self._stage == "scripted":
            return scripted.calls(self._chance)
        asked = list(recorded.questions(self._chance, self._plan.questions, longest=self._plan.longest))
        answers = [await question.send(self._server.port) for question in asked]  # one by one: undisturbed
        for question, answer in zip(asked, answers, strict=True):
            if answer.fault:
                raise AssertionError(f"{question.name} has no undisturbed answer: {answer.fault}")
        return recorded.calls(self._chance, asked, answers)

    async def _load(self, calls: Iterator[Call], until_s: float) -> None:
        """Clients ask one request after the other until the killer is done, and then finish what they began."""
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(self._plan.streams):
                group.create_task(self._client(calls, over))
            await self._killer.run(until_s)
            over.set()

    async def _client(self, calls: Iterator[Call], over: asyncio.Event) -> None:
        while not over.is_set() and self._tally.requests < REQUESTS_PER_KILL * self._plan.kills + self._plan.streams:
            call = next(calls)
            answer = await call.send(self._server.port, self._progress)
            self._tally.add(call.name, answer, call.judge(answer))

    def _stop(self) -> int | None:
        self._server.signal(signal.SIGTERM)
        try:
            return self._server.wait(30.0)
        except subprocess.TimeoutExpired:
            return None
