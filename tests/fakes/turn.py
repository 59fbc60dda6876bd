"""One request as the scripted decoder runs it: which line comes next, and when."""

import os
import signal
import sys
import time
from binascii import b2a_base64
from collections.abc import Callable
from struct import pack
from typing import Any, NamedTuple

from tests.fakes.echo import echo_token, read_prompt
from tests.fakes.script import Script

NEVER = float("inf")
_HAPPENINGS = ("crash", "hang", "spin")


class Command(NamedTuple):
    name: str
    rid: int
    max_new: int
    keys: dict[str, str]
    ids: list[int]


def parse_command(line: bytes, *, is_tagged: bool) -> Command | None:
    """A command, or None for what the protocol does not allow."""
    words = line.split(b" ")
    name = words[0].decode("latin-1")
    numbers = {"QUIT": 0, "STOP": 0, "GEN": 1, "EMB": 0}.get(name)
    if numbers is None:
        return None
    rid = 0
    rest = words[1:]
    if is_tagged and name != "QUIT":
        if not rest or not rest[0].isdigit():
            return None
        rid = int(rest.pop(0))
    if name in ("QUIT", "STOP"):
        return Command(name, rid, 0, {}, []) if not rest else None
    max_new = rest.pop(0) if numbers and rest else b"0"
    if not rest or not max_new.isdigit() or not all(b"=" in word for word in rest[:-1]):
        return None
    ids = rest[-1].split(b",")
    if not all(map(bytes.isdigit, ids)):
        return None
    pairs = (word.decode().partition("=") for word in rest[:-1])
    return Command(name, rid, int(max_new), {key: value for key, _, value in pairs}, [int(id) for id in ids])


def bad_command(command: Command, *, vocab: int) -> str | None:
    """What a real decoder would refuse."""
    if command.name == "GEN" and command.max_new < 1:
        return "max_new must be at least 1"
    if max(command.ids) >= vocab:
        return f"token id {max(command.ids)} is outside the vocabulary"
    return None


class Catastrophe(NamedTuple):
    """Something that befalls the whole process: "crash", "hang" or "spin"."""

    what: str
    keys: dict[str, Any]

    def happen(self) -> None:
        if self.what == "crash":
            sys.stderr.write(self.keys["crash_stderr"])
            sys.stderr.flush()
            if self.keys["crash_code"] is not None:
                os._exit(int(self.keys["crash_code"]))
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), int(self.keys["crash_signal"]))
        while self.what == "spin":
            pass
        while True:
            signal.pause()


