"""What a client received, held against what it should have. Pure.

A token that fits where it came is right. Where one does not fit, the run of tokens that follows is looked for in the
expected answer: found later, the tokens between are lost; found earlier, they came twice; found nowhere, the token is
foreign.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

RUN = 4
"""Tokens that must fit again before a place counts as found."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Tokens that went wrong on the way. All zero: what came is what was due."""

    lost: int = 0
    duplicated: int = 0
    foreign: int = 0

    def __bool__(self) -> bool:
        return bool(self.lost or self.duplicated or self.foreign)

    def __add__(self, other: Difference) -> Difference:
        return Difference(self.lost + other.lost, self.duplicated + other.duplicated, self.foreign + other.foreign)


def compare(received: Sequence[Hashable], expected: Sequence[Hashable]) -> Difference:
    """Count what is lost, duplicated and foreign in a whole answer."""
    if list(received) == list(expected):
        return Difference()
    lost = duplicated = foreign = place = 0
    for index, token in enumerate(received):
        if place >= len(expected) or token != expected[place]:
            found = _find(list(received[index : index + RUN]), list(expected), place)
            if found is None:
                foreign += 1
                place += 1
                continue
            lost += max(found - place, 0)
            duplicated += max(place - found, 0)
            place = found
        place += 1
    return Difference(lost + max(len(expected) - place, 0), duplicated, foreign)


def first_difference(received: Sequence[Hashable], expected: Sequence[Hashable]) -> int | None:
    """The first place where two answers differ, None when one begins with the other."""
    return next(
        (place for place, (left, right) in enumerate(zip(received, expected, strict=False)) if left != right), None
    )


def _find(run: list[Hashable], expected: list[Hashable], near: int) -> int | None:
    """The place nearest to `near` where the run occurs."""
    places = [place for place in range(len(expected)) if expected[place : place + len(run)] == run]
    return min(places, key=lambda place: abs(place - near), default=None)
