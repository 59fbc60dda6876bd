"""One server over scripted decoders for most tests of this folder; each test begins with an empty script and leaves it
idle."""

import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.whole.scripted import Scripted, scripted


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    times = ("--keepalive-s", "0.3", "--header-timeout-s", "2", "--body-timeout-s", "2")
    bounds = ("--connection-limit", "300", "--body-limit", "8MiB", "--queue-requests", "128")
    with scripted(tmp_path_factory.mktemp("scripted"), *times, *bounds) as server:
        yield server


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
async def server(shared_server: Scripted) -> AsyncIterator[Scripted]:
    shared_server.stage.script()
    yield shared_server
    shared_server.stage.script()
    await shared_server.clean()
