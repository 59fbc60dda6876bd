"""Ends of processes, named."""

import os
import signal
import subprocess
import sys

import pytest

from tests.fakes.stage import until
from workers.exits import ExitKind, classify, cpu_seconds, is_stopped, oom_kills


@pytest.mark.parametrize(
    ("status", "lines", "oom", "kind"),
    [
        (0, [], 0, ExitKind.CLEAN),
        (0, ["CUDA error: nothing that mattered"], 0, ExitKind.CLEAN),
        (1, [], 0, ExitKind.FAILED),
        (70, ["bye"], 0, ExitKind.FAILED),
        (1, ["CUDA error: an illegal memory access was encountered"], 0, ExitKind.CUDA_ERROR),
        (1, ["ROCm error: unspecified launch failure"], 0, ExitKind.CUDA_ERROR),
        (1, ["CUDA error: out of memory"], 0, ExitKind.OUT_OF_MEMORY),
        (1, ["cudaMalloc failed: out of memory", "exiting"], 0, ExitKind.OUT_OF_MEMORY),
        (-6, ["terminate called after throwing an instance of 'std::bad_alloc'"], 0, ExitKind.OUT_OF_MEMORY),
        (-6, ["ggml.c:100: GGML_ASSERT(ne0 == ne1) failed"], 0, ExitKind.ASSERTION),
        (-6, ["a.out: main.c:3: main: Assertion `0' failed."], 0, ExitKind.ASSERTION),
        (-6, [], 0, ExitKind.SIGNAL),
        (-11, ["loading"], 0, ExitKind.SIGNAL),
        (-9, [], 0, ExitKind.KILLED),
        (-15, [], 0, ExitKind.KILLED),
        (-9, [], 1, ExitKind.OUT_OF_MEMORY),
        (-15, [], 1, ExitKind.KILLED),
        (-64, [], 0, ExitKind.SIGNAL),
        (-200, [], 0, ExitKind.SIGNAL),
    ],
)
def test_an_end_is_named_from_status_last_lines_and_the_kernels_count(
    status: int, lines: list[str], oom: int, kind: ExitKind
) -> None:
    assert classify(status, lines, oom_kills=oom).kind is kind


@pytest.mark.parametrize(("status", "is_external"), [(-9, True), (-15, True), (-11, False), (0, False), (1, False)])
def test_only_ends_by_somebody_else_are_external(status: int, is_external: bool) -> None:
    assert classify(status, []).is_external is is_external


def test_a_kill_for_want_of_memory_is_not_external() -> None:
    assert not classify(-9, [], oom_kills=1).is_external


def test_the_text_names_the_signal_and_quotes_a_bounded_last_line() -> None:
    text = str(classify(-11, ["first", "x" * 5000, "", "  "]))
    assert text.startswith("died of SIGSEGV; last line: xxx")
    assert len(text) < 300


def test_the_kernels_count_can_be_read_here() -> None:
    assert oom_kills() >= 0


def test_a_stopped_process_and_its_cpu_time_are_seen() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        until(lambda: cpu_seconds(child.pid) > 0.02, what="time used")
        assert not is_stopped(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        until(lambda: is_stopped(child.pid), what="the stop seen")
    finally:
        child.kill()
        child.wait()
    assert not is_stopped(child.pid)
    assert cpu_seconds(child.pid) == 0.0
