"""The command line, without starting workers."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from server import check, cli, fleet
from server.config import KEYS
from server.report import describe_status, duration, table
from server.status import status_of
from tests import tiny_model
from tests.fakes.http import service_of
from tests.fakes.pool import FakePool


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model.build(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture
def decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that prints a help text."""
    path = tmp_path / "decoder"
    path.write_text("#!/bin/sh\necho usage\n")
    path.chmod(0o755)
    for module in (check, fleet):
        monkeypatch.setattr(module, "decoder_path", lambda: path)
    return path


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(cli.main, list(arguments), **options)


@pytest.mark.parametrize("command", ["serve", "check"])
def test_every_key_is_an_option(command: str) -> None:
    text = run(command, "--help").output
    assert "--config" in text
    assert [name for name in KEYS if "--" + name.replace("_", "-") not in text] == []


def test_a_bad_option_names_key_value_and_remedy() -> None:
    result = run("serve", "--demo", "--port", "http")
    assert result.exit_code == 1
    assert "Error: `port` can't be 'http' (from the command line): give a whole number" in result.output


def test_a_missing_model_is_explained() -> None:
    assert "Set `model` to a GGUF file" in run("serve").output


@pytest.mark.usefixtures("decoder")
def test_check_passes_and_prints_a_table(model: str) -> None:
    result = run("check", "--model", model, "--port", "0")
    assert result.exit_code == 0, result.output
    assert "ringfence-tiny, 1706 tokens, chat template found" in result.output
    assert len(result.output.splitlines()) == 6 and result.output.count("ok ") == 6


@pytest.mark.usefixtures("decoder")
def test_check_fails_for_a_port_in_use_and_says_what_to_do(model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("check", "--model", model, "--port", str(port))
    assert result.exit_code == 1
    assert "FAILED" in result.output and "choose another `port`" in result.output


def test_check_fails_for_a_decoder_that_does_not_start(model: str, decoder: Path) -> None:
    decoder.write_text("#!/bin/sh\necho 'no libllama' >&2; exit 3\n")
    result = run("check", "--model", model, "--port", "0")
    assert result.exit_code == 1 and "ends with 3: no libllama" in result.output


def test_check_fails_for_a_foreign_decoder_that_is_not_there(model: str) -> None:
    result = run("check", "--tokenizer", model, "--decoder-command", "absent-program --serve", "--port", "0")
    assert result.exit_code == 1 and "no such program" in result.output


def test_serve_reports_a_port_in_use_before_it_loads_anything(model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("serve", "--model", model, "--port", str(taken.getsockname()[1]))
    assert result.exit_code == 1 and "Can't listen on 127.0.0.1" in result.output


def test_status_without_a_server_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = run("status", "--url", f"http://127.0.0.1:{port}")
    assert result.exit_code == 1 and "Start the server" in result.output


def test_status_shows_the_progress_of_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    import msgspec

    from shm.board import WorkerState

    pool = FakePool()
    pool.set_state(1, WorkerState.LOADING, "loading, 40 %")
    answer = json.loads(msgspec.json.encode(status_of(service_of(pool))))
    monkeypatch.setattr(cli, "_fetch", lambda url, key: answer)
    result = run("status")
    assert result.exit_code == 0
    assert "tiny: degraded" in result.output
    assert "loading [####      ] 40 %" in result.output
    assert json.loads(run("status", "--json").output)["model"] == "tiny"
    assert "0 completed" in describe_status(answer)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3660, "1 h 1 min"), (90_000, "1 d 1 h")]
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_tables_are_aligned() -> None:
    assert table([("a", "bb", "c"), ("aaa", "b", "")]) == "a    bb  c\naaa  b"
