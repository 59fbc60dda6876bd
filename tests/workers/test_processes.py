"""Whose descriptors, groups and sessions the processes are, and that nothing outlives its owner."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fakes import stage as waiting
from tests.fakes.echo import echo_prompt
from tests.fakes.stage import Stage
from tests.workers.running import descriptors, exact, kill, pool_settings, process_is_alive, running_pool, tokens, until
from workers import session
from workers.supervisor import Phase

ROOT = Path(__file__).resolve().parents[2]


def links(pid: int) -> dict[str, str]:
    """What a process's descriptors are; nothing for one that is gone."""
    found = {}
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            found[name] = os.readlink(f"/proc/{pid}/fd/{name}")
    except OSError:
        pass
    return found


def holders(pipes: set[str]) -> set[int]:
    """Every process of this machine that has one of these pipes open."""
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return {pid for pid in pids if pipes & set(links(pid).values())}


async def test_only_the_worker_holds_its_decoders_pipes_and_the_server_holds_none(stage: Stage) -> None:
    """Issue 2, done when 3."""
    async with running_pool(stage, workers=2) as running:
        for worker in range(2):
            decoder = running.decoder_pid(worker)
            pipes = {links(decoder)[name] for name in "012"}
            assert len(pipes) == 3
            assert holders(pipes) == {decoder, running.pid(worker)}


async def test_a_decoder_inherits_nothing_of_the_shared_memory_and_a_worker_only_its_own(stage: Stage) -> None:
    async with running_pool(stage, workers=3) as running:
        for worker, replica in enumerate(running.replicas):
            assert replica.incarnation is not None
            own = " ".join(links(running.pid(worker)).values())
            assert set(re.findall(r"memfd:ringfence-(\d+)", own)) == {str(replica.incarnation.epoch)}
            assert set(links(running.decoder_pid(worker))) <= {"0", "1", "2", "3", "4"}
            assert not any("memfd" in link or "eventfd" in link for link in links(running.decoder_pid(worker)).values())


async def test_workers_lead_their_sessions_and_decoders_their_groups(stage: Stage) -> None:
    async with running_pool(stage) as running:
        worker, decoder = running.pid(), running.decoder_pid()
        assert os.getsid(worker) == os.getpgid(worker) == worker
        assert (os.getsid(decoder), os.getpgid(decoder)) == (worker, decoder)


