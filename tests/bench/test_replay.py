"""The table of `python -m bench.replay`: the old scheme and its repairs break exactly what their faults break, and
ringfence breaks nothing."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence

import pytest

from bench import replay
from bench.contracts.adapter import DecoderSource
from bench.contracts.process import pipes_of
from bench.contracts.suite import ACCOUNTS, CONTRACTS, EARLY_ENDS, names_of, play
from bench.contracts.threads import ThreadAdapter
from bench.schemes.close_only import CloseOnly
from bench.schemes.messages import Engine, Pipes
from bench.schemes.original import Original
from bench.schemes.scheme_a import SchemeA
from bench.schemes.scheme_b import SchemeB

SCHEMES: dict[str, Callable[[Sequence[Pipes]], Engine]] = {
    "original": Original,
    "close-only": CloseOnly,
    "A": SchemeA,
    "B": SchemeB,
}


class SpawningAdapter(ThreadAdapter):
    """As a worker process does, starts each decoder by its command, so that the script is reached through the relay."""

    def __init__(self, make: Callable[[Sequence[Pipes]], Engine]) -> None:
        super().__init__(make)
        self._processes: list[subprocess.Popen[bytes]] = []

    def open(self, decoders: Sequence[DecoderSource]) -> None:
        self._processes = [
            subprocess.Popen(decoder.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for decoder in decoders
        ]
        self._engine = self._make([pipes_of(process) for process in self._processes])

    def close(self) -> None:
        super().close()
        for process in self._processes:
            process.wait(5.0)


def test_every_adapter_of_the_table_is_there() -> None:
    assert set(replay.EXPECTED_FAILURES) == {*SCHEMES, "ringfence"}
    assert all(make is not None for make in replay.adapters().values())


def test_there_are_eighteen_contracts_of_distinct_names() -> None:
    assert len(CONTRACTS) == 18
    assert len(names_of(CONTRACTS)) == 18
    assert all(contract.__doc__ for contract in CONTRACTS)


@pytest.mark.parametrize("name", replay.EXPECTED_FAILURES)
def test_scheme_breaks_exactly_the_contracts_its_fault_breaks(name: str) -> None:
    row = replay.replay(name, replay.adapters()[name])
    assert row.as_expected, row.reasons


@pytest.mark.parametrize("name", ["original", "A"])
def test_contracts_give_the_same_result_when_the_decoder_is_another_process(name: str) -> None:
    outcomes = [play(contract, lambda: SpawningAdapter(SCHEMES[name])) for contract in CONTRACTS]
    broken = {outcome.contract: outcome.reason for outcome in outcomes if outcome.reason is not None}
    assert set(broken) == replay.EXPECTED_FAILURES[name], broken


def test_the_original_breaks_nine_and_close_only_the_two_about_figures() -> None:
    assert replay.EXPECTED_FAILURES["original"] == names_of((*EARLY_ENDS, *ACCOUNTS))
    assert len(replay.EXPECTED_FAILURES["original"]) == 9
    assert replay.EXPECTED_FAILURES["close-only"] == names_of(ACCOUNTS)
    assert len(ACCOUNTS) == 2


def test_replay_prints_one_json_object_and_exits_with_zero_when_all_is_as_expected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert replay.main(["--json", "--only", "close-only,A"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["passed"] for row in report["rows"]] == [16, 18]


def test_an_adapter_that_is_not_available_makes_replay_exit_with_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "adapters", lambda: {"ringfence": None})
    assert replay.main(["--only", "ringfence"]) == 1
    assert "NOT AVAILABLE" in capsys.readouterr().out


def test_a_row_that_differs_makes_replay_exit_with_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(replay.EXPECTED_FAILURES, "A", names_of(ACCOUNTS))
    assert replay.main(["--only", "A"]) == 1
    assert "NOT AS EXPECTED" in capsys.readouterr().out
