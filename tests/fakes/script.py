"""What the scripted decoder is told to do: keys from its command line, its script file and the prompt, in that order.

A script is one JSON object, read again at every GEN. Each key may also stand on the command line (`--token-delay-s
0.01`; values are JSON, or text where they are not). `rules` overrides keys for the turns that match:

    {"token_delay_s": 0.01,
     "rules": [{"when": {"gen": 2}, "crash_at": 5},
               {"when": {"start": 1, "poison": 999}, "times": 1, "error": "no"}]}

    when      gen           number of the GEN in this process, from 1       } a number or a list of them
              total_gen     number of the GEN in the journal, from 1        }
              start         number of this process in the journal, from 1   } (also for the keys of a start)
              marker        marker of the prompt (echo.py)                  }
              gen_from      this GEN and all later ones
              poison        the prompt contains this id
              resumed       true or false: the turn goes on from earlier output
    times     how many turns of one process the rule takes, in all

Keys of a start
    dialect, slots          "solo" or "tagged"; slots alone means tagged
    context, vocab, eos     4096, 32000, 2
    echo_base, echo_span    range of the ids that echoes use: 1000, 30000
    info                    INFO keys to add or, with null, to leave out
    start_delay_s           time before READY
    load_steps              INFO load=NN lines during it
    start_stderr            text written to stderr first
    start_exit              exit code: exits in place of READY
    never_ready             true: never says READY
    crash_after_s, hang_after_s, spin_after_s     after READY
    refuse                  list of "quit", "eof", "term": does not exit on these
    exit_delay_s            time it takes to exit when told to
    grandchild              "holding" (keeps the pipes), "detached" (closes them), "session" (its own session)
    lock_file, lock_s       stands for GPU memory: start fails while the file is there; it goes lock_s after the
                            process has died, however it died
    stat_every_s            STAT lines
    prefix_cache            true: remembers what it has read, and reports the longest common prefix as cached
    life_s                  600: the process dies by itself, so that nothing outlives a failed test

Keys of a turn. `*_at` counts output tokens of the whole request from 0, and takes the place of that token
    tokens                  ids to answer in place of the echo; finish: why it ends ("stop")
    burst                   tokens of a turn per step and write, 1
    token_delay_s           before every token
    prefill_s               before the first token; prefill_every_s: with PP lines, else silent
    cached                  tokens that RESUME, REUSED and DONE report
    eos_at                  the end-of-turn token, then DONE stop
    error, error_at         ERR with this text, at the GEN or later; error_done: a DONE follows
    nonfinite_at            DONE nonfinite
    crash_at                dies by crash_signal (9), or exits with crash_code; crash_stderr is written before
    hang_at, spin_at        the whole process stops answering, asleep or at 100 % CPU
    stall_at                only this turn goes silent (STOP still ends it)
    half_line_at            half a line; then half_line_then: "hang", "exit", or seconds until the rest (0.05)
    ignore_stop             true; stop_delay_s: tokens go on meanwhile; lose_stops: how many STOPs of a turn are lost
    stderr_at               stderr before this token (stderr_every: before every token): stderr_lines of
                            stderr_line_bytes, one line of stderr_long_bytes, stderr_junk_bytes of binary
    lines_before, lines_at, lines_after     raw lines before the first token, {"3": [...]} before token 3, after DONE;
                            {rid} and {foreign} (another running request) are filled in
    done_fields             DONE's fields after `reused`; done: the whole DONE line
"""

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from tests.fakes.echo import Echo

START_KEYS: dict[str, Any] = {
    "dialect": None,
    "slots": None,
    "context": 4096,
    "vocab": 32_000,
    "eos": 2,
    "echo_base": 1000,
    "echo_span": 30_000,
    "info": {},
    "start_delay_s": 0.0,
    "load_steps": 0,
    "start_stderr": "",
    "start_exit": None,
    "never_ready": False,
    "crash_after_s": None,
    "hang_after_s": None,
    "spin_after_s": None,
    "refuse": [],
    "exit_delay_s": 0.0,
    "grandchild": None,
    "lock_file": None,
    "lock_s": 0.0,
    "stat_every_s": 0.0,
    "prefix_cache": False,
    "life_s": 600,
    "crash_signal": 9,
    "crash_code": None,
    "crash_stderr": "",
}
TURN_KEYS: dict[str, Any] = {
    "tokens": None,
    "finish": None,
    "burst": 1,
    "token_delay_s": 0.0,
    "prefill_s": 0.0,
    "prefill_every_s": None,
    "cached": None,
    "eos_at": None,
    "error": None,
    "error_at": None,
    "error_done": False,
    "nonfinite_at": None,
    "crash_at": None,
    "hang_at": None,
    "spin_at": None,
    "stall_at": None,
    "half_line_at": None,
    "half_line_then": 0.05,
    "ignore_stop": False,
    "stop_delay_s": 0.0,
    "lose_stops": 0,
    "stderr_at": None,
    "stderr_every": False,
    "stderr_lines": 0,
    "stderr_line_bytes": 100,
    "stderr_long_bytes": 0,
    "stderr_junk_bytes": 0,
    "lines_before": [],
    "lines_at": {},
    "lines_after": [],
    "done_fields": [],
    "done": None,
}
DEFAULTS = {**START_KEYS, **TURN_KEYS}
_NUMBERED = ("gen", "total_gen", "start", "marker")


