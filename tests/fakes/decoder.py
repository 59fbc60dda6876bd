"""The scripted decoder: speaks the decoder protocol, and fails on demand.

    python -S -E tests/fakes/decoder.py --slots 4 --journal FILE --script FILE [--any-key VALUE]...

What it can be told is listed in script.py; what it answers by default in echo.py; stage.py makes its command line,
scripts it and reads its journal. Standard library only, about 25 ms to READY.

The journal gets one JSON object per line, written at once: `event` is START, READY, GEN (rid, ids, max_new, keys, gen,
position), STOP (rid, sent: tokens so far, or null for a turn that is not running), END (rid, finish, sent), QUIT, EOF,
TERM, GRANDCHILD (child), or VIOLATION (text: a command the protocol does not allow); all have pid and time (monotonic).

One thread: a step takes the next token of every turn that is due, writes them at once, then looks at stdin.
"""

import os
import select
import signal
import sys
import time
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from tests.fakes.burdens import hold_lock, leave_grandchild
from tests.fakes.journal import Journal
from tests.fakes.script import Script
from tests.fakes.turn import Catastrophe, Command, Turn, bad_command, parse_command


class Decoder:
    """State of the process: its turns, and when the next thing is due."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.journal = Journal(script.journal_path)
        script.start_number = self.journal.count("START") + 1
        self.keys = script.for_start()
        self.slots = int(self.keys["slots"] or 1)
        self.is_tagged = (self.keys["dialect"] or ("tagged" if self.keys["slots"] else "solo")) == "tagged"
        self.turns: list[Turn] = []
        self.used_rids: set[int] = set()
        self.gens = 0
        self.steps = 0
        self.kept: list[list[int]] = []
        self.unread = b""
        self.refuse = set(self.keys["refuse"])
        self.inputs = [0]

    # ---- start and end ------------------------------------------------------------------------------------------

    def start(self) -> None:
        keys = self.keys
        signal.alarm(int(keys["life_s"]))
        signal.signal(signal.SIGTERM, self._on_term)
        self.journal.write("START", argv=sys.argv[1:], cores=sorted(os.sched_getaffinity(0)), devices=_devices())
        if keys["lock_file"]:
            hold_lock(keys["lock_file"], float(keys["lock_s"]))
        if keys["grandchild"]:
            child = leave_grandchild(keys["grandchild"], int(keys["life_s"]))
            self.journal.write("GRANDCHILD", child=child)
        _write(2, keys["start_stderr"].encode())
        self._say_info()
        if keys["start_exit"] is not None:
            self._pause(float(keys["start_delay_s"]))
            os._exit(int(keys["start_exit"]))
        self._load(float(keys["start_delay_s"]), int(keys["load_steps"]))
        slots = f" slots={self.slots}" if self.is_tagged else ""
        _write(1, f"READY {keys['context']} stop{slots}\n".encode())
        self.journal.write("READY")

    def _say_info(self) -> None:
        announced: dict[str, Any] = {"engine": "scripted-1", "logit_bias": 1}
        if self.is_tagged:
            announced |= {"vocab": self.keys["vocab"], "model": "scripted", "kv_cells": 65536, "backend": "cpu"}
            announced |= {"logprobs": 5, "grammar": 1, "embeddings": 1, "resume": 1}
        announced |= self.keys["info"]
        words = [f"{key}={value}" for key, value in announced.items() if value is not None]
        _write(1, f"INFO {' '.join(words)}\n".encode())

    def _load(self, delay_s: float, steps: int) -> None:
        for step in range(steps):
            _write(1, f"INFO load={100 * step // steps}\n".encode())
            self._pause(delay_s / steps)
        if steps == 0:
            self._pause(delay_s)
        while self.keys["never_ready"]:
            self._pause(3600)

    def _pause(self, seconds: float) -> None:
        """Sleep, unless stdin ends: nobody is left to load for."""
        if "eof" in self.refuse:
            time.sleep(seconds)
            return
        poll = select.poll()
        poll.register(0, 0)
        if poll.poll(seconds * 1000):
            self.journal.write("EOF")
            self._leave()

    def _on_term(self, _signal: int, _frame: object) -> None:
        self.journal.write("TERM")
        if "term" not in self.refuse:
            self._leave()

    def _leave(self) -> NoReturn:
        time.sleep(float(self.keys["exit_delay_s"]))
        os._exit(0)

    # ---- loop ---------------------------------------------------------------------------------------------------

    def run(self) -> NoReturn:
        started_s = time.monotonic()
        dues = {name: started_s + self.keys[name] for name in _CATASTROPHES if self.keys[name] is not None}
        stat_s = float(self.keys["stat_every_s"])
        stat_due = started_s + stat_s if stat_s else float("inf")
        while True:
            now = time.monotonic()
            for name, due in dues.items():
                if due <= now:
                    Catastrophe(name.removesuffix("_after_s"), self.keys).happen()
            if stat_due <= now:
                self._say_stat()
                stat_due = now + stat_s
            if self.turns:
                self._step(now)
            next_due = min([turn.next_s for turn in self.turns] + [*dues.values(), stat_due])
            wait_s = None if next_due == float("inf") else max(next_due - time.monotonic(), 0.0)
            if select.select(self.inputs, (), (), wait_s)[0]:
                self._read()

    def _say_stat(self) -> None:
        used = sum(len(turn.prompt) + turn.sent for turn in self.turns)
        _write(1, b"STAT kv_used=%d kv_cells=65536 steps=%d running=%d\n" % (used, self.steps, len(self.turns)))

    def _step(self, now: float) -> None:
        """The next output of every turn that is due, in one write."""
        out: list[bytes] = []
        catastrophe = None
        foreign = [turn.rid for turn in self.turns]
        for turn in self.turns:
            if turn.next_s <= now:
                catastrophe = turn.advance(now, out, foreign)
                if catastrophe:
                    break
        if out:
            self.steps += 1
            _write(1, b"".join(out))
        if catastrophe:
            catastrophe.happen()
        ended = [turn for turn in self.turns if turn.finish is not None]
        for turn in ended:
            self.turns.remove(turn)
            self.journal.write("END", rid=turn.rid, finish=turn.finish, sent=turn.sent)
            if self.keys["prefix_cache"]:
                self.kept = [*self.kept, turn.conversation()][-self.slots :]

    def _read(self) -> None:
        data = os.read(0, 1 << 20)
        if not data:
            self.journal.write("EOF")
            if "eof" not in self.refuse:
                self._leave()
            self.inputs.clear()
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            self._obey(line)

    # ---- commands -----------------------------------------------------------------------------------------------

    def _obey(self, line: bytes) -> None:
        command = parse_command(line, is_tagged=self.is_tagged)
        if command is None:
            self.journal.write("VIOLATION", text=line[:200].decode("latin-1"))
        elif command.name == "QUIT":
            self.journal.write("QUIT")
            if "quit" not in self.refuse:
                self._leave()
        elif command.name == "STOP":
            self._stop(command.rid)
        else:
            self._begin(command)

    def _stop(self, rid: int) -> None:
        turn = next((turn for turn in self.turns if turn.rid == rid), None)
        self.journal.write("STOP", rid=rid, sent=None if turn is None else turn.sent)
        if turn is not None:
            turn.stop(time.monotonic())

    def _begin(self, command: Command) -> None:
        self.gens += 1
        cached = self._cached(command.ids) if self.keys["prefix_cache"] else None
        turn = Turn(
            command, self.script, tagged=self.is_tagged, gen=self.gens, total_gen=self._total_gen, cached=cached
        )
        self.journal.write(
            command.name,
            rid=command.rid, ids=command.ids, max_new=command.max_new, keys=command.keys, gen=self.gens,
            position=turn.position,
        )  # fmt: skip
        refusal = self._refusal(command, turn)
        if refusal is not None:
            _write(1, f"ERR {refusal}".encode() + turn.tag + b"\n")
            if turn.keys["error_done"]:
                _write(1, turn.done_line("stop"))
            return
        self.used_rids.add(command.rid)
        self.turns.append(turn)

    def _refusal(self, command: Command, turn: Turn) -> str | None:
        if self.is_tagged and command.rid in self.used_rids:
            self.journal.write("VIOLATION", text=f"request id {command.rid} used twice")
            return "request id used twice"
        bad = bad_command(command, vocab=self.keys["vocab"])
        if bad or (len(self.turns) >= self.slots and not self.is_tagged):
            self.journal.write("VIOLATION", text=bad or "GEN before the last request's DONE")
            return bad or "busy"
        if len(self.turns) >= self.slots:
            return "busy"
        if len(command.ids) + command.max_new + (0 if self.is_tagged else 8) > self.keys["context"]:
            return f"prompt and max_new exceed the context of {self.keys['context']}"
        if turn.keys["error"] is not None and turn.keys["error_at"] is None:
            return str(turn.keys["error"])
        return None

    def _total_gen(self) -> int:
        return self.journal.count("GEN") + 1

    def _cached(self, prompt: list[int]) -> int:
        return max((_common(prompt, kept) for kept in self.kept), default=0)


_CATASTROPHES = ("crash_after_s", "hang_after_s", "spin_after_s")


def _common(left: list[int], right: list[int]) -> int:
    """Length of the common prefix; the last prompt token is always read again."""
    most = min(len(left) - 1, len(right))
    return next((index for index in range(most) if left[index] != right[index]), most)


def _devices() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if "VISIBLE_DEVICES" in name}


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def main() -> None:
    try:
        decoder = Decoder(Script(sys.argv[1:]))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"scripted decoder: {error}\n")
        os._exit(64)
    try:
        decoder.start()
        decoder.run()
    except BrokenPipeError:
        os._exit(0)  # the reader is gone


if __name__ == "__main__":
    main()
