"""Doorbells (eventfds) and the lifeline between the server and a worker.

Each side has one bell to ring and one to listen to. The rule that loses no wake-up: the ringer writes its data, then
rings, always; the listener clears the bell first, then looks at the data. A "sleeping" flag to save rings was tried and
lost wake-ups; a ring costs 0.2 microseconds.

The lifeline is a socketpair on which nothing is ever sent: end of file tells each side that the other is gone, whatever
it died of, since the kernel closes it.
"""

import os
import socket


class Doorbell:
    """An eventfd. `ring` never blocks; `clear` empties it and tells whether it had been rung."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __repr__(self) -> str:
        return f"Doorbell(fd={self.fd})"

    @classmethod
    def create(cls) -> "Doorbell":
        return cls(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))

    def fileno(self) -> int:
        return self.fd

    def ring(self) -> None:
        try:
            os.eventfd_write(self.fd, 1)
        except BlockingIOError:
            pass  # the counter is full: it has been rung and not yet answered

    def clear(self) -> bool:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def lifeline() -> tuple[socket.socket, socket.socket]:
    """The two ends of a lifeline: the server's and the worker's, both close-on-exec and non-blocking."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs
