"""The record of a death: one JSON file for each worker or decoder that ended against our will, the newest `kept` of them.

A record says what an engineer asks the morning after: how it ended, what it last wrote to stderr, what its board showed, what
each slot was doing, the last records of the ring. It holds no prompt text, no token and no output unless the operator
asked for content (`incidents_with_content`).

Files are written by a thread, and a full or read-only disk costs the file and a log line, never a request.
"""

import asyncio
import logging
import os
import time
from collections import deque
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from shm.ring import Kind
from workers.incarnation import Lease
from workers.replica import Death

_log = logging.getLogger("ringfence.incidents")
_STDERR_LINES = 50


class IncidentLog:
    """Newest records in memory, and in `directory` when there is one."""

    def __init__(self, directory: str, *, kept: int, with_content: bool) -> None:
        self._directory = Path(directory) if directory else None
        self._kept = kept
        self._with_content = with_content
        self._records: deque[dict[str, Any]] = deque(maxlen=kept)
        self._writes: set[asyncio.Task[None]] = set()
        self._count = 0
        self._load()

    def __repr__(self) -> str:
        return f"IncidentLog(directory={self._directory}, kept={len(self._records)})"

    def newest(self) -> list[dict[str, Any]]:
        """Every record kept, newest first."""
        return list(reversed(self._records))

    def record(self, death: Death) -> None:
        """Keep a death, and write it to a file without waiting for the disk."""
        record = describe(death, with_content=self._with_content)
        self._count += 1
        name = f"{record['time'].replace(':', '')}-{os.getpid()}-{self._count:04d}-{record['what']}{death.replica}.json"
        record["file"] = name if self._directory else None
        self._records.append(record)
        _log.warning(
            "incident what=%s worker=%d incarnation=%d kind=%s turns=%d reason=%r",
            record["what"],
            death.replica,
            death.incarnation,
            death.exit.kind,
            len(death.leases),
            death.exit.text,
        )
        if self._directory is not None:
            write = asyncio.get_running_loop().create_task(asyncio.to_thread(self._write, name, record))
            self._writes.add(write)
            write.add_done_callback(self._writes.discard)

    async def flush(self) -> None:
        """Wait for files being written."""
        await asyncio.gather(*self._writes)

    def _write(self, name: str, record: dict[str, Any]) -> None:
        assert self._directory is not None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            partial = self._directory / f".{name}.partial"
            partial.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2))
            partial.rename(self._directory / name)
            for old in sorted(self._directory.glob("*.json"))[: -self._kept]:
                old.unlink(missing_ok=True)
        except OSError as error:
            _log.error("incident %s could not be written: %s", name, error)

    def _load(self) -> None:
        """Records of earlier lives of the server."""
        if self._directory is None or not self._directory.is_dir():
            return
        for path in sorted(self._directory.glob("*.json"))[-self._kept :]:
            try:
                self._records.append(msgspec.json.decode(path.read_bytes()))
            except (OSError, msgspec.MsgspecError) as error:
                _log.warning("incident %s can't be read: %s", path.name, error)


def describe(death: Death, *, with_content: bool) -> dict[str, Any]:
    """A death as plain JSON values."""
    board = asdict(death.board)
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "what": "worker" if death.is_worker else "decoder",
        "worker": death.replica,
        "incarnation": death.incarnation,
        "kind": str(death.exit.kind),
        "reason": death.exit.text,
        "status": death.status,
        "is_external": death.exit.is_external,
        "turns": [_turn(lease, with_content=with_content) for lease in death.leases],
        "ring": [_record(head, payload, with_content=with_content) for head, payload in death.records],
        "board": {**board, "state": str(death.board.state)},
        "board_read_ns": time.monotonic_ns(),
        "stderr": list(death.stderr)[-_STDERR_LINES:],
    }


def _turn(lease: Lease, *, with_content: bool) -> dict[str, Any]:
    turn = lease.turn
    doing = "decode" if len(turn.ids) > lease.first_token else "prefill" if turn.prefilled else "accepted"
    told: dict[str, Any] = {
        "request": turn.request.id,
        "slot": lease.slot,
        "generation": lease.generation,
        "doing": doing,
        "prompt_tokens": len(turn.request.prompt),
        "prefilled": turn.prefilled,
        "tokens": len(turn.ids),
        "max_new": turn.request.max_new,
        "moves": turn.moves,
        "deaths": lease.job.record.deaths,
        "is_cancelled": turn.is_cancelled,
    }
    if with_content:
        told |= {"prompt": list(turn.request.prompt), "output": list(turn.ids)}
    return told


def _record(head: int, payload: int, *, with_content: bool) -> dict[str, Any]:
    kind = head & 0xFFFF
    name = Kind(kind).name.lower() if kind in Kind._value2member_map_ else f"unknown {kind}"
    told: dict[str, Any] = {"slot": head >> 16 & 0xFFFF, "generation": head >> 32, "kind": name}
    if with_content or kind not in (Kind.TOKEN, Kind.ALTERNATIVE):
        told["value"] = payload >> 32
    return told
