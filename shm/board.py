"""The board: what a worker says of itself, readable at any moment, also while the worker hangs or after it died.

One page of 64-bit words with one writer, the thread that moves tokens. A word is stored whole, so a reader needs no lock;
two words may be of different moments, and nothing here depends on their agreeing. Two texts (the last error and the
decoder's INFO) sit behind a sequence word each: odd while the worker writes; a reader that meets an odd or a changed
sequence takes what it has as torn and gives the empty text.
"""

import threading
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from shm.layout import WORD_BYTES
from shm.segment import Segment


class WorkerState(StrEnum):
    """States of a worker and its decoder, in words that operators know."""

    STARTING = "starting"  # the worker process runs, its decoder is not spawned yet
    LOADING = "loading"  # the decoder was spawned and has not said READY
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    UNLOADED = "unloaded"  # no decoder, on purpose; loads on demand
    BACKOFF = "backoff"  # the decoder died; the next start waits
    FATAL = "fatal"  # died too often: cordoned, slow retries go on
    STOPPING = "stopping"


_STATES = tuple(WorkerState)
_READY = _STATES.index(WorkerState.READY)


class Word(IntEnum):
    """Words of the board, in order."""

    STATE = 0
    HEARTBEAT_NS = 1  # CLOCK_MONOTONIC of the worker's last tick, at least one a second
    PROGRESS_NS = 2  # CLOCK_MONOTONIC of the decoder's start, its READY, or its last answers
    STEPS = 3  # reads of the decoder's stdout that carried tokens
    PREFILL_TOKENS = 4  # prompt tokens read, summed over turns
    RUNNING = 5
    TOKENS_OUT = 6
    DECODER_PID = 7  # 0 when there is none
    DECODER_INCARNATION = 8
    CAPACITY = 9  # turns the decoder runs at once
    CONTEXT = 10  # what READY said, in tokens
    LOAD_PERCENT = 11
    VIOLATIONS = 12  # lines of the decoder that broke the protocol
    STALE = 13  # answers for turns that are over
    PARKED = 14  # tokens held back because the ring was full
    STDERR_LINES = 15
    STDERR_DROPPED = 16
    STOPS_RESENT = 17
    KV_CELLS_USED = 18
    KV_CELLS = 19
    NONFINITE = 20  # times the decoder dropped its caches
    STALLED = 21  # turns stopped because the server did not take their tokens
    TURNS = 22  # turns ended
    DECODER_DEATHS = 23
    BACKOFF_UNTIL_NS = 24  # CLOCK_MONOTONIC of the next decoder start, while in BACKOFF
    DECODER_EXIT = 25  # status of the last dead decoder plus 1024 (negative: signal), 0 for none
    REPLACEMENTS = 26  # decoder replacements carried out on order
    CHANGES = 27  # grows with every change of state or capacity: only then the server looks at the rest
    DECODER_EXIT_KIND = 28  # which of workers.exits.ExitKind, by place


_CAPACITY = int(Word.CAPACITY)
_TEXT_WORDS = 64  # texts begin here: each a sequence word, a length word, then bytes
_ERROR_BYTES = 512
_INFO_BYTES = 1536


class _Text:
    """A text on the board behind a sequence word."""

    def __init__(self, segment: Segment, offset: int, room_bytes: int) -> None:
        self._words = segment.words
        self._bytes = segment.bytes
        self._sequence = offset // WORD_BYTES
        self._start = offset + 2 * WORD_BYTES
        self._room = room_bytes
        self._fence = threading.Lock()  # keeps text and sequence in order on ARM64, as in ring.py

    def write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")[: self._room]
        sequence = self._words[self._sequence]
        self._words[self._sequence] = sequence | 1
        with self._fence:
            pass
        self._bytes[self._start : self._start + len(data)] = data
        self._words[self._sequence + 1] = len(data)
        with self._fence:
            pass
        self._words[self._sequence] = (sequence | 1) + 1

    def read(self) -> str:
        before = self._words[self._sequence]
        with self._fence:
            pass
        length = min(self._words[self._sequence + 1], self._room)
        data = bytes(self._bytes[self._start : self._start + length])
        with self._fence:
            pass
        if before & 1 or self._words[self._sequence] != before:
            return ""
        return data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardSnapshot:
    """A reading of the board. Times are CLOCK_MONOTONIC nanoseconds; see `Word` for each field."""

    state: WorkerState
    heartbeat_ns: int
    progress_ns: int
    steps: int
    prefill_tokens: int
    running: int
    tokens_out: int
    decoder_pid: int
    decoder_incarnation: int
    capacity: int
    context: int
    load_percent: int
    violations: int
    stale: int
    parked: int
    stderr_lines: int
    stderr_dropped: int
    stops_resent: int
    kv_cells_used: int
    kv_cells: int
    nonfinite: int
    stalled: int
    turns: int
    decoder_deaths: int
    backoff_until_ns: int
    decoder_exit: int
    decoder_exit_kind: int
    replacements: int
    changes: int


class Board:
    """Words by name. The worker sets and adds; the server gets and takes snapshots."""

    def __init__(self, segment: Segment) -> None:
        self._words = segment.words
        self._first = segment.layout.board_offset // WORD_BYTES
        start = segment.layout.board_offset + _TEXT_WORDS * WORD_BYTES
        self.error = _Text(segment, start, _ERROR_BYTES)
        self.info = _Text(segment, start + 2 * WORD_BYTES + _ERROR_BYTES, _INFO_BYTES)

    def __repr__(self) -> str:
        return f"Board(state={self.state}, running={self.get(Word.RUNNING)}, decoder_pid={self.get(Word.DECODER_PID)})"

    def get(self, word: Word) -> int:
        return self._words[self._first + word]

    def set(self, word: Word, value: int) -> None:
        self._words[self._first + word] = value

    def add(self, word: Word, amount: int = 1) -> None:
        self._words[self._first + word] += amount

    @property
    def is_ready(self) -> bool:
        """Whether `state` is READY, without a look-up."""
        return self._words[self._first] == _READY

    @property
    def ready_capacity(self) -> int:
        """Turns that the decoder runs at once, 0 unless it is ready."""
        words, first = self._words, self._first
        return words[first + _CAPACITY] if words[first] == _READY else 0

    @property
    def state(self) -> WorkerState:
        return _STATES[min(self.get(Word.STATE), len(_STATES) - 1)]

    @state.setter
    def state(self, state: WorkerState) -> None:
        self.set(Word.STATE, _STATES.index(state))

    def snapshot(self) -> BoardSnapshot:
        values = self._words[self._first : self._first + len(Word)].tolist()
        fields = {word.name.lower(): values[word] for word in Word if word is not Word.STATE}
        return BoardSnapshot(state=_STATES[min(values[Word.STATE], len(_STATES) - 1)], **fields)
