"""The journal of scripted decoders: one JSON object per line, appended at once, safe to share between processes."""

import json
import os
import time
from typing import Any


class Journal:
    """Writes events. Without a path it only counts what it was given."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644) if path else -1
        self._counts: dict[str, int] = {}

    def write(self, event: str, **details: Any) -> None:
        self._counts[event] = self._counts.get(event, 0) + 1
        if self._fd >= 0:
            entry = {"event": event, "pid": os.getpid(), "time": time.monotonic(), **details}
            os.write(self._fd, json.dumps(entry, separators=(",", ":")).encode() + b"\n")

    def count(self, event: str) -> int:
        """How many of these were written, by every process that shares the journal."""
        if self._path is None:
            return self._counts.get(event, 0)
        with open(self._path, "rb") as file:
            return file.read().count(b'{"event":"%s"' % event.encode())


def read_journal(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All events so far, oldest first; a line that is being written is left out. No file is no events."""
    try:
        with open(path, "rb") as file:
            *lines, _ = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]