async def test_a_groups_polite_signals_do_not_end_a_worker_or_its_streams(stage: Stage) -> None:
    """B51."""
    async with running_pool(stage, decoder={"token_delay_s": 0.002}) as running:
        turn, worker = running.submit(echo_prompt(1), 60), running.pid()
        await tokens(turn, 1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.killpg(worker, number)
        assert (await exact(turn)).moves == 0
        assert running.pid() == worker


@pytest.mark.parametrize("grandchild", ["holding", "detached"])
async def test_a_killed_worker_takes_its_decoder_and_its_decoders_children_with_it(
    stage: Stage, grandchild: str
) -> None:
    """B38. Nothing of the old worker is left when the new one starts."""
    stage.script(grandchild=grandchild)
    async with running_pool(stage) as running:
        family = running.processes()
        assert len(family) == 3
        kill(running.pid())
        await until(lambda: len(running.events("START")) == 2, what="the next decoder")
        assert not any(process_is_alive(pid) for pid in family)


@pytest.mark.parametrize("grandchild", ["holding", "detached"])
async def test_a_killed_decoder_takes_its_children_with_it(stage: Stage, grandchild: str) -> None:
    stage.script(grandchild=grandchild)
    async with running_pool(stage) as running:
        child = running.events("GRANDCHILD")[0]["child"]
        kill(running.decoder_pid())
        await until(lambda: not process_is_alive(child), timeout_s=2.0, what="the child's end")
        await running.serving()


@pytest.fixture
def canaries() -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Processes that are none of the pool's: one in this process's group, one in a group of its own."""
    sleep = [sys.executable, "-c", "import signal; signal.pause()"]
    started = [subprocess.Popen(sleep), subprocess.Popen(sleep, process_group=0)]
    yield started
    for canary in started:
        canary.kill()
        canary.wait()


async def test_canaries_survive_restarts_and_crash_clean_ups(
    stage: Stage, canaries: list["subprocess.Popen[bytes]"]
) -> None:
    """B39."""
    async with running_pool(stage) as running:
        await running.pool.operations.restart(0)
        kill(running.pid())
        await until(lambda: len(running.events("READY")) == 3, what="the next worker")
        await running.serving()
    assert [canary.poll() for canary in canaries] == [None, None]


@pytest.mark.parametrize("left", [0, 1])
async def test_a_worker_that_dies_while_descriptors_are_short_is_replaced_once_there_are_some(
    stage: Stage, left: int
) -> None:
    async with running_pool(stage) as running:
        supervisor = running.replicas[0].supervisor
        with descriptors(left):
            kill(running.pid())
            if left:
                await until(lambda: supervisor.deaths >= 3, what=lambda: repr(running.replicas))
                assert "can't be started" in running.replicas[0].reason()
            else:
                await until(lambda: supervisor.phase is Phase.SWEEPING, what=lambda: repr(running.replicas))
        await running.serving()
        await running.generate(echo_prompt(1), 5)


# ---- the server's own death -------------------------------------------------------------------------------------------


class Server:
    """A pool in a process of its own."""

    def __init__(self, stage: Stage, streams: int, **settings: Any) -> None:
        self.stage = stage
        text = msgspec.json.encode(pool_settings(stage, workers=2, **settings)).decode()
        command = [sys.executable, "-m", "tests.workers.server_process", text, str(streams)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True)
        self.workers: list[int] = self.says()["workers"]

    def says(self, timeout_s: float = 30.0) -> dict[str, Any]:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], (), (), timeout_s)[0], "the server says nothing"
        said: dict[str, Any] = json.loads(self.process.stdout.readline())
        return said

    def tree(self) -> set[int]:
        """Living processes of the workers' sessions."""
        return {pid for worker in self.workers for pid in session.members(worker)}

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        for worker in self.workers:
            session.kill(worker)


@pytest.fixture
def start_server(stage: Stage) -> Iterator[Callable[..., Server]]:
    with ExitStack() as stack:

        def start(streams: int = 0, **settings: Any) -> Server:
            server = Server(stage, streams, **settings)
            stack.callback(server.close)
            return server

        yield start


@pytest.mark.parametrize("moment", ["idle", "streaming", "loading", "stopped worker", "stubborn"])
def test_a_killed_server_leaves_no_process_of_its_tree(
    stage: Stage, start_server: Callable[..., Server], moment: str
) -> None:
    """B38."""
    stage.script(
        grandchild="holding",
        token_delay_s=0.01,
        start_delay_s=60.0 if moment == "loading" else 0.0,
        refuse=["quit", "eof", "term"] if moment == "stubborn" else [],
    )
    server = start_server(streams=8 if moment in ("streaming", "stubborn") else 0)
    for name in ("w0", "w1"):
        waiting.until(
            lambda: stage.events("START" if moment == "loading" else "READY", name=name),  # noqa: B023
            what="decoders",
        )
    waiting.until(lambda: len(server.tree()) == 6, what="two families")
    tree = server.tree()
    if moment == "stopped worker":
        kill(server.workers[0], signal.SIGSTOP)
    server.process.kill()
    waiting.until(lambda: not server.tree(), timeout_s=5.0, what=f"an empty tree, once {tree}")
    assert not any(process_is_alive(pid) for pid in tree)


def test_a_server_that_was_stopped_for_a_while_blames_no_worker(
    stage: Stage, start_server: Callable[..., Server]
) -> None:
    """B23."""
    stage.script(token_delay_s=0.002)
    server = start_server(streams=4, worker={"hang_limit_s": 1.0})
    kill(server.process.pid, signal.SIGSTOP)
    until_s = time.monotonic() + 4.0
    waiting.until(lambda: time.monotonic() > until_s, what="four seconds")
    kill(server.process.pid, signal.SIGCONT)
    said = server.says()
    assert said["exact"] == 4
    assert said["counters"]["worker_deaths"] == said["counters"]["worker_hangs"] == said["counters"]["moved"] == 0