class Turn:
    """position: index of the next token in the request's whole output. sent: tokens of this turn."""

    def __init__(
        self,
        command: Command,
        script: Script,
        *,
        tagged: bool,
        gen: int,
        total_gen: Callable[[], int],
        cached: int | None,
    ) -> None:
        self.prompt = command.ids
        self.rid = command.rid
        self.tag = b" #%d" % command.rid if tagged else b""
        self.resume = int(command.keys.get("resume", 0))
        echo = read_prompt(command.ids, self.resume)
        self.keys = keys = script.for_turn(command.ids, echo, gen=gen, total_gen=total_gen)
        self.marker = echo.marker
        self.position = echo.position
        self.sent = 0
        self.finish: str | None = None
        self.stop_due_s = NEVER
        self.is_embedding = command.name == "EMB"
        self.cached = keys["cached"] if keys["cached"] is not None else cached
        self._last = self.position + command.max_new
        self._stops_lost = 0
        self._logprobs = int(command.keys["logprobs"]) if "logprobs" in command.keys else None
        self._at = self._happenings()
        self._delay_s = float(keys["token_delay_s"])
        now = time.monotonic()
        self._began_s = now
        self._first_s = now + float(keys["prefill_s"]) + self._delay_s
        self._has_begun = False
        self._has_read = False
        self._is_stalled = False
        self.due_s = now

    def stop(self, now: float) -> None:
        self._stops_lost += 1
        if self._stops_lost > self.keys["lose_stops"] and not self.keys["ignore_stop"]:
            self.stop_due_s = min(self.stop_due_s, now + float(self.keys["stop_delay_s"]))

    @property
    def next_s(self) -> float:
        """When `advance` has something to do."""
        return min(self.due_s, self.stop_due_s)

    def conversation(self) -> list[int]:
        return self.prompt + [self._token(index) for index in range(self.position - self.sent, self.position)]

    def advance(self, now: float, out: list[bytes], running: list[int]) -> Catastrophe | None:
        """Append what is due; set `finish` when that was the end."""
        if self.stop_due_s <= now:
            self._end("cancel", out, running)
            return None
        if not self._has_begun:
            self._begin(out, running)
        if now < self._first_s:
            self._read_on(now, out)
            return None
        if self.is_embedding:
            values = [echo_token(self.marker, index, base=-500, span=1000) / 500 for index in range(8)]
            out.append(b"E " + b2a_base64(pack("<8f", *values), newline=False) + self.tag + b"\n")
            self._end("stop", out, running)
            return None
        if not self._has_read:
            self._has_read = True
            if self.cached is not None:
                out.append(b"REUSED %d%b\n" % (self.cached, self.tag))
        for _ in range(self.keys["burst"]):
            if catastrophe := self._next_token(now, out, running):
                return catastrophe
            if self.finish is not None or self._is_stalled:
                return None
        self.due_s = max(self.due_s, now - self._delay_s) + self._delay_s  # from its own time: delays do not add up
        return None

    def _next_token(self, now: float, out: list[bytes], running: list[int]) -> Catastrophe | None:
        """What happens at this position, then its token. DONE comes with the last one, unless something is between."""
        for happening in self._at.get(self.position, ()):
            if catastrophe := self._happen(happening, out, running):
                return catastrophe
            if self.finish is not None or self._is_stalled:
                return None
        if self.position < self._last:
            self._say(self._token(self.position), out)
        if self.finish is None and self.position >= self._last and self.position not in self._at:
            self._end(self._last_finish(), out, running)
        return None

    def done_line(self, finish: str) -> bytes:
        if self.keys["done"] is not None:
            return str(self.keys["done"]).encode() + self.tag + b"\n"
        now = time.monotonic()
        first = min(self._first_s, now)
        fields: list[object] = [self.sent, len(self.prompt) - self.resume]
        fields += [round((first - self._began_s) * 1000), round((now - first) * 1000), finish]
        fields += [0, 0, self.cached or 0, *self.keys["done_fields"]]
        return f"DONE {' '.join(map(str, fields))}".encode() + self.tag + b"\n"

    # ---- steps --------------------------------------------------------------------------------------------------

    def _begin(self, out: list[bytes], running: list[int]) -> None:
        self._has_begun = True
        self._raw(self.keys["lines_before"], out, running)
        if self.cached is not None:
            out.append(b"RESUME %d%b\n" % (self.cached, self.tag))

    def _read_on(self, now: float, out: list[bytes]) -> None:
        """A PP line, if any are wanted, and the time of the next."""
        prefill_s, every_s = float(self.keys["prefill_s"]), self.keys["prefill_every_s"]
        if every_s is None or now >= self._began_s + prefill_s:
            self.due_s = self._first_s
            return
        spent_s = now - self._began_s
        if spent_s > 0:
            position = int(len(self.prompt) * min(spent_s / prefill_s, 1.0))
            fields = (position, len(self.prompt), int(spent_s * 1000), position / spent_s, self.tag)
            out.append(b"PP %d %d %d %.1f%b\n" % fields)
        self.due_s = min(now + float(every_s), self._first_s)

    def _token(self, index: int) -> int:
        listed = self.keys["tokens"]
        if listed is not None:
            return int(listed[index])
        span = min(self.keys["echo_span"], self.keys["vocab"] - self.keys["echo_base"])
        return echo_token(self.marker, index, base=self.keys["echo_base"], span=span)

    def _say(self, token: int, out: list[bytes]) -> None:
        out.append(self._token_line(token))
        self.position += 1
        self.sent += 1
        if token == self.keys["eos"]:
            self._end("stop", out, [])

    def _token_line(self, token: int) -> bytes:
        if self._logprobs is None:
            return b"T %d%b\n" % (token, self.tag)
        logprob = -(token % 100 + 1) / 100
        others = range(self._logprobs)
        words = [f"{(token + other) % self.keys['vocab']}:{logprob - other / 2}" for other in others]
        return f"T {token} {logprob}{' ' * bool(words)}{','.join(words)}".encode() + self.tag + b"\n"

    def _last_finish(self) -> str:
        listed = self.keys["tokens"]
        return self.keys["finish"] or ("stop" if listed is not None and self.position >= len(listed) else "length")

    def _end(self, finish: str, out: list[bytes], running: list[int]) -> None:
        out.append(self.done_line(finish))
        self.finish = finish
        self._raw(self.keys["lines_after"], out, running)

    # ---- happenings ---------------------------------------------------------------------------------------------

    def _happenings(self) -> dict[int, list[str]]:
        """Names of what takes the place of tokens, by token."""
        at: dict[int, list[str]] = {}
        for name in ("stderr", "half_line", "error", "nonfinite", "eos", *_HAPPENINGS, "stall"):
            if self.keys[f"{name}_at"] is not None:
                at.setdefault(int(self.keys[f"{name}_at"]), []).append(name)
        for index in self.keys["lines_at"]:
            at.setdefault(int(index), []).insert(0, "lines")
        if self.keys["stderr_every"]:
            for index in range(self.position, self._last):
                at.setdefault(index, []).insert(0, "stderr")
        if self.keys["tokens"] is not None:
            self._last = min(self._last, len(self.keys["tokens"]))
        return at

    def _happen(self, name: str, out: list[bytes], running: list[int]) -> Catastrophe | None:
        if name in _HAPPENINGS:
            return Catastrophe(name, self.keys)
        if name == "stall":
            self._is_stalled = True
            self.due_s = NEVER
        elif name == "stderr":
            self._flood()
        elif name == "lines":
            self._raw(self.keys["lines_at"][str(self.position)], out, running)
        elif name == "half_line":
            return self._half_line(out)
        elif name == "error":
            self.finish = "error"
            out.append(f"ERR {self.keys['error'] or 'scripted error'}".encode() + self.tag + b"\n")
            if self.keys["error_done"]:
                out.append(self.done_line("stop"))
        elif name == "eos":
            self._say(self.keys["eos"], out)
        else:
            self._end(name, out, running)
        return None

    def _half_line(self, out: list[bytes]) -> Catastrophe | None:
        """Half of this position's token line at once, with all that came before it in the step."""
        line = self._token_line(self._token(self.position))
        half = len(line) // 2
        os.write(1, b"".join(out) + line[:half])
        out.clear()
        then = self.keys["half_line_then"]
        if then in ("hang", "exit"):
            return Catastrophe("crash" if then == "exit" else "hang", self.keys)
        time.sleep(float(then))
        os.write(1, line[half:])
        self.position += 1
        self.sent += 1
        return None

    def _flood(self) -> None:
        keys = self.keys
        data = (b"x" * (keys["stderr_line_bytes"] - 1) + b"\n") * keys["stderr_lines"]
        data += b"y" * keys["stderr_long_bytes"] + b"\n" * bool(keys["stderr_long_bytes"])
        data += bytes(range(256)) * (keys["stderr_junk_bytes"] // 256)
        while data:
            data = data[os.write(2, data) :]

    def _raw(self, lines: list[str], out: list[bytes], running: list[int]) -> None:
        if lines:
            foreign = next((rid for rid in running if rid != self.rid), self.rid + 1)
            for line in lines:
                text = line.replace("{rid}", str(self.rid)).replace("{foreign}", str(foreign))
                out.append(text.encode("latin-1", "replace") + b"\n")
