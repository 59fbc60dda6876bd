"""Whether a server is clean: as it was before the load, but for figures that count."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from typing import Any

from bench.chaos.requests import Call
from bench.chaos.served import Served, see

CLEAN_S = 5.0
"""Time that a server may take for its tidying."""
_PATIENCE_S = 60.0  # processes of a loaded machine, and a decoder that was killed last, need time to come back


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a quiet server has. descriptors: of the server, by kind; those of a worker and of a decoder."""

    descriptors: dict[str, int]
    worker_descriptors: dict[str, int]
    processes: int
    shared: frozenset[str]

    @classmethod
    async def of(cls, server: Served) -> Baseline:
        """Taken when every worker serves and nothing runs."""
        await serving(server)
        return await _quiet(server)


async def serving(server: Served, limit_s: float = 120.0) -> dict[str, Any]:
    """/status once all workers serve. Raises AssertionError when that takes too long."""
    until = time.monotonic() + limit_s
    while True:
        status = await server.status()
        if all(worker["is_serving"] for worker in status["workers"]):
            return status
        if time.monotonic() > until:
            raise AssertionError(f"not every worker serves within {limit_s} s:\n{status}\n{server.tail()}")
        await asyncio.sleep(0.02)


async def unclean(server: Served, before: Baseline, fresh: Call) -> list[str]:
    """What is left of a load, in words; empty for a clean server. Waits for it to become clean, within limits."""
    faults = await _settled(server)
    try:
        await serving(server, _PATIENCE_S)
    except AssertionError as error:
        faults.append(str(error))
    answer = await fresh.send(server.port)
    verdict = fresh.judge(answer)
    if answer.fault or verdict.fault or verdict.difference:
        faults.append(f"a fresh request: {answer.fault or verdict.fault or verdict.difference}")
    until = time.monotonic() + CLEAN_S
    while left := _differences(before, await _quiet(server), server):
        if time.monotonic() > until:
            return faults + left
        await asyncio.sleep(0.05)
    return faults


async def _settled(server: Served) -> list[str]:
    """Nothing runs or waits, within CLEAN_S of the last answer."""
    until = time.monotonic() + CLEAN_S
    while True:
        status = await server.status()
        queue = status["queue"]
        busy = {
            "running": status["running"],
            "waiting": queue["requests"],
            "reserved": queue["reserved"],
            "queued tokens": queue["tokens"],
            "requests": status["http"]["requests"] - 1,  # this one
            "slots": sum(worker["running"] for worker in status["workers"]),
        }
        if not any(busy.values()):
            return []
        if time.monotonic() > until:
            return [f"{value} {name} left after {CLEAN_S} s" for name, value in busy.items() if value]
        await asyncio.sleep(0.05)


async def _quiet(server: Served) -> Baseline:
    worker = (await server.status())["workers"][0]["pid"]
    await asyncio.sleep(0)  # the connection that asked is closed
    try:
        of_worker = server.descriptors(worker) if see(worker) else {}
    except OSError:
        of_worker = {}
    return Baseline(server.descriptors(), of_worker, len(server.descendants()), frozenset(os.listdir("/dev/shm")))


def _differences(before: Baseline, after: Baseline, server: Served) -> list[str]:
    faults = [
        f"{after.descriptors.get(kind, 0)} descriptors of {kind}, {before.descriptors.get(kind, 0)} before"
        for kind in sorted(after.descriptors.keys() | before.descriptors.keys())
        if after.descriptors.get(kind, 0) > before.descriptors.get(kind, 0)
    ]
    if sum(after.worker_descriptors.values()) > sum(before.worker_descriptors.values()):
        faults.append(f"a worker's descriptors {after.worker_descriptors}, {before.worker_descriptors} before")
    if after.processes != before.processes:
        faults.append(f"{after.processes} processes, {before.processes} before: {server.descendants()}")
    zombies = [seen for seen in server.descendants() if seen.is_zombie]
    faults += [f"zombie {seen.pid}" for seen in zombies]
    return faults + [f"/dev/shm/{name} is new" for name in sorted(after.shared - before.shared)]
