"""Request slots: where a request waits for its worker, and where its own result is written.

    control words of all slots, together, so that the worker sees what is new in one copy
        generation[slot]   server: the lease that holds the slot; stored last, it publishes the request
        cancelled[slot]    server: the generation to stop, or 0
    per slot
        words 0..15   request  (server, before the generation): kind, lengths, max_new, resume
        words 16..31  result   (worker, before the END record): finish, counts, times, the generation it belongs to
        error text    worker, 512 bytes
        options       server, encoded by whoever knows them (native/sampling.py); opaque here
        prompt        server, the ids as decimal text, comma separated, as the decoder will read them

Invariants
- The server owns the free list, so a slot is the permit to run. A generation is used once in a segment's life and grows.
- The worker never writes a request and the server never writes a result. Results carry their generation; a reader that
  finds another one drops and counts it.
- The server reuses a slot only after the END record of its last generation, or in a new segment.

Prompts are text and not int32 because the only reader is the decoder's pipe: the server encodes once, in one C call, and
the worker hands the bytes from here to writev without touching them (4,097 ids: 28 us instead of 80 for a copy of int32
turned into text by the worker; docs/architecture.md).
"""

import threading
from enum import IntEnum
from typing import NamedTuple

from shm.layout import ERROR_BYTES, SLOT_WORDS, WORD_BYTES
from shm.segment import Segment

_RESULT = 16  # first result word


class Finish(IntEnum):
    """How a turn ended, as stored in the result and in the END record."""

    STOP = 1
    LENGTH = 2
    CANCEL = 3
    NONFINITE = 4
    REFUSED = 5  # the decoder answered ERR: this request's own fault or a limit
    BROKEN = 6  # the decoder said that it is broken, or died: the request may go on elsewhere
    STALLED = 7  # the server did not take its tokens in time
    REJECTED = 8  # the worker could not take it (not ready, no capacity): nothing was sent to the decoder
    KILLED = 9  # the decoder was killed or stopped from outside: as BROKEN, and the request bears no blame
    ENGINE = 10  # the decoder answered ERR for a reason of its own (a device error): not the request's fault


_FINISHES = frozenset(Finish)


class SlotRequest(NamedTuple):
    """A request as the worker reads it. `prompt` is a view into the segment; release it before the slot ends."""

    slot: int
    generation: int
    kind: int
    prompt: memoryview
    prompt_tokens: int
    max_new: int
    resume: int
    options: bytes


class SlotResult(NamedTuple):
    """What one turn cost. Counts in tokens, times in microseconds."""

    finish: Finish
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated: int = 0
    prompt_us: int = 0
    decode_us: int = 0
    drafts_accepted: int = 0
    drafts_offered: int = 0
    taken_ns: int = 0  # CLOCK_MONOTONIC when the worker wrote the request to its decoder
    error: str = ""


