"""The scripted decoder does what its script says: otherwise the failure tests would prove nothing."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.echo import echo_prompt, echo_token, expected, read_prompt
from tests.fakes.stage import Stage, until


class Running:
    """A scripted decoder and its pipes."""

    def __init__(self, stage: Stage, **options: Any) -> None:
        self.stage = stage
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            stage.command(**options), stdin=pipe, stdout=pipe, stderr=pipe, process_group=0, bufsize=0
        )
        self._unread = b""

    def line(self, timeout_s: float = 10.0) -> str:
        """The next line, without its end; what there is of it at end of file."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left_s = deadline - time.monotonic()
            if left_s < 0 or not select.select([self.process.stdout], (), (), left_s)[0]:
                raise TimeoutError(self._unread)
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                break
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode("latin-1")

    def until(self, start: str) -> list[str]:
        """Lines up to and with the first that starts so, or up to end of file."""
        lines = [self.line()]
        while lines[-1] and not lines[-1].startswith(start):
            lines.append(self.line())
        return lines

    def send(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")

    def generate(self, prompt: list[int], max_new: int, *, rid: int = 1, keys: str = "") -> None:
        self.send(f"GEN {rid} {max_new} {keys}{','.join(map(str, prompt))}")

    def silent(self, seconds: float) -> bool:
        try:
            self.line(seconds)
        except TimeoutError:
            return True
        return False

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(10)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.fixture
def start(stage: Stage) -> Iterator[Any]:
    with ExitStack() as stack:

        def started(*, is_ready: bool = True, slots: int | None = 4, **options: Any) -> Running:
            given = {"slots": slots, **options} if slots else options
            decoder = Running(stage, **given)
            stack.callback(decoder.close)
            if is_ready:
                decoder.until("READY")
            return decoder

        yield started


def tokens(lines: list[str], rid: int = 1) -> list[int]:
    return [int(line.split()[1]) for line in lines if line.startswith("T ") and line.endswith(f" #{rid}")]


def test_an_echo_follows_from_marker_and_position(start: Any) -> None:
    prompt = echo_prompt(77, 40)
    decoder = start()
    decoder.generate(prompt, 20)
    lines = decoder.until("DONE")
    assert tokens(lines) == expected(prompt, 20) == [echo_token(77, index) for index in range(20)]
    assert lines[-1].split()[1:3] == ["20", "40"]
    assert lines[-1].split()[5:] == ["length", "0", "0", "0", "#1"]


def test_an_echo_goes_on_where_it_was_cut_with_and_without_resume(start: Any) -> None:
    decoder = start()
    for rid, (prompt, keys) in enumerate(
        [(echo_prompt(5), ""), (echo_prompt(5), "resume=4 "), ([9, 8, 7], "resume=4 ")]
    ):
        whole = expected(prompt, 10)
        decoder.generate(prompt + whole[:4], 6, rid=rid, keys=keys)
        assert tokens(decoder.until("DONE"), rid) == whole[4:]


def test_prompts_carry_orders_of_their_own(start: Any) -> None:
    assert read_prompt(echo_prompt(3, 60, eos_at=4, token_delay_ms=1)).orders == {"eos_at": 4, "token_delay_ms": 1}
    decoder = start()
    decoder.generate(prompt := echo_prompt(3, eos_at=4), 20)
    lines = decoder.until("DONE")
    assert tokens(lines) == [*expected(prompt, 20), 2]
    assert lines[-1].split()[5] == "stop"


def test_the_solo_dialect_has_no_tags(start: Any) -> None:
    decoder = start(slots=None)
    decoder.send("GEN 2 temperature=0.5 5,6")
    first, second, done = decoder.until("DONE")
    assert [f"T {id}" for id in expected([5, 6], 2)] == [first, second]
    assert "#" not in done


def test_slots_run_at_once_and_one_more_is_busy(start: Any, stage: Stage) -> None:
    stage.script(token_delay_s=0.005)
    decoder = start(slots=2)
    for rid in (1, 2, 3):
        decoder.generate([rid], 10, rid=rid)
    lines = decoder.until("DONE") + decoder.until("DONE")
    assert "ERR busy #3" in lines
    assert tokens(lines, 1) == expected([1], 10)
    assert tokens(lines, 2) == expected([2], 10)
    assert lines.index(f"T {expected([2], 1)[0]} #2") < lines.index(f"T {expected([1], 10)[9]} #1")


def test_the_journal_tells_what_reached_the_decoder(start: Any, stage: Stage) -> None:
    decoder = start()
    decoder.generate([5, 6], 3, keys="top_k=4 seed=9 ")
    decoder.until("DONE")
    decoder.send("STOP 1")
    decoder.send("HELLO")
    decoder.send("QUIT")
    assert decoder.process.wait(10) == 0
    events = stage.events()
    assert [event["event"] for event in events] == ["START", "READY", "GEN", "END", "STOP", "VIOLATION", "QUIT"]
    assert events[2].items() >= {"rid": 1, "ids": [5, 6], "max_new": 3, "keys": {"top_k": "4", "seed": "9"}}.items()
    assert events[3].items() >= {"rid": 1, "finish": "length", "sent": 3}.items()
    assert {event["pid"] for event in events} == {decoder.process.pid}


@pytest.mark.parametrize(
    "command", ["GEN 1 5", "GEN x 5 1", "GEN 1 5 1,,2", "GEN 1 5 -1", "STOP", "QUIT 1", "", "GEN 1 1 x 5"]
)
def test_commands_against_the_protocol_are_journalled(start: Any, stage: Stage, command: str) -> None:
    decoder = start()
    decoder.send(command)
    assert stage.wait_for("VIOLATION")[0]["text"] == command


def test_scripted_tokens_end_with_their_finish(start: Any, stage: Stage) -> None:
    stage.script(rules=[{"when": {"marker": 4}, "tokens": [50, 51, 52]}, {"when": {"marker": 5}, "tokens": [7, 2, 9]}])
    decoder = start()
    for rid, marker, max_new, ids, finish in [
        (1, 4, 9, [50, 51, 52], "stop"),
        (2, 4, 2, [50, 51], "length"),
        (3, 5, 9, [7, 2], "stop"),
    ]:
        decoder.generate(echo_prompt(marker), max_new, rid=rid)
        lines = decoder.until("DONE")
        assert (tokens(lines, rid), lines[-1].split()[5]) == (ids, finish)


def test_stop_ends_a_turn_at_once_late_or_never(start: Any, stage: Stage) -> None:
    stage.script(
        token_delay_s=0.01,
        rules=[
            {"when": {"gen": 2}, "stop_delay_s": 0.1},
            {"when": {"gen": 3}, "ignore_stop": True},
            {"when": {"gen": 4}, "lose_stops": 1},
        ],
    )
    decoder = start()
    sent = []
    for rid in (1, 2, 3, 4):
        decoder.generate([rid], 30 if rid == 3 else 1000, rid=rid)
        decoder.line()
        decoder.send(f"STOP {rid}")
        if rid == 4:
            stage.wait_for("STOP", 4)
            decoder.send(f"STOP {rid}")
        lines = decoder.until("DONE")
        sent.append((len(lines), lines[-1].split()[5]))  # DONE stands for the token read above
    assert [finish for _, finish in sent] == ["cancel", "cancel", "length", "cancel"]
    assert sent[2][0] == 30
    assert 1 <= sent[0][0] < 1000
    assert 5 <= sent[1][0] < 1000
    assert 1 <= sent[3][0] < 1000


def test_prefill_shows_progress_or_is_silent(start: Any, stage: Stage) -> None:
    stage.script(prefill_s=0.5, prefill_every_s=0.1, cached=3)
    decoder = start()
    decoder.generate(list(range(100)), 1)
    lines = decoder.until("DONE")
    assert lines[0] == "RESUME 3 #1"
    assert 1 <= sum(line.startswith("PP ") for line in lines) <= 5
    assert lines[-3] == "REUSED 3 #1"
    stage.script(prefill_s=0.05)
    decoder.generate([1], 1, rid=2)
    assert [line.split()[0] for line in decoder.until("DONE")] == ["T", "DONE"]


def test_stop_ends_a_silent_prefill(start: Any, stage: Stage) -> None:
    stage.script(prefill_s=60)
    decoder = start()
    decoder.generate([1], 1)
    stage.wait_for("GEN")
    decoder.send("STOP 1")
    assert decoder.line().split()[5] == "cancel"


def test_it_dies_where_the_script_says(start: Any, stage: Stage) -> None:
    stage.script(rules=[{"when": {"gen": 2}, "crash_at": 3, "crash_signal": 6, "crash_stderr": "assertion failed\n"}])
    decoder = start()
    decoder.generate([1], 2)
    decoder.until("DONE")
    decoder.generate([1], 9, rid=2)
    assert tokens(decoder.until("DONE"), 2) == expected([1], 3)
    assert decoder.process.wait(10) == -signal.SIGABRT
    assert decoder.process.stderr.read() == b"assertion failed\n"


def test_a_poisoned_prompt_kills_wherever_it_goes(start: Any, stage: Stage) -> None:
    stage.script(rules=[{"when": {"poison": 999}, "crash_at": 1, "crash_code": 3}])
    for _ in range(2):
        decoder = start()
        decoder.generate([1, 999, 2], 9)
        assert decoder.process.wait(10) == 3


def test_a_rule_can_hold_for_one_start_or_some_turns(start: Any, stage: Stage) -> None:
    stage.script(
        rules=[
            {"when": {"start": 1}, "start_exit": 5, "start_stderr": "no device\n"},
            {"when": {}, "times": 1, "error": "once"},
        ]
    )
    first = start(is_ready=False)
    assert (first.process.wait(10), first.process.stderr.read()) == (5, b"no device\n")
    second = start()
    second.generate([1], 1)
    second.generate([1], 1, rid=2)
    assert second.until("DONE")[0] == "ERR once #1"


@pytest.mark.parametrize("what", ["hang_at", "stall_at", "spin_at"])
def test_a_turn_goes_silent(start: Any, stage: Stage, what: str) -> None:
    stage.script(rules=[{"when": {"gen": 1}, what: 2}])
    decoder = start()
    decoder.generate([1], 9)
    assert tokens([decoder.line(), decoder.line()]) == expected([1], 2)
    assert decoder.silent(0.1)
    decoder.send("STOP 1")
    if what == "stall_at":  # only this turn: the process goes on
        assert decoder.line().split()[5] == "cancel"
    assert decoder.silent(0.1)
    assert decoder.process.poll() is None
    os.kill(decoder.process.pid, signal.SIGTERM)
    assert decoder.process.wait(10) == 0


def test_half_a_line_is_completed_or_never(start: Any, stage: Stage) -> None:
    stage.script(
        rules=[
            {"when": {"gen": 1}, "half_line_at": 2},
            {"when": {"gen": 2}, "half_line_at": 1, "half_line_then": "exit"},
        ]
    )
    decoder = start()
    decoder.generate([1], 3)
    assert tokens(decoder.until("DONE")) == expected([1], 3)
    decoder.generate([1], 5, rid=2)
    lines = decoder.until("DONE")
    assert tokens(lines, 2) == expected([1], 1)
    assert lines[-1] == ""  # end of file
    assert lines[-2].startswith("T ") and len(lines[-2]) < len("T 1234 #2")


def test_errors_and_nan_come_when_they_should(start: Any, stage: Stage) -> None:
    stage.script(
        rules=[
            {"when": {"gen": 1}, "error": "verify: timed out at layer 7", "error_at": 1, "error_done": True},
            {"when": {"gen": 2}, "nonfinite_at": 2},
            {"when": {"gen_from": 3}, "error": "device lost"},
        ]
    )
    decoder = start()
    decoder.generate([1], 9)
    assert [line.split()[0] for line in decoder.until("DONE")] == ["T", "ERR", "DONE"]
    decoder.generate([1], 9, rid=2)
    assert decoder.until("DONE")[-1].split()[5] == "nonfinite"
    for rid in (3, 4):
        decoder.generate([1], 9, rid=rid)
        assert decoder.line() == f"ERR device lost #{rid}"


def test_stderr_is_flooded_with_lines_one_long_line_and_junk(start: Any, stage: Stage) -> None:
    stage.script(stderr_at=0, stderr_lines=50, stderr_long_bytes=3000, stderr_junk_bytes=512)
    decoder = start()
    decoder.generate([1], 2)
    decoder.until("DONE")
    decoder.send("QUIT")
    text = decoder.process.stderr.read()
    assert len(text) == 50 * 100 + 3001 + 512
    assert b"y" * 3000 + b"\n" in text


def test_raw_lines_stand_where_they_were_put(start: Any, stage: Stage) -> None:
    stage.script(lines_before=["hello"], lines_at={"1": ["T 5 #{foreign}", "\u00ff\u0000"]}, lines_after=["T 6 #{rid}"])
    decoder = start()
    decoder.generate([1], 2, rid=8)
    one, two = expected([1], 2)
    lines = decoder.until("DONE")
    assert lines[:-1] == ["hello", f"T {one} #8", "T 5 #9", "\u00ff\u0000", f"T {two} #8"]
    assert decoder.line() == "T 6 #8"


def test_loading_is_slow_and_shows_progress(start: Any) -> None:
    decoder = start(is_ready=False, start_delay_s=0.05, load_steps=2)
    assert [line.split()[1] for line in decoder.until("READY")[1:]] == ["load=0", "load=50", "4096"]


def test_loading_stops_when_nobody_is_left_to_load_for(start: Any, stage: Stage) -> None:
    decoder = start(is_ready=False, never_ready=True)
    stage.wait_for("START")
    decoder.process.stdin.close()
    assert decoder.process.wait(10) == 0


def test_it_can_refuse_every_polite_way_to_end(start: Any, stage: Stage) -> None:
    decoder = start(refuse=["quit", "eof", "term"])
    decoder.send("QUIT")
    decoder.process.stdin.close()
    stage.wait_for("EOF")
    os.kill(decoder.process.pid, signal.SIGTERM)
    stage.wait_for("TERM")
    assert decoder.process.poll() is None


def test_a_grandchild_outlives_it_and_holds_its_pipes(start: Any, stage: Stage) -> None:
    decoder = start(grandchild="holding")
    child = stage.events("GRANDCHILD")[0]["child"]
    os.kill(decoder.process.pid, signal.SIGKILL)
    decoder.process.wait(10)
    os.kill(child, 0)
    assert decoder.silent(0.05)  # no end of file


def test_its_lock_goes_some_time_after_its_death(start: Any, stage: Stage, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    first = start(lock_file=str(lock), lock_s=0.3)
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait(10)
    second = start(is_ready=False, lock_file=str(lock))
    assert second.process.wait(10) == 70
    assert f"held by process {first.process.pid}" in second.process.stderr.read().decode()
    until(lambda: not lock.exists())
    start(lock_file=str(lock))


def test_a_remembered_prefix_is_reported_as_cached(start: Any) -> None:
    decoder = start(prefix_cache=True)
    decoder.generate([9] * 50, 2)
    decoder.until("DONE")
    decoder.generate([9] * 50 + [8] * 5, 2, rid=2)
    assert decoder.until("DONE")[0] == "RESUME 50 #2"


def test_keys_that_do_not_exist_are_refused(start: Any) -> None:
    decoder = start(is_ready=False, crash_ta=5)
    assert decoder.process.wait(10) == 64
    assert b"crash_ta" in decoder.process.stderr.read()


def test_tokens_are_fast_enough_to_outrun_a_reader(start: Any) -> None:
    decoder = start(context=100_000)
    began_s = time.monotonic()
    decoder.generate([1], 50_000)
    assert len(decoder.until("DONE")) == 50_001
    assert time.monotonic() - began_s < 20
