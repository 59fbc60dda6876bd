"""The token ring: one producer (the worker), one consumer (the server), fixed 16-byte records.

    word 0   generation (32 bits) | slot (16 bits) | kind (16 bits)
    word 1   value      (32 bits) | detail (32 bits)

    kind          value                          detail
    TOKEN         token id                       logprob as float32 bits (0 when none was asked for)
    ALTERNATIVE   token id                       its logprob; comes before the TOKEN it belongs to
    PROGRESS      prompt tokens now in cache     prompt tokens in all
    END           finish code (slots.py)         0

Invariants
- `written` and `read` are u64 record counts that only grow; `written - read` is the fill, at most the capacity.
- Only the worker stores `written`, only the server stores `read`. A record is whole before `written` passes it: a worker
  killed at any instant leaves nothing half-written below `written`.
- The worker publishes once per decoder step (`publish`), however many records the step made.
- Nobody waits: a full ring makes `try_push` return False, and the worker keeps the record (workers/running.py).

Order of memory: x86-64 keeps stores in order and loads in order. On ARM64 a fence is needed between `written` and the
records on both sides; acquiring and releasing a lock is one, and costs 50 ns a step.

Refused: a CRC per record. A record is two aligned word stores, ordered before the position; there is no torn state to
detect, and the reader checks (slot, generation, kind) of each record against the lease it serves.
"""

import struct
import threading
from enum import IntEnum

from shm.layout import WORD_BYTES
from shm.segment import Segment


class Kind(IntEnum):
    """What a record says. 0 is no kind, so that untouched memory is never taken for a record."""

    TOKEN = 1
    ALTERNATIVE = 2
    PROGRESS = 3
    END = 4


_FLOAT = struct.Struct("<f")
_WORD32 = struct.Struct("<I")


def float_bits(value: float) -> int:
    """The bits of a float32, as stored in a record's detail."""
    bits: int = _WORD32.unpack(_FLOAT.pack(value))[0]
    return bits


def bits_float(bits: int) -> float:
    """The float32 with these bits."""
    value: float = _FLOAT.unpack(_WORD32.pack(bits))[0]
    return value


def record_head(slot: int, generation: int, kind: Kind) -> int:
    """Word 0 of a record. A writer computes it once per turn and kind."""
    return (generation & 0xFFFFFFFF) << 32 | slot << 16 | kind


class _Positions:
    def __init__(self, segment: Segment) -> None:
        layout = segment.layout
        self._words = segment.words
        self._first = layout.ring_offset // WORD_BYTES
        self._capacity = layout.ring_records
        self._mask = layout.ring_records - 1
        self._written_at = layout.written_offset // WORD_BYTES
        self._read_at = layout.read_offset // WORD_BYTES
        self._fence = threading.Lock()

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def fill(self) -> int:
        """Published records that the server has not taken yet."""
        return self._words[self._written_at] - self._words[self._read_at]


class RingWriter(_Positions):
    """The worker's end. Records pushed are invisible until `publish`."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment)
        self._next = self._words[self._written_at]
        self._limit = self._words[self._read_at] + self._capacity

    def __repr__(self) -> str:
        return f"RingWriter(next={self._next}, fill={self.fill}, capacity={self._capacity})"

    def try_push(self, head: int, value: int, detail: int = 0) -> bool:
        """Add a record (head from `record_head`, value and detail unsigned 32-bit); False when the ring is full."""
        if self._next >= self._limit:
            self._limit = self._words[self._read_at] + self._capacity
            if self._next >= self._limit:
                return False
        at = self._first + 2 * (self._next & self._mask)
        self._words[at] = head
        self._words[at + 1] = value << 32 | detail
        self._next += 1
        return True

    def publish(self) -> bool:
        """Make pushed records visible; True when there were any, and the doorbell is due."""
        if self._words[self._written_at] == self._next:
            return False
        with self._fence:
            pass
        self._words[self._written_at] = self._next
        return True


class RingReader(_Positions):
    """The server's end."""

    def __repr__(self) -> str:
        return f"RingReader(read={self._words[self._read_at]}, fill={self.fill}, capacity={self._capacity})"

    def drain(self, limit: int = 1 << 62) -> list[int]:
        """Published records, at most `limit`, as a flat list of words (head, payload, ...), and their room given back.

        Raises ValueError when the positions cannot be (a fault of the worker; nothing is taken).
        """
        read = self._words[self._read_at]
        written = self._words[self._written_at]
        count = written - read
        if count == 0:
            return []
        if not 0 < count <= self._capacity:
            raise ValueError(
                f"ring positions are impossible: written {written}, read {read}, capacity {self._capacity}"
            )
        with self._fence:
            pass
        count = min(count, limit)
        start = read & self._mask
        first = min(count, self._capacity - start)
        at = self._first + 2 * start
        records = self._words[at : at + 2 * first].tolist()
        if first < count:
            records += self._words[self._first : self._first + 2 * (count - first)].tolist()
        with self._fence:
            pass
        self._words[self._read_at] = read + count
        return records

    def last(self, count: int) -> list[tuple[int, int]]:
        """The last `count` records published, taken or not, as (head, payload): for the record of a death."""
        written = self._words[self._written_at]
        first = max(0, written - min(count, self._capacity))
        places = (self._first + 2 * (position & self._mask) for position in range(first, written))
        return [(self._words[at], self._words[at + 1]) for at in places]