class _Table:
    def __init__(self, segment: Segment) -> None:
        layout = segment.layout
        self._layout = layout
        self._words = segment.words
        self._bytes = segment.bytes
        self.count = layout.slots
        self._generations = layout.generations_offset // WORD_BYTES
        self._cancels = layout.cancels_offset // WORD_BYTES
        starts = [layout.slot_offset(slot) for slot in range(layout.slots)]  # places are computed once: these are hot
        self._slot_words = [start // WORD_BYTES for start in starts]
        self._errors = [start + SLOT_WORDS * WORD_BYTES for start in starts]
        self._options = [start + ERROR_BYTES for start in self._errors]
        self._prompts = [start + layout.options_bytes for start in self._options]
        self._prompt_room = layout.prompt_bytes
        self._options_room = layout.options_bytes


class SlotLessor(_Table):
    """The server's end: publishes requests, cancels them, reads results."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment)
        self._last_generation = 0
        self._fence = threading.Lock()  # orders the request before its generation on ARM64, as in ring.py

    def __repr__(self) -> str:
        return f"SlotLessor(slots={self.count}, last_generation={self._last_generation})"

    def fits(self, *, prompt_bytes: int, options_bytes: int) -> bool:
        """Whether a request of these sizes has room in a slot."""
        return prompt_bytes <= self._prompt_room and options_bytes <= self._options_room

    def publish(
        self,
        slot: int,
        *,
        kind: int,
        prompt: list[bytes],
        prompt_tokens: int,
        max_new: int,
        resume: int,
        options: bytes,
    ) -> int:
        """Write a request into a slot that the caller holds free, and return its generation (1 to 2**32-1).

        `prompt` is the text in pieces, written one after another. The doorbell is the caller's to ring.
        Raises ValueError when the request has no room (`fits`), before anything is written.
        """
        prompt_bytes = sum(map(len, prompt))
        if not self.fits(prompt_bytes=prompt_bytes, options_bytes=len(options)):
            raise ValueError(
                f"a request of {prompt_bytes} prompt bytes and {len(options)} option bytes has no room in a slot"
            )
        at = self._prompts[slot]
        for piece in prompt:
            self._bytes[at : at + len(piece)] = piece
            at += len(piece)
        start = self._options[slot]
        self._bytes[start : start + len(options)] = options
        words, first = self._words, self._slot_words[slot]
        words[first] = kind
        words[first + 1] = prompt_bytes
        words[first + 2] = prompt_tokens
        words[first + 3] = max_new
        words[first + 4] = resume
        words[first + 5] = len(options)
        self._last_generation += 1
        with self._fence:
            pass
        words[self._generations + slot] = self._last_generation
        return self._last_generation

    def cancel(self, slot: int, generation: int) -> None:
        """Ask the worker to stop this generation; harmless when it has ended, since generations are used once."""
        self._words[self._cancels + slot] = generation

    def result(self, slot: int, generation: int) -> SlotResult | None:
        """The result of this generation; None when the slot holds another one's, or none that a worker may write."""
        first = self._slot_words[slot] + _RESULT
        values = self._words[first : first + 16].tolist()
        if values[0] != generation or values[1] not in _FINISHES:
            return None
        start = self._errors[slot]
        error = bytes(self._bytes[start : start + min(values[10], ERROR_BYTES)]).decode("utf-8", "replace")
        return SlotResult(
            finish=Finish(values[1]),
            prompt_tokens=values[2],
            cached_tokens=values[3],
            generated=values[4],
            prompt_us=values[5],
            decode_us=values[6],
            drafts_accepted=values[7],
            drafts_offered=values[8],
            taken_ns=values[9],
            error=error,
        )

    def payload(self, slot: int, size_bytes: int) -> bytes:
        """What the worker left in the prompt's place (embeddings: little-endian float32); never more than that place."""
        start = self._prompts[slot]
        return bytes(self._bytes[start : start + min(size_bytes, self._prompt_room)])


class SlotHolder(_Table):
    """The worker's end: finds new requests and cancellations, reads requests, writes results."""

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment)
        self._seen = [0] * self.count
        self._fence = threading.Lock()  # the other half of the lessor's

    def __repr__(self) -> str:
        return f"SlotHolder(slots={self.count}, seen={self._seen})"

    def arrivals(self) -> list[tuple[int, int]]:
        """(slot, generation) of every request published since the last call."""
        now = self._words[self._generations : self._generations + self.count].tolist()
        if now == self._seen:
            return []
        new = [(slot, now[slot]) for slot in range(self.count) if now[slot] != self._seen[slot]]
        self._seen = now
        with self._fence:
            pass
        new.sort(key=lambda arrival: arrival[1])  # in the order the server published them
        return new

    def cancelled(self) -> list[int]:
        """For each slot the generation that the server wants stopped, or 0."""
        return self._words[self._cancels : self._cancels + self.count].tolist()

    def read(self, slot: int, generation: int) -> SlotRequest:
        """The request of an arrival. The prompt stays where it is: a view of ASCII text."""
        first = self._slot_words[slot]
        kind, prompt_bytes, prompt_tokens, max_new, resume, options_bytes = self._words[first : first + 6].tolist()
        start = self._prompts[slot]
        options = self._options[slot]
        return SlotRequest(
            slot=slot,
            generation=generation,
            kind=kind,
            prompt=self._bytes[start : start + prompt_bytes],
            prompt_tokens=prompt_tokens,
            max_new=max_new,
            resume=resume,
            options=bytes(self._bytes[options : options + options_bytes]),
        )

    def write_result(self, slot: int, generation: int, result: SlotResult) -> None:
        """Store a turn's result; the caller pushes and publishes the END record after it."""
        error = result.error.encode("utf-8", "replace")[:ERROR_BYTES]
        start = self._errors[slot]
        self._bytes[start : start + len(error)] = error
        words, first = self._words, self._slot_words[slot] + _RESULT
        words[first + 1] = result.finish
        words[first + 2] = result.prompt_tokens
        words[first + 3] = result.cached_tokens
        words[first + 4] = result.generated
        words[first + 5] = result.prompt_us
        words[first + 6] = result.decode_us
        words[first + 7] = result.drafts_accepted
        words[first + 8] = result.drafts_offered
        words[first + 9] = result.taken_ns
        words[first + 10] = len(error)
        words[first] = generation

    def write_payload(self, slot: int, payload: bytes) -> bool:
        """Leave bytes for the server in the prompt's place; False when there is no room."""
        if len(payload) > self._prompt_room:
            return False
        start = self._prompts[slot]
        self._bytes[start : start + len(payload)] = payload
        return True
