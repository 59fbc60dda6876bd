"""A worker and all it started are one kernel session, led by the worker.

The leader's number can't be given to another process while the leader is unreaped or any member lives, so members found
by session are ours even after the leader died and its children were adopted by init. A pid that was stored and has been
recycled is never signalled: nothing here acts on a stored pid but the leader's, which is reaped last.

A process that leaves the session on purpose (setsid) is not found; decoders don't.
"""

import os
import signal
from collections.abc import Callable


def members(leader: int) -> list[int]:
    """Living processes of the session, zombies left out, the leader among them.

    Raises OSError when this process has no descriptor left to look with: then nothing is known of the session.
    """
    return _living(os.getsid, leader)


def group_members(leader: int) -> list[int]:
    """The same for a process group."""
    return _living(os.getpgid, leader)


def _living(belongs_to: Callable[[int], int], leader: int) -> list[int]:
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            if belongs_to(pid) == leader and not _is_zombie(pid):
                found.append(pid)
        except (ProcessLookupError, PermissionError):
            continue
    return found


def kill(leader: int) -> list[int]:
    """SIGKILL to every member; those that were still there."""
    killed = []
    for pid in members(leader):
        try:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        except (ProcessLookupError, PermissionError):
            continue
    return killed


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat[stat.rfind(b")") + 2 : stat.rfind(b")") + 3] in (b"Z", b"X")
