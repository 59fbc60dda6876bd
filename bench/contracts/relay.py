"""Stands in for a decoder process: carries its own stdin and stdout to the contract that plays the decoder.

Run by path (`python -I -S relay.py NAME`), so it starts fast and needs nothing of ours. NAME is an abstract Unix
socket.
"""

from __future__ import annotations

import os
import select
import socket
import sys


def relay(name: str) -> None:
    """Copy both ways until the contract's side ends; the end of stdin is passed on to it first."""
    link = socket.socket(socket.AF_UNIX)
    link.connect("\0" + name)
    sources = [0, link.fileno()]
    while True:
        readable, _, _ = select.select(sources, [], [])
        if 0 in readable:
            commands = os.read(0, 1 << 16)
            if commands:
                link.sendall(commands)
            else:
                link.shutdown(socket.SHUT_WR)
                sources.remove(0)
        if link.fileno() in readable:
            answers = link.recv(1 << 16)
            if not answers:
                return
            while answers:
                answers = answers[os.write(1, answers) :]


if __name__ == "__main__":
    try:
        relay(sys.argv[1])
    except (BrokenPipeError, ConnectionError):
        sys.exit(1)
