"""Lines out of the bytes that a decoder writes, whatever the borders of the reads."""

LIMIT_BYTES = 1_048_576


class ProtocolViolation(Exception):
    """A line that the protocol does not allow. `excerpt` holds at most 120 bytes of it."""

    def __init__(self, line: bytes, reason: str) -> None:
        self.excerpt = bytes(line[:120])
        self.reason = reason
        super().__init__(f"{reason}: {self.excerpt!r}")


class LineReader:
    """Splits bytes into lines without their line ends (`\\n`, one `\\r` before it).

    A line of more than `limit_bytes` is dropped whole and counted in `too_long`. What follows the last `\\n` waits for
    the next `feed`; at end of file it is no line and is dropped with the reader.
    """

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.too_long = 0
        self._limit = limit_bytes
        self._pending = bytearray()
        self._is_skipping = False

    def __repr__(self) -> str:
        return f"LineReader(pending={len(self._pending)}, too_long={self.too_long}, is_skipping={self._is_skipping})"

    @property
    def pending_bytes(self) -> int:
        """Bytes of an unfinished line that are held."""
        return len(self._pending)

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes."""
        lines = data.split(b"\n")
        rest = lines.pop()
        if lines and (self._pending or self._is_skipping):
            lines = self._finish_pending(lines)
        if len(data) > self._limit:
            lines = self._without_too_long(lines)
        if rest:
            self._hold(rest)
        if b"\r" in data or (lines and lines[0][-1:] == b"\r"):
            return [line.removesuffix(b"\r") for line in lines]
        return lines

    def _finish_pending(self, lines: list[bytes]) -> list[bytes]:
        if self._is_skipping:
            self._is_skipping = False
            return lines[1:]
        first = bytes(self._pending + lines[0])
        self._pending.clear()
        if len(first) > self._limit:
            self.too_long += 1
            return lines[1:]
        lines[0] = first
        return lines

    def _without_too_long(self, lines: list[bytes]) -> list[bytes]:
        kept = [line for line in lines if len(line) <= self._limit]
        self.too_long += len(lines) - len(kept)
        return kept

    def _hold(self, rest: bytes) -> None:
        if self._is_skipping:
            return
        self._pending += rest
        if len(self._pending) > self._limit:
            self.too_long += 1
            self._pending.clear()
            self._is_skipping = True
