"""What a configuration key may hold: how a value is read from TOML (typed) or from text (option, environment).

Each kind is a parser from a raw value to the typed one. It raises BadValue with the remedy; the key and the place the
value came from are added by config.py.
"""

import re
import shlex
from collections.abc import Callable
from dataclasses import field
from typing import Any

Parser = Callable[[object], Any]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


class BadValue(Exception):
    """A value that a key can't hold; the text says what it can."""


def key(parser: Parser, default: object, help: str, *, metavar: str = "TEXT", secret: bool = False) -> Any:
    """A dataclass field that is a configuration key."""
    return field(default=default, metadata={"parser": parser, "help": help, "metavar": metavar, "secret": secret})


def text(raw: object) -> str:
    if not isinstance(raw, str):
        raise BadValue("give a text in quotes")
    return raw


def boolean(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    word = raw.lower() if isinstance(raw, str) else ""
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise BadValue("give true or false")


def integer(minimum: int, maximum: int) -> Parser:
    """Whole numbers within both bounds."""

    def parse(raw: object) -> int:
        value = _whole(raw)
        if value is None or not minimum <= value <= maximum:
            raise BadValue(f"give a whole number from {minimum} to {maximum}")
        return value

    return parse


def seconds(minimum: float) -> Parser:
    """A time in seconds, from `minimum` to ten days."""

    def parse(raw: object) -> float:
        try:
            value = float(raw) if isinstance(raw, int | float | str) and not isinstance(raw, bool) else -1.0
        except ValueError:
            value = -1.0
        if not minimum <= value <= 864_000:
            raise BadValue(f"give a number of seconds from {minimum:g} to 864000")
        return value

    return parse


def size(raw: object) -> int:
    """Bytes, as a number or with a unit: 33554432, "32MiB", "2 GB" (units are powers of 1024)."""
    if isinstance(raw, int) and not isinstance(raw, bool) and raw >= 0:
        return raw
    match = _SIZE.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if match is None:
        raise BadValue('give bytes, such as 33554432, "32MiB" or "2GiB"')
    return int(float(match[1]) * 1024 ** _POWERS[match[2].lower()])


def choice(*words: str) -> Parser:
    def parse(raw: object) -> str:
        if not isinstance(raw, str) or raw not in words:
            raise BadValue("give one of " + ", ".join(words))
        return raw

    return parse


def names(raw: object) -> tuple[str, ...]:
    """A text, texts separated by commas, or a list of texts."""
    if isinstance(raw, str):
        return tuple(part.strip() for part in raw.split(",") if part.strip())
    if isinstance(raw, list) and all(isinstance(item, str) and item for item in raw):
        return tuple(raw)
    raise BadValue("give a text, or a list of texts")


def secrets(raw: object) -> tuple[str, ...]:
    """Keys: at least 8 characters each, no spaces, so that a header can carry them."""
    keys = names(raw)
    if not keys or any(len(item) < 8 or not item.isascii() or not item.isprintable() or " " in item for item in keys):
        raise BadValue("give one or more keys of at least 8 printable ASCII characters without spaces")
    return keys


def command(raw: object) -> tuple[str, ...]:
    """A command line, split as a shell splits words (nothing is expanded), or a list of words."""
    if isinstance(raw, list) and all(isinstance(word, str) for word in raw):
        return tuple(raw)
    if not isinstance(raw, str):
        raise BadValue('give a command, such as "strata --serve --model x", or a list of its words')
    try:
        return tuple(shlex.split(raw))
    except ValueError:
        raise BadValue("close the quotes of the command") from None


def workers(raw: object) -> int:
    """ "auto" (0) or a count."""
    if raw == "auto":
        return 0
    value = _whole(raw)
    if value is None or not 1 <= value <= 64:
        raise BadValue('give "auto" or a whole number from 1 to 64')
    return value


def gpus(raw: object) -> tuple[str, ...] | None:
    """ "auto" (None), "none" (empty), or the positions of devices as `ringfence check` lists them."""
    if raw == "auto":
        return None
    if raw == "none":
        return ()
    items = raw.split(",") if isinstance(raw, str) else raw
    if isinstance(items, list):
        words = [str(item).strip() for item in items if not isinstance(item, bool)]
        if len(words) == len(items) and all(word.isdecimal() for word in words) and len(set(words)) == len(words):
            return tuple(words)
    raise BadValue('give "auto", "none", or a list of device numbers such as [0, 1]; `ringfence check` lists devices')


def _whole(raw: object) -> int | None:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and re.fullmatch(r"-?\d{1,18}", raw.strip()):
        return int(raw)
    return None
