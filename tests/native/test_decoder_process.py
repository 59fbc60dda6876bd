"""The decoder as a process: its end in every way, idleness, writes, options."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.conftest import StartDecoder
from tests.native.decoder_process import DEADLINE_S, prompt_of


def wait_for_death(pid: int, timeout_s: float = DEADLINE_S) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([pidfd], [], [], timeout_s)[0], f"{pid} lives"
    finally:
        os.close(pidfd)


def test_quit_ends_it_with_status_0(start_decoder: StartDecoder) -> None:
    decoder = start_decoder()
    decoder.begin(1000, prompt_of(1, 10))
    decoder.send("QUIT")
    assert decoder.wait_for_exit() == 0


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_end_of_input_ends_it(start_decoder: StartDecoder, is_busy: bool) -> None:
    decoder = start_decoder()
    if is_busy:
        decoder.wait_for(decoder.begin(4000, prompt_of(1, 10)), "T")
    assert decoder.process.stdin is not None
    decoder.process.stdin.close()
    assert decoder.wait_for_exit() == 0


def test_end_of_input_within_a_long_computation_ends_it(start_decoder: StartDecoder) -> None:
    decoder = start_decoder("--context", "65536", "--batch", "65536", "--ubatch", "65536", "--slots", "1")
    decoder.begin(1, prompt_of(1, 60000))  # one step of many seconds
    assert decoder.process.stdin is not None
    decoder.process.stdin.close()
    assert decoder.wait_for_exit(5) == 0


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_sigterm_ends_it(start_decoder: StartDecoder, is_busy: bool) -> None:
    decoder = start_decoder()
    if is_busy:
        decoder.wait_for(decoder.begin(4000, prompt_of(1, 10)), "T")
    decoder.process.terminate()
    assert decoder.wait_for_exit() == -signal.SIGTERM


def test_a_closed_output_ends_it(start_decoder: StartDecoder) -> None:
    decoder = start_decoder()
    decoder.begin(4000, prompt_of(1, 10))
    assert decoder.process.stdout is not None
    decoder.process.stdout.close()
    assert decoder.wait_for_exit() == 0


def test_it_dies_with_its_parent_though_its_input_stays_open(decoder_binary: Path, tiny_model: Path) -> None:
    ours, theirs = os.pipe()  # both ends stay open here, so the decoder sees no end of input
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys; p = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stdin=0); "
            "[None for line in iter(p.stdout.readline, b'') if line.startswith(b'READY') and "
            "print(p.pid, flush=True)]",
            str(decoder_binary),
            "--model",
            str(tiny_model),
        ],
        stdin=ours,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_for_death(pid)
    parent.stdout.close()
    os.close(ours)
    os.close(theirs)


def test_an_idle_decoder_uses_no_processor(start_decoder: StartDecoder) -> None:
    decoder = start_decoder("--threads", "2")
    decoder.generate(50, prompt_of(1, 100))
    with pytest.raises(TimeoutError):  # a last STAT may come; then nothing does
        while True:
            decoder.read_line(timeout_s=1.2)
    before_s = decoder.cpu_s()
    with pytest.raises(TimeoutError):
        decoder.read_line(timeout_s=0.5)
    assert decoder.cpu_s() - before_s < 0.005


def test_all_tokens_of_a_step_leave_in_one_write(start_decoder: StartDecoder) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps the border of every write
    with ours, theirs:
        decoder = start_decoder(stdout=theirs.fileno())
        theirs.close()
        ours.settimeout(DEADLINE_S)
        while b"READY" not in ours.recv(1 << 16):
            pass
        decoder.send(*(f"GEN {rid} 50 {','.join(map(str, prompt_of(rid, 10)))}" for rid in range(1, 5)))
        writes: list[bytes] = []
        while sum(write.count(b"DONE ") for write in writes) < 4:
            writes.append(ours.recv(1 << 16))
    full = [write for write in writes if write.count(b"T ") == 4]
    assert len(full) >= 48
    assert len(writes) <= 53


def test_status_lines_come_at_most_once_a_second(start_decoder: StartDecoder) -> None:
    decoder = start_decoder("--slots", "1", "--context", "4096")
    decoder.answer(decoder.begin(4000, prompt_of(1, 10)))
    decoder.answer(decoder.begin(4000, prompt_of(2, 10)))
    decoder.untagged.append(decoder.read_line(timeout_s=3))  # the last one tells that nothing runs
    told = [line for line in decoder.untagged if line.startswith("STAT ")]
    assert 1 <= len(told) <= 10
    assert told[-1].endswith("running=0")
    assert "kv_used=" in told[-1] and "kv_cells=4096" in told[-1] and "steps=" in told[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--model is missing"),
        (["--model"], "--model needs a value"),
        (["--model", "x", "--slots", "0"], "--slots=0: expected a number from 1"),
        (["--model", "x", "--slots=many"], "--slots=many"),
        (["--model", "x", "--colour", "red"], "unknown option '--colour'"),
        (["--model", "x", "--kv-type", "f17"], "--kv-type=f17 is unknown"),
        (["--model", "x", "--flash-attention", "maybe"], "--flash-attention=maybe is unknown"),
        (["--model", "x", "--kv-cells", "100"], "--kv-cells=100 is less than --context"),
    ],
)
def test_a_bad_option_is_named_with_its_remedy(decoder_binary: Path, options: list[str], message: str) -> None:
    result = subprocess.run(
        [decoder_binary, *options], capture_output=True, text=True, timeout=DEADLINE_S, stdin=subprocess.DEVNULL
    )
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_help_explains_every_option(decoder_binary: Path) -> None:
    result = subprocess.run([decoder_binary, "--help"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert result.returncode == 0
    for option in ("--model", "--context", "--slots", "--threads", "--gpu-layers", "--kv-type", "--batch", "--ubatch"):
        assert option in result.stdout


def test_a_model_that_cannot_be_loaded_is_an_error_on_standard_error(decoder_binary: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF no more")
    result = subprocess.run(
        [decoder_binary, "--model", broken], capture_output=True, text=True, timeout=DEADLINE_S, stdin=subprocess.PIPE
    )
    assert result.returncode == 1
    assert "could not load it" in result.stderr
