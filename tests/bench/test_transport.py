"""The scripted decoder in C, and that bench.transport reports what it says; never how long anything takes."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from bench import neighbours, transport
from bench.contracts.process import pipes_of
from bench.transport import Target, Timing

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="bench/scripted_decoder.c needs a C compiler")


@pytest.fixture
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "QUICK_ROUNDS", {65: 6, 4097: 6})
    monkeypatch.setattr(transport, "WARM_UP_ROUNDS", 2)


def answers(commands: str, *options: str) -> list[str]:
    program = transport.decoder_command(*options)
    done = subprocess.run(program, input=commands.encode(), stdout=subprocess.PIPE, timeout=10, check=True)
    return done.stdout.decode().splitlines()


def test_decoder_speaks_the_solo_dialect() -> None:
    lines = answers("GEN 2 temperature=0.5 5,6,7\nSTOP\nGEN 1 9\nQUIT\n")
    assert lines[0].startswith("INFO ")
    assert lines[1] == "READY 32768 stop"
    assert lines[2:6] == ["REUSED 0", "T 3", "T 4", "DONE 2 3 0.010 0.020 length 0 0 0"]
    assert lines[6:] == ["REUSED 0", "T 1", "DONE 1 1 0.010 0.020 length 0 0 0"]


def test_decoder_speaks_the_tagged_dialect() -> None:
    lines = answers("GEN 4294967295 1 5,6,7\nSTOP 7\nQUIT\n", "--slots", "4")
    assert lines[1] == "READY 32768 stop slots=4"
    assert lines[2:] == ["REUSED 0 #4294967295", "T 3 #4294967295", "DONE 1 3 0.010 0.020 length 0 0 0 #4294967295"]


def test_decoder_refuses_what_does_not_fit_its_context() -> None:
    assert answers("GEN 90 1,2,3\nQUIT\n", "--context", "100")[2].startswith("ERR ")


def test_flooding_decoder_stops_a_request_in_full_flow_and_serves_others() -> None:
    with transport.spawn("--slots", "2", "--flood") as process:
        pipes = pipes_of(process)
        pipes.stdin.write(b"GEN 1 30000 1,2\nGEN 2 30000 1,2\nGEN 3 5 1\n")
        pipes.stdin.flush()
        lines = iter(pipes.stdout.readline, b"")
        assert b"ERR busy #3\n" in lines
        pipes.stdin.write(b"STOP 1\n")
        pipes.stdin.flush()
        assert any(line.startswith(b"DONE ") and b" cancel " in line and line.endswith(b" #1\n") for line in lines)
        assert any(line.startswith(b"DONE 30000 ") and line.endswith(b" #2\n") for line in lines)
        pipes.stdin.close()


def test_decoder_reads_a_command_that_comes_in_many_pieces() -> None:
    prompt = ",".join(["123456"] * 20000)
    assert answers(f"GEN 1 {prompt}\nQUIT\n")[3] == "T 20000"


@pytest.mark.usefixtures("short_rounds")
def test_report_has_every_adapter_at_both_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    transport.main(["--quick", "--json"])
    report = json.loads(capsys.readouterr().out)
    for prompt_ids in ("65", "4097"):
        measured = report["timings"][prompt_ids]
        assert {"floor", "original", "A", "B", "c-threads", "ringfence"} == set(measured)
        assert set(measured["A"]["first_ms"]) == {"p50", "p90", "p99"}
    assert len(report["targets"]) == 4


def test_paced_decoder_looks_for_commands_between_tokens() -> None:
    with transport.spawn("--flood", "--pace", "1") as process:
        pipes = pipes_of(process)
        pipes.stdin.write(b"GEN 30000 1,2\n")
        pipes.stdin.flush()
        lines = iter(pipes.stdout.readline, b"")
        assert b"T 2\n" in lines
        pipes.stdin.write(b"STOP\n")
        pipes.stdin.flush()
        assert any(line.startswith(b"DONE ") and b" cancel " in line for line in lines)
        pipes.stdin.close()


def test_report_on_neighbours_has_idle_and_busy_ones_and_the_cpu_of_an_idle_pool(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("COUNTS", (1,)), ("QUICK_PASSES", 1), ("WARM_UP_ROUNDS", 1), ("ROUNDS", 3), ("IDLE_S", 0.1)):
        monkeypatch.setattr(neighbours, name, value)
    assert transport.main(["--neighbours", "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(row["others"], row["are_busy"]) for row in report["neighbours"]] == [(1, False), (1, True)]
    assert {"server", "workers", "decoders"} <= set(report["idle"])


@pytest.mark.usefixtures("short_rounds")
def test_check_exits_with_one_when_a_target_is_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transport, "ringfence_transport", lambda: None)
    assert transport.main(["--quick", "--check"]) == 1
    assert "MISSED" in capsys.readouterr().out
    assert transport.main(["--quick"]) == 0


def test_targets_are_ratios_to_scheme_a() -> None:
    reference = Timing(first_ms={"p50": 1.0, "p90": 1.0, "p99": 1.0}, last_ms={})
    measured = Timing(first_ms={"p50": 0.5, "p90": 0.5, "p99": 0.7}, last_ms={})
    targets = transport.compare({ids: {"A": reference, "ringfence": measured} for ids in (65, 4097)})
    assert targets == [
        Target(65, 50, 0.80, 0.5),
        Target(65, 99, 1.00, 0.7),
        Target(4097, 50, 0.35, 0.5),
        Target(4097, 99, 0.60, 0.7),
    ]
    assert [target.is_met for target in targets] == [True, True, False, False]


def test_flood_counts_the_tokens_of_all_its_requests() -> None:
    adapters = transport.open_adapters("--flood")
    try:
        for name in ("A", "B", "original", "ringfence"):
            assert adapters[name].flood(4, 500).tokens == 2000
    finally:
        for adapter in adapters.values():
            adapter.close()