class Script:
    """The keys for a start, and for each turn. Raises ValueError for keys that do not exist."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._options = _options(arguments)
        self._path = self._options.pop("script", None)
        self.journal_path: str | None = self._options.pop("journal", None)
        self._content: dict[str, Any] = {}
        self._taken: dict[str, int] = {}
        self.start_number = 1
        _check(self._options)

    def for_start(self) -> dict[str, Any]:
        self._read()
        keys = {**DEFAULTS, **self._options, **self._content}
        for rule in self._content.get("rules", ()):
            when = rule.get("when", {})
            if set(when) == {"start"} and _matches(when["start"], self.start_number):
                keys.update(_effect(rule))
        return keys

    def for_turn(self, prompt: Sequence[int], echo: Echo, *, gen: int, total_gen: Callable[[], int]) -> dict[str, Any]:
        self._read()
        keys = {**DEFAULTS, **self._options, **self._content}
        rules = self._content.get("rules", ())
        facts = {"gen": gen, "start": self.start_number, "marker": echo.marker}
        if any("total_gen" in rule.get("when", ()) for rule in rules):
            facts["total_gen"] = total_gen()
        for rule in rules:
            if self._applies(rule, prompt, echo, facts):
                keys.update(_effect(rule))
        keys.update(_ordered(echo))
        return keys

    def _applies(self, rule: dict[str, Any], prompt: Sequence[int], echo: Echo, facts: dict[str, int]) -> bool:
        when = rule.get("when", {})
        for name in _NUMBERED:
            if name in when and not _matches(when[name], facts[name]):
                return False
        if facts["gen"] < when.get("gen_from", 0) or ("poison" in when and when["poison"] not in prompt):
            return False
        if "resumed" in when and when["resumed"] != (echo.position > 0):
            return False
        if "times" in rule:
            name = json.dumps(rule)
            self._taken[name] = self._taken.get(name, 0) + 1
            return self._taken[name] <= int(rule["times"])
        return True

    def _read(self) -> None:
        if self._path is None:
            return
        with open(self._path, encoding="utf-8") as file:
            content = json.load(file)
        _check({key: value for key, value in content.items() if key != "rules"})
        for rule in content.get("rules", ()):
            _check(_effect(rule))
        self._content = content


def _options(arguments: Sequence[str]) -> dict[str, Any]:
    """`--some-key value` pairs. `$VARIABLES` in values are those of the environment."""
    options: dict[str, Any] = {}
    for option, value in zip(arguments[::2], arguments[1::2], strict=True):
        text = os.path.expandvars(value)
        try:
            options[option.lstrip("-").replace("-", "_")] = json.loads(text)
        except ValueError:
            options[option.lstrip("-").replace("-", "_")] = text
    return options


def _check(keys: dict[str, Any]) -> None:
    unknown = keys.keys() - DEFAULTS.keys()
    if unknown:
        raise ValueError(f"the scripted decoder has no keys {sorted(unknown)}; see tests/fakes/script.py")


def _effect(rule: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in rule.items() if key not in ("when", "times")}


def _matches(wanted: Any, found: int) -> bool:
    return found in wanted if isinstance(wanted, list) else bool(found == wanted)


def _ordered(echo: Echo) -> dict[str, Any]:
    """The keys that a prompt's own orders mean."""
    orders = dict(echo.orders)
    if orders.pop("fresh_only", 0) and echo.position > 0:
        return {}
    return {
        (name[:-3] + "_s" if name.endswith("_ms") else name): (value / 1000 if name.endswith("_ms") else value)
        for name, value in orders.items()
    }
