"""Starts scripted decoders, changes their script while they run, and reads what reached them."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.fakes.journal import read_journal

T = TypeVar("T")

DECODER = Path(__file__).with_name("decoder.py")


class Stage:
    """A directory with one script and one journal, for one decoder or for several that share them.

        stage = Stage(tmp_path)
        stage.script(token_delay_s=0.01, rules=[{"when": {"gen": 2}, "crash_at": 5}])
        settings = WorkerSettings(index=0, decoder_command=stage.command(slots=4))
        ...
        assert [event["rid"] for event in stage.events("GEN")] == [1, 2]

    With `name="$FD_NAME"` the journal is one per value of that variable in the decoder's environment.
    """

    def __init__(self, directory: Path, name: str = "decoder") -> None:
        self._directory = directory
        self._name = name
        self.script_path = directory / "script.json"
        self.script()

    def command(self, **options: Any) -> tuple[str, ...]:
        """The command line of a decoder; options are keys of tests/fakes/script.py."""
        words = [sys.executable, "-S", "-E", str(DECODER), "--script", str(self.script_path)]
        words += ["--journal", str(self._journal_path(self._name))]
        for key, value in options.items():
            words += ["--" + key.replace("_", "-"), value if isinstance(value, str) else json.dumps(value)]
        return tuple(words)

    def script(self, **keys: Any) -> None:
        """Replace the script; counts from the next GEN (or start) on."""
        fresh = self.script_path.with_suffix(".new")
        fresh.write_text(json.dumps(keys))
        os.replace(fresh, self.script_path)

    def events(self, *kinds: str, name: str | None = None) -> list[dict[str, Any]]:
        """What the journal holds, oldest first; only these kinds of event if any are named."""
        journal = read_journal(self._journal_path(name or self._name))
        return [event for event in journal if not kinds or event["event"] in kinds]

    def wait_for(self, kind: str, count: int = 1, *, timeout_s: float = 10.0) -> list[dict[str, Any]]:
        """The events of a kind once there are `count`. Raises AssertionError when that takes too long."""
        return until(lambda: self._enough(kind, count), timeout_s=timeout_s, what=f"{count} {kind} in {self.events()}")

    def _enough(self, kind: str, count: int) -> list[dict[str, Any]]:
        found = self.events(kind)
        return found if len(found) >= count else []

    def _journal_path(self, name: str) -> Path:
        return self._directory / f"{name}.journal"


def until(condition: Callable[[], T], *, timeout_s: float = 10.0, what: str = "condition") -> T:
    """The first true value of a condition. Raises AssertionError when that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.002)
    return value
