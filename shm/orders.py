"""What the server wants of a worker as a whole: two words, written by the server alone.

They are levels and not messages: the worker compares them with what it has done each time its doorbell rings, so an order
can neither be lost nor carried out twice.

    wanted        RUN (have a decoder), UNLOAD (have none, keep waiting), STOP (end the decoder, then yourself)
    replacements  a count; when it grows the worker replaces its decoder once
"""

from enum import IntEnum

from shm.layout import WORD_BYTES
from shm.segment import Segment


class Wanted(IntEnum):
    RUN = 0
    UNLOAD = 1
    STOP = 2


class Orders:
    """Both ends: the server assigns `wanted` and calls `replace_decoder`, the worker reads."""

    def __init__(self, segment: Segment) -> None:
        self._words = segment.words
        self._at = segment.layout.orders_offset // WORD_BYTES

    def __repr__(self) -> str:
        return f"Orders(wanted={self.wanted.name}, replacements={self.replacements})"

    @property
    def wanted(self) -> Wanted:
        return Wanted(self._words[self._at])

    @wanted.setter
    def wanted(self, wanted: Wanted) -> None:
        self._words[self._at] = wanted

    @property
    def is_run(self) -> bool:
        """Whether a decoder is wanted, without making an enumeration's member of the word."""
        return self._words[self._at] == 0

    @property
    def replacements(self) -> int:
        return self._words[self._at + 1]

    def replace_decoder(self) -> None:
        self._words[self._at + 1] += 1
