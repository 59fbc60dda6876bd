"""Processes that a scripted decoder leaves behind."""

import os
import signal
import sys
import time


def leave_grandchild(kind: str, life_s: int) -> int:
    """Fork a process that ignores polite signals, and return its pid.

    "holding" keeps the decoder's pipes open, "detached" closes them, "session" also leaves the process group.
    """
    child = os.fork()
    if child:
        return child
    signal.alarm(life_s)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if kind == "session":
        os.setsid()
    if kind != "holding":
        os.closerange(0, 64)
    while True:
        signal.pause()


def hold_lock(path: str, lock_s: float) -> None:
    """Take a file that stands for the device's memory, and see that it goes `lock_s` after this process has died.

    Exits with status 70 when another decoder still has it. The file is removed by a process of its own session, which
    survives whatever kills the decoder.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        with open(path, encoding="ascii") as file:
            holder = file.read()
        sys.stderr.write(f"out of device memory: held by process {holder}\n")
        sys.stderr.flush()
        os._exit(70)
    os.write(fd, b"%d" % os.getpid())
    os.close(fd)
    life, _ours = os.pipe()
    if os.fork():
        os.wait()
        os.close(life)
        return  # `_ours` stays open for as long as this process lives
    os.setsid()
    if os.fork():
        os._exit(0)
    os.dup2(life, 3)
    os.closerange(0, 3)
    os.closerange(4, 64)
    signal.alarm(0)
    os.read(3, 1)
    time.sleep(lock_s)
    os.unlink(path)
    os._exit(0)
