"""Kills and stops workers and decoders of one server at random moments, while answers flow.

A victim is taken from /status, and signalled only when it is a living descendant of this server: by a pidfd that was opened
before it was recognised, so nothing that came to its number later can be meant.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from signal import SIGKILL, SIGSTOP, Signals

from bench.chaos.answers import Progress
from bench.chaos.served import Served, kill, see

KINDS = (("worker", SIGKILL), ("decoder", SIGKILL), ("worker", SIGSTOP), ("decoder", SIGSTOP))
_WEIGHTS = (7, 7, 3, 3)
_BURST_SHARE = 0.15
_LONGEST_PAUSE_S = 0.5
_POLL_S = 0.01


@dataclass(slots=True)
class Killer:
    """Strikes `limit` times. load: pieces of text that must reach clients between two strikes, but for bursts."""

    server: Served
    progress: Progress
    chance: random.Random
    limit: int
    load: int
    kills: dict[str, int] = field(default_factory=lambda: {name(*kind): 0 for kind in KINDS})

    @property
    def total(self) -> int:
        return sum(self.kills.values())

    async def run(self, until_s: float) -> None:
        """Strike until the limit, or until the time (monotonic) is over."""
        while self.total < self.limit and time.monotonic() < until_s:
            if self.chance.random() >= _BURST_SHARE:
                await self._under_load(until_s)
                await asyncio.sleep(self.chance.uniform(0.0, _LONGEST_PAUSE_S))
            await self._strike()

    async def _under_load(self, until_s: float) -> None:
        due = self.progress.pieces + self.load
        while self.progress.pieces < due and time.monotonic() < until_s:  # noqa: ASYNC110 one task's pace
            await asyncio.sleep(_POLL_S)

    async def _strike(self) -> None:
        whom, number = self.chance.choices(KINDS, _WEIGHTS)[0]
        workers = (await self.server.status())["workers"]
        worker = self.chance.choice(workers)
        pid = worker["pid"] if whom == "worker" else worker["decoder_pid"]
        victim = see(pid) if self.server.owns(pid) else None
        if victim is not None and not victim.is_zombie and self.server.owns(pid) and kill(victim, number):
            self.kills[name(whom, number)] += 1
        else:
            await asyncio.sleep(_POLL_S)


def name(whom: str, number: Signals) -> str:
    """How a kind of strike is listed."""
    return f"{whom} {number.name}"
