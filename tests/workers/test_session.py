"""Finding and killing what a worker started, on real processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.fakes.stage import until
from workers import session

SLEEP = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
# A leader that starts a child in a process group of its own, which starts a grandchild; their pids go to stdout.
LEADER = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import os, subprocess, sys
grand = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
print(os.getpid(), grand.pid, flush=True)
grand.wait()
'''], process_group=0)
time.sleep(600)
"""


class Family:
    def __init__(self) -> None:
        self.leader = subprocess.Popen([sys.executable, "-c", LEADER], stdout=subprocess.PIPE, start_new_session=True)
        assert self.leader.stdout is not None
        self.child, self.grandchild = map(int, self.leader.stdout.readline().split())

    @property
    def all(self) -> set[int]:
        return {self.leader.pid, self.child, self.grandchild}


@pytest.fixture
def family() -> Iterator[Family]:
    family = Family()
    yield family
    session.kill(family.leader.pid)
    family.leader.communicate()


def test_every_process_of_the_session_is_found_whatever_its_group(family: Family) -> None:
    assert set(session.members(family.leader.pid)) == family.all


def test_orphans_are_found_by_their_session_after_the_leader_has_died(family: Family) -> None:
    os.kill(family.child, signal.SIGKILL)
    family.leader.kill()
    until(lambda: session.members(family.leader.pid) == [family.grandchild], what="only the orphan left")


def test_killing_leaves_nobody_and_says_whom_it_met(family: Family) -> None:
    assert set(session.kill(family.leader.pid)) == family.all
    until(lambda: not session.members(family.leader.pid), what="an empty session")
    assert family.leader.poll() is None or family.leader.returncode == -signal.SIGKILL


def test_a_leader_that_died_and_was_not_reaped_is_no_member(family: Family) -> None:
    session.kill(family.leader.pid)
    until(lambda: not session.members(family.leader.pid), what="an empty session")
    with open(f"/proc/{family.leader.pid}/stat", encoding="ascii") as file:
        assert ") Z " in file.read(), "the leader keeps its number until it is reaped"


def test_a_canary_in_another_session_and_one_in_ours_survive(family: Family) -> None:
    canaries = [
        subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True),
        subprocess.Popen([sys.executable, "-c", SLEEP]),
    ]
    try:
        session.kill(family.leader.pid)
        until(lambda: not session.members(family.leader.pid), what="an empty session")
        assert [canary.poll() for canary in canaries] == [None, None]
    finally:
        for canary in canaries:
            canary.kill()
            canary.wait()


def test_an_empty_session_is_no_error() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    gone.wait()
    assert session.members(gone.pid) == []
    assert session.kill(gone.pid) == []
