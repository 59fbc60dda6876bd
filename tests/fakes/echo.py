"""What the scripted decoder answers by default: a long function of the prompt, so that a foreign token is visible.

    token i of a prompt = echo_token(marker, i)

A prompt made by `echo_prompt` carries its marker, its own length and, if wanted, orders to the decoder, in ids that
every vocabulary has; it stays recognisable when earlier output was appended to it, with or without `resume=R`:

    5 4 5  m m m  l l l   [5 3 c v v v]*   filler ...        digits in base 64, ids 6 to 69

    m  marker (below 262144)        l  length of the whole prompt
    c  which of ORDERS, v its value

Any other prompt has the checksum of its ids as marker, and its output goes on from `resume=R`. Ids 3, 4 and 5 are
therefore reserved: a test's own prompts should not contain `5 4 5` or `5 3`.
"""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

ORDERS = (
    "crash_at",  # these count output tokens, from 0: what happens in place of that token
    "hang_at",
    "spin_at",
    "stall_at",
    "error_at",
    "nonfinite_at",
    "eos_at",
    "half_line_at",
    "token_delay_ms",
    "prefill_ms",
    "prefill_every_ms",
    "stop_delay_ms",
    "ignore_stop",
    "fresh_only",  # 1: the orders are for a turn that begins, not for one that goes on
)

_HEAD = (5, 4, 5)
_ORDER = (5, 3)
_DIGIT = 6
_PREFIX = len(_HEAD) + 6
_ORDER_LENGTH = len(_ORDER) + 4


class Echo(NamedTuple):
    """What a prompt asks for. position: index of the first token to send. orders: see ORDERS."""

    marker: int
    position: int
    orders: dict[str, int]


def echo_token(marker: int, index: int, *, base: int = 1000, span: int = 30_000) -> int:
    """Output token `index` of the prompt with this marker: base <= id < base + span."""
    mixed = (marker * 0x9E3779B1 + index) & 0xFFFFFFFF
    mixed ^= mixed >> 15
    mixed = mixed * 0x85EBCA6B & 0xFFFFFFFF
    mixed ^= mixed >> 13
    return base + mixed % span


def echo_prompt(marker: int, length: int = 0, **orders: int) -> list[int]:
    """A prompt of `length` tokens (at least what marker and orders need) with this marker."""
    commands = [id for name, value in orders.items() for id in (*_ORDER, _DIGIT + ORDERS.index(name), *_digits(value))]
    length = max(length, _PREFIX + len(commands))
    filler = [_DIGIT + (marker + index) % 64 for index in range(length - _PREFIX - len(commands))]
    return [*_HEAD, *_digits(marker), *_digits(length), *commands, *filler]


def read_prompt(prompt: Sequence[int], resume: int = 0) -> Echo:
    """What the decoder sees in a prompt; a first id before an echo prompt (a BOS) is skipped."""
    for start in (0, 1):
        if tuple(prompt[start : start + 3]) == _HEAD and len(prompt) >= start + _PREFIX:
            marker = _number(prompt[start + 3 : start + 6])
            length = _number(prompt[start + 6 : start + 9])
            return Echo(marker, max(len(prompt) - start - length, 0), _orders(prompt, start + _PREFIX))
    own = prompt[: len(prompt) - resume]
    return Echo(zlib.crc32(",".join(map(str, own)).encode()) & 0x3FFFF, resume, {})


def expected(prompt: Sequence[int], max_new: int, *, base: int = 1000, span: int = 30_000) -> list[int]:
    """The whole output for a prompt, whatever happens to decoders on the way. (An `eos_at` order cuts it; no EOS.)"""
    echo = read_prompt(prompt)
    until = min(echo.position + max_new, echo.orders.get("eos_at", 1 << 60))
    return [echo_token(echo.marker, index, base=base, span=span) for index in range(echo.position, until)]


def _digits(value: int) -> list[int]:
    if not 0 <= value < 64**3:
        raise ValueError(f"markers, lengths and order values are 0 to {64**3 - 1}, not {value}")
    return [_DIGIT + (value >> 12), _DIGIT + (value >> 6 & 63), _DIGIT + (value & 63)]


def _number(digits: Sequence[int]) -> int:
    high, middle, low = digits
    return (high - _DIGIT) << 12 | (middle - _DIGIT) << 6 | (low - _DIGIT)


def _orders(prompt: Sequence[int], at: int) -> dict[str, int]:
    orders = {}
    while tuple(prompt[at : at + 2]) == _ORDER and len(prompt) >= at + _ORDER_LENGTH:
        orders[ORDERS[prompt[at + 2] - _DIGIT]] = _number(prompt[at + 3 : at + 6])
        at += _ORDER_LENGTH
    return orders
