"""The shipped supervisord.conf: its policy, and a real supervisord living by it with a stand-in for the server."""

import configparser
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from server.config import Config, load_config

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0

SERVER = """#!{python}
import pathlib, signal, sys
here = pathlib.Path(__file__).parents[2]
with (here / "started").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
if not (here / "ringfence.toml").exists():
    sys.exit("ringfence.toml is missing")
signal.signal(signal.SIGTERM, lambda *_: ((here / "drained").touch(), sys.exit(0)))
while True:
    signal.pause()
"""


@pytest.fixture
def policy() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, inline_comment_prefixes=(" ;",))
    parser.read(ROOT / "supervisord.conf")
    return parser["program:ringfence"]


def test_stop_leaves_time_for_the_drain(policy: configparser.SectionProxy) -> None:
    assert policy["stopsignal"] == "TERM"
    assert int(policy["stopwaitsecs"]) >= Config().drain_s + 10


def test_shipped_configuration_is_accepted_and_its_drain_fits(
    policy: configparser.SectionProxy, tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    shipped = ROOT / "deploy" / "ringfence.toml"
    config = load_config(options={"model": str(model)}, environment={}, path=shipped)
    assert config.drain_s + 10 <= int(policy["stopwaitsecs"])


def test_sigterm_goes_to_the_server_alone_and_sigkill_to_its_group(policy: configparser.SectionProxy) -> None:
    assert not policy.getboolean("stopasgroup")
    assert policy.getboolean("killasgroup")


def test_restarts_never_end(policy: configparser.SectionProxy) -> None:
    assert policy["autorestart"] == "true"
    assert int(policy["startretries"]) > 10 * 365 * 24 * 3600
    assert int(policy["startsecs"]) <= 1


def test_logs_are_bounded(policy: configparser.SectionProxy) -> None:
    assert policy["stdout_logfile_maxbytes"].endswith("MB")
    assert int(policy["stdout_logfile_backups"]) > 0
    assert policy.getboolean("redirect_stderr")


class Installation:
    """A directory with the shipped supervisord.conf and a stand-in for `ringfence`."""

    def __init__(self, here: Path) -> None:
        self.here = here
        self.started = here / "started"
        self.conf = here / "supervisord.conf"
        self.conf.write_text((ROOT / "supervisord.conf").read_text())
        command = here / ".venv" / "bin" / "ringfence"
        command.parent.mkdir(parents=True)
        command.write_text(SERVER.format(python=sys.executable))
        command.chmod(0o755)

    @contextmanager
    def supervised(self) -> Iterator[subprocess.Popen[bytes]]:
        program = [sys.executable, "-m", "supervisor.supervisord", "-c", str(self.conf)]
        process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(DEADLINE_S)

    def starts(self) -> list[str]:
        return self.started.read_text().splitlines() if self.started.exists() else []

    def control(self, *command: str) -> str:
        program = [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(self.conf), *command]
        return subprocess.run(program, capture_output=True, text=True).stdout


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.02)


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    here = tmp_path / "with a space"
    here.mkdir()
    return Installation(here)


def test_failing_start_is_retried_until_it_is_put_right(installation: Installation) -> None:
    with installation.supervised():
        wait_for(lambda: len(installation.starts()) >= 2)
        assert "FATAL" not in installation.control("status")
        (installation.here / "ringfence.toml").touch()
        wait_for(lambda: "RUNNING" in installation.control("status"))
    assert installation.starts()[0] == f"serve --config {installation.here}/ringfence.toml"


def test_killed_server_is_started_again_and_stop_drains_it(installation: Installation) -> None:
    (installation.here / "ringfence.toml").touch()
    with installation.supervised() as supervisord:
        wait_for(lambda: "RUNNING" in installation.control("status"))
        psutil.Process(supervisord.pid).children()[0].kill()
        wait_for(lambda: len(installation.starts()) == 2)
        wait_for(lambda: "RUNNING" in installation.control("status"))
        installation.control("stop", "ringfence")
        assert (installation.here / "drained").exists()


def test_killed_supervisord_leaves_no_server(installation: Installation) -> None:
    (installation.here / "ringfence.toml").touch()
    with installation.supervised() as supervisord:
        wait_for(lambda: "RUNNING" in installation.control("status"))
        server = psutil.Process(supervisord.pid).children()[0]
        os.kill(supervisord.pid, signal.SIGKILL)
        server.wait(DEADLINE_S)
    with installation.supervised():
        wait_for(lambda: len(installation.starts()) == 2)
