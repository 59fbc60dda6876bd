"""The memfd that one worker incarnation shares with the server.

Life: `Segment.create` makes the file, reserves its pages (`posix_fallocate`: a full machine fails here and not later with
SIGBUS), seals it against resizing and maps it. The worker inherits the descriptor and calls `Segment.attach`, which
refuses anything whose header is not the one it was promised. There is no name, so nothing is left when both have ended.

Refused: multiprocessing.shared_memory, whose resource tracker on Python 3.11 unlinks a segment when any process that
attached to it exits; files in /dev/shm, which survive SIGKILL.
"""

import fcntl
import mmap
import os
from dataclasses import dataclass

from shm.layout import HEADER_WORDS, MAGIC, VERSION, WORD_BYTES, Layout

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(eq=False)  # not frozen: a frozen exception breaks contextlib, which sets __traceback__
class SegmentMismatch(Exception):
    """The descriptor holds something else than the segment that was expected (field, expected, found)."""

    field: str
    expected: int
    found: int

    def __str__(self) -> str:
        return f"shared segment has {self.field} {self.found}, expected {self.expected}; it belongs to another process"


class Segment:
    """A mapped segment. `words` is its memory as 64-bit words, `bytes` the same memory as bytes."""

    def __init__(self, fd: int, layout: Layout, epoch: int, mapping: mmap.mmap) -> None:
        self.fd = fd
        self.layout = layout
        self.epoch = epoch
        self._mapping = mapping
        self.bytes = memoryview(mapping)
        self.words = self.bytes.cast("Q")

    def __repr__(self) -> str:
        return (
            f"Segment(epoch={self.epoch}, fd={self.fd}, slots={self.layout.slots}, size_bytes={self.layout.size_bytes})"
        )

    @classmethod
    def create(cls, layout: Layout, *, epoch: int) -> "Segment":
        """A new segment. Raises OSError (ENOMEM, ENOSPC) when the machine cannot hold it."""
        fd = os.memfd_create(f"ringfence-{epoch}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, layout.size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            segment = cls(fd, layout, epoch, mmap.mmap(fd, layout.size_bytes))
        except BaseException:
            os.close(fd)
            raise
        header = layout.header(epoch)
        for index in range(1, HEADER_WORDS):
            segment.words[index] = header[index]
        segment.words[0] = MAGIC  # last: a segment with a magic has a whole header
        return segment

    @classmethod
    def attach(cls, fd: int, *, epoch: int) -> "Segment":
        """Map the segment behind an inherited descriptor.

        Raises SegmentMismatch unless magic, version, size and epoch are those of a segment made for this incarnation.
        """
        size_bytes = os.fstat(fd).st_size
        if size_bytes < HEADER_WORDS * WORD_BYTES:
            raise SegmentMismatch("size", HEADER_WORDS * WORD_BYTES, size_bytes)
        mapping = mmap.mmap(fd, size_bytes)
        try:
            found = memoryview(mapping)[: HEADER_WORDS * WORD_BYTES].cast("Q").tolist()
            layout = _checked_layout(found, epoch=epoch, size_bytes=size_bytes)
        except BaseException:
            mapping.close()
            raise
        return cls(fd, layout, epoch, mapping)

    def close(self) -> None:
        """Unmap and close the descriptor; idempotent. Views taken of the memory must have been released."""
        if self.fd < 0:
            return
        self.words.release()
        self.bytes.release()
        self._mapping.close()
        os.close(self.fd)
        self.fd = -1


def _checked_layout(found: list[int], *, epoch: int, size_bytes: int) -> Layout:
    for index, field, expected in ((0, "magic", MAGIC), (1, "version", VERSION), (2, "epoch", epoch)):
        if found[index] != expected:
            raise SegmentMismatch(field, expected, found[index])
    try:
        layout = Layout(slots=found[4], context=found[5], ring_records=found[6], options_bytes=found[7])
    except ValueError as error:
        raise SegmentMismatch("layout", 0, found[4]) from error
    if not layout.size_bytes == found[3] == size_bytes:
        raise SegmentMismatch("size", layout.size_bytes, size_bytes)
    return layout
