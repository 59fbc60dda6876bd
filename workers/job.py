"""A turn as the pool keeps it: what its caller does not see.

The caller holds a Turn and may drop it; the pool holds the Job until the turn has ended everywhere.
"""

import asyncio
from dataclasses import dataclass, field

from native.protocol import encode_ids
from workers.blame import Record
from workers.prefix import PrefixChain
from workers.turn import Turn


@dataclass(slots=True, eq=False)
class Job:
    """Bookkeeping of one turn over all the decoders it runs on. Times in microseconds, summed over them."""

    turn: Turn
    options: bytes
    chain: PrefixChain
    record: Record = field(default_factory=Record)
    runs: int = 0
    nonfinite: int = 0
    cached_tokens: int = 0
    unread: int = 0  # generated after the caller had cancelled, and delivered to nobody
    prompt_us: int = 0
    decode_us: int = 0
    drafts_accepted: int = 0
    drafts_offered: int = 0
    deadline: asyncio.TimerHandle | None = None
    _text: bytes = b""

    @property
    def is_suspect(self) -> bool:
        """Whether it must not share a decoder with another suspect (blame.py)."""
        return self.record.is_suspect(len(self.turn.ids))

    def prompt_text(self) -> list[bytes]:
        """What the decoder has to read, in pieces: the prompt, and on a continuation the tokens received so far."""
        if not self._text:
            self._text = encode_ids(self.turn.request.prompt)
        received = self.turn.ids
        return [self._text, b",", encode_ids(received)] if received else [self._text]

    def prompt_bytes(self) -> int:
        """Room that the prompt needs in a slot, continuation included."""
        return sum(map(len, self.prompt_text()))

    def forget_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
