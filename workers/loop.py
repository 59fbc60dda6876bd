"""The worker's epoll loop: descriptors with handlers, and one moment at which time itself is due.

`run` ends when a handler or the tick sets an exit code. Everything waits here and nowhere else.
"""

import select
import time
from collections.abc import Callable

TICK_S = 1.0


class Loop:
    """One epoll. `tick` is called once a second, and sooner when somebody asked by `soon`."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self._due_s = 0.0
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}

    def __repr__(self) -> str:
        return f"Loop(watching={sorted(self._handlers)}, exit_code={self.exit_code})"

    def watch(self, fd: int, handler: Callable[[], None], events: int = select.EPOLLIN) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def watch_writable(self, fd: int, handler: Callable[[], None]) -> None:
        self.watch(fd, handler, select.EPOLLOUT)

    @staticmethod
    def now() -> float:
        """The loop's clock, monotonic seconds."""
        return time.monotonic()

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor; must come before it is closed. One that is not watched is no error."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def is_watching(self, fd: int) -> bool:
        return fd in self._handlers

    def soon(self, at_s: float) -> None:
        """Tick no later than this (monotonic seconds)."""
        if at_s < self._due_s:
            self._due_s = at_s

    def run(self, tick: Callable[[float], None]) -> int:
        """Serve until there is an exit code."""
        handlers, poll, clock = self._handlers, self._epoll.poll, time.monotonic
        while self.exit_code is None:
            now = clock()
            if now >= self._due_s:
                self._due_s = now + TICK_S
                tick(now)
                continue
            for fd, _ in poll(self._due_s - now):
                handler = handlers.get(fd)
                if handler is not None:
                    handler()
        return self.exit_code
