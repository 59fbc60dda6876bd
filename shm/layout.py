"""Where everything lies in a segment.

    +--------------------+ 0
    | header             |  magic, version, epoch, size and the four numbers below; written once by the creator
    +--------------------+ PAGE
    | board              |  single-writer words of the worker, readable while it hangs        (board.py)
    +--------------------+ 2 * PAGE
    | ring positions     |  written (worker) and read (server), a cache line each             (ring.py)
    | orders             |  what the server wants of the worker, a cache line                (orders.py)
    | slot control words |  generation[slots], cancelled[slots], both the server's            (slots.py)
    +--------------------+ controls_end, up to a page
    | ring records       |  ring_records x 16 bytes                                           (ring.py)
    +--------------------+
    | request slots      |  slots x (request words, result words, error, options, prompt text) (slots.py)
    +--------------------+ size_bytes

All control words are aligned 64-bit words reached through `memoryview.cast('Q')`, whose stores and loads are single
machine instructions in CPython (6.3 million stores measured without a tear). `struct.pack_into` is refused for them: it
zeroes the word first, and the other side would see the zero.

A segment belongs to one worker incarnation and is never reused; `epoch` names that incarnation, and attaching checks it.
"""

from dataclasses import dataclass

MAGIC = 0x52494E4746454E43  # "RINGFENC"
VERSION = 1
PAGE_BYTES = 4096
LINE_BYTES = 64
WORD_BYTES = 8
RECORD_BYTES = 16

PROMPT_BYTES_PER_TOKEN = 8  # up to seven digits and a comma
HEADER_WORDS = 8
SLOT_WORDS = 32  # 16 written by the server, 16 by the worker
ERROR_BYTES = 512

MAX_SLOTS = 256
MIN_RING_RECORDS = 64


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of one segment; offsets follow from them.

    slots: request slots, 1 to 256. context: longest prompt in tokens. ring_records: capacity of the token ring, a power
    of two. options_bytes: room for one request's encoded options (grammar and logit bias included).
    Raises ValueError for sizes that no segment can have.
    """

    slots: int
    context: int
    ring_records: int = 4096
    options_bytes: int = 65536

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= MAX_SLOTS:
            raise ValueError(f"slots must be 1 to {MAX_SLOTS}, not {self.slots}.")
        if self.context < 1:
            raise ValueError(f"context must be at least 1 token, not {self.context}.")
        if self.ring_records < MIN_RING_RECORDS or self.ring_records & (self.ring_records - 1):
            raise ValueError(
                f"ring_records must be a power of two of at least {MIN_RING_RECORDS}, not {self.ring_records}."
            )
        if self.options_bytes < 1024 or self.options_bytes % LINE_BYTES:
            raise ValueError(f"options_bytes must be a multiple of {LINE_BYTES} and at least 1024.")

    @property
    def board_offset(self) -> int:
        return PAGE_BYTES

    @property
    def written_offset(self) -> int:
        return 2 * PAGE_BYTES

    @property
    def read_offset(self) -> int:
        return 2 * PAGE_BYTES + LINE_BYTES

    @property
    def orders_offset(self) -> int:
        return 2 * PAGE_BYTES + 2 * LINE_BYTES

    @property
    def generations_offset(self) -> int:
        return 2 * PAGE_BYTES + 3 * LINE_BYTES

    @property
    def cancels_offset(self) -> int:
        return self.generations_offset + _up(self.slots * WORD_BYTES, LINE_BYTES)

    @property
    def ring_offset(self) -> int:
        return _up(self.cancels_offset + self.slots * WORD_BYTES, PAGE_BYTES)

    @property
    def slots_offset(self) -> int:
        return _up(self.ring_offset + self.ring_records * RECORD_BYTES, PAGE_BYTES)

    @property
    def prompt_bytes(self) -> int:
        return _up(self.context * PROMPT_BYTES_PER_TOKEN, LINE_BYTES)

    @property
    def slot_bytes(self) -> int:
        return _up(SLOT_WORDS * WORD_BYTES + ERROR_BYTES + self.options_bytes + self.prompt_bytes, PAGE_BYTES)

    @property
    def size_bytes(self) -> int:
        return self.slots_offset + self.slots * self.slot_bytes

    def slot_offset(self, slot: int) -> int:
        return self.slots_offset + slot * self.slot_bytes

    def header(self, epoch: int) -> tuple[int, ...]:
        """The eight header words of a segment of this layout."""
        return (
            MAGIC,
            VERSION,
            epoch,
            self.size_bytes,
            self.slots,
            self.context,
            self.ring_records,
            self.options_bytes,
        )
