"""A decoder's stderr: always read, never believed, bounded in every direction.

A pipe that nobody reads stops its writer after 64 KB, so the worker takes whatever comes and keeps the last lines for the
record of a death. Lines are passed on to the worker's own stderr (a non-blocking pipe to the server) as fast as a budget
allows; the rest is counted and dropped. Long lines are cut, bytes that are not UTF-8 are replaced.
"""

from collections import deque

LINE_LIMIT_BYTES = 2048


class StderrTail:
    """The last lines, and a budget of lines to pass on (`burst` at once, then `rate_s` a second)."""

    def __init__(self, *, kept: int = 50, burst: int = 200, rate_s: float = 50.0) -> None:
        self.lines: deque[str] = deque(maxlen=kept)
        self.seen = 0
        self.dropped = 0
        self._burst = float(burst)
        self._rate_s = rate_s
        self._budget = float(burst)
        self._refilled_at = 0.0
        self._partial = b""
        self._is_skipping = False

    def __repr__(self) -> str:
        return f"StderrTail(seen={self.seen}, dropped={self.dropped}, kept={len(self.lines)})"

    def feed(self, data: bytes, now: float) -> list[str]:
        """Take what was read; the lines to pass on."""
        self._budget = min(self._burst, self._budget + (now - self._refilled_at) * self._rate_s)
        self._refilled_at = now
        head, *rest = data.split(b"\n")
        if not rest:
            self._hold(head)
            return []
        complete = [] if self._is_skipping else [(self._partial + head)[:LINE_LIMIT_BYTES]]
        self._partial, self._is_skipping = b"", False
        complete += [line[:LINE_LIMIT_BYTES] for line in rest[:-1]]
        self._hold(rest[-1])
        return self._admit(complete)

    def finish(self) -> None:
        """End of file: what is left counts as a line."""
        if self._partial:
            self._admit([self._partial])
        self._partial, self._is_skipping = b"", False

    def _hold(self, data: bytes) -> None:
        if self._is_skipping or not data:
            return
        self._partial += data[: LINE_LIMIT_BYTES + 1]
        if len(self._partial) > LINE_LIMIT_BYTES:
            self._admit([self._partial[:LINE_LIMIT_BYTES]])
            self._partial, self._is_skipping = b"", True

    def _admit(self, lines: list[bytes]) -> list[str]:
        self.seen += len(lines)
        kept = lines[-(self.lines.maxlen or 0) :]
        self.lines.extend(line.decode("utf-8", "replace").rstrip("\r") for line in kept)
        count = min(len(lines), int(self._budget))
        self._budget -= count
        self.dropped += len(lines) - count
        return [line.decode("utf-8", "replace") for line in lines[:count]]
