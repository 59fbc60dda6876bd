"""Lines from a decoder, read strictly: a line that begins like an answer and isn't one is a ProtocolViolation.

`AnswerParser.parse` returns plain tuples `(kind, rid, a, b, extra)`, since it runs once per token:

    kind        a               b               extra
    TOKEN       token id        logprob | None  ((id, logprob), ...) | None
    RESUME      cached tokens   0               None
    PREFILL     tokens read     prompt tokens   (milliseconds, tokens per second)
    REUSED      tokens          0               None
    DONE        generated       prompt tokens   DoneFields
    ERROR       is fatal: bool  0               text
    EMBEDDING   float count     0               little-endian float32 bytes
    STAT, INFO  0               0               dict of the words
    IGNORED     0               0               None

rid is 0 in the solo dialect, and NO_REQUEST for what speaks of the decoder as a whole. "Fatal" errors are those after
which the engine is broken, and a DONE that follows must not be believed.

A token's text is looked up before it is converted: the two dictionaries hold only words that were found valid, and are
bounded, so a T line costs two look-ups and no conversion.
"""

import binascii
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

from native.dialect import Dialect, words_of
from native.lines import ProtocolViolation


class Kind(IntEnum):
    """What an answer says."""

    IGNORED = 0
    TOKEN = 1
    RESUME = 2
    PREFILL = 3
    REUSED = 4
    DONE = 5
    ERROR = 6
    EMBEDDING = 7
    STAT = 8
    INFO = 9


class DoneFinish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCEL = "cancel"
    NONFINITE = "nonfinite"


@dataclass(frozen=True, slots=True)
class DoneFields:
    """DONE's fields in their order. Counts in tokens (blobs for *_blobs), times in milliseconds, file_mb in 10^6 bytes.

    The first five are always there; later ones that a decoder leaves out are 0.
    """

    generated: int
    prompt_tokens: int
    prompt_ms: float
    decode_ms: float
    finish: DoneFinish
    drafts_accepted: int = 0
    drafts_offered: int = 0
    reused: int = 0
    hits: int = 0
    lookups: int = 0
    ram_blobs: int = 0
    file_blobs: int = 0
    file_mb: float = 0.0
    prompt_read: int = 0
    offloaded: int = 0


Answer = tuple[Kind, int, Any, Any, Any]

NO_REQUEST = -1
FATAL_ERRORS = (
    "verify: timed out at layer",
    "verify batch: timed out at layer",
    "verify: an earlier window never finished",
    "verify batch: an earlier window never finished",
)
LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have

_TOKEN = Kind.TOKEN
_IGNORED: Answer = (Kind.IGNORED, NO_REQUEST, 0, 0, None)
_NUMBER = re.compile(rb"-?[0-9]{1,30}(?:\.[0-9]{0,30})?(?:[eE][+-]?[0-9]{1,3})?")
_ODD_NUMBERS = frozenset((b"inf", b"-inf", b"nan", b"-nan"))  # what C prints for a rate over no time
_MAX_U32 = 2**32 - 1
_KNOWN_RIDS = 4096


class AnswerParser:
    """Reads the answers of one decoder. vocabulary: ids at or above it are violations; 0 when it isn't known."""

    def __init__(self, dialect: Dialect, vocabulary: int = 0) -> None:
        self._is_tagged = dialect is Dialect.TAGGED
        self._vocabulary = vocabulary or 2**31
        self._most_tokens = vocabulary or 262_144
        self._tokens: dict[bytes, int] = {}  # id as written -> id
        self._rids: dict[bytes, int] = {}  # b"#7" -> 7
        self._parsers: dict[bytes, Callable[[bytes, bytes, int], Answer]] = {
            b"T": self._token,
            b"RESUME": self._resume,
            b"PP": self._prefill,
            b"REUSED": self._reused,
            b"DONE": self._done,
            b"E": self._embedding,
        }

    def __repr__(self) -> str:
        return f"AnswerParser(dialect={'tagged' if self._is_tagged else 'solo'}, vocabulary={self._vocabulary})"

    def parse(self, line: bytes) -> Answer:
        """One line without its end. Raises ProtocolViolation."""
        if line[:2] == b"T ":
            words = line.split(b" ")
            if self._is_tagged:
                if len(words) == 3:
                    rid = self._rids.get(words[2])
                    token = self._tokens.get(words[1])
                    if rid is not None and token is not None:
                        return (_TOKEN, rid, token, None, None)
            elif len(words) == 2:
                token = self._tokens.get(words[1])
                if token is not None:
                    return (_TOKEN, 0, token, None, None)
        return self._parse_any(line)

    def _parse_any(self, line: bytes) -> Answer:
        word, _, rest = line.partition(b" ")
        parser = self._parsers.get(word)
        if parser is not None:
            if not self._is_tagged:
                return parser(rest, line, 0)
            rest, rid = self._split_tag(rest, line)
            if rid == NO_REQUEST:
                raise ProtocolViolation(line, "an answer without a request id")
            return parser(rest, line, rid)
        if word == b"ERR":
            return self._error(rest, line)
        if word == b"STAT":
            return (Kind.STAT, NO_REQUEST, 0, 0, words_of(rest))
        if word == b"INFO":
            return (Kind.INFO, NO_REQUEST, 0, 0, words_of(rest))
        return _IGNORED

    def _split_tag(self, rest: bytes, line: bytes) -> tuple[bytes, int]:
        """The fields and the request id: the last ` #` followed by digits only, to the end."""
        at = rest.rfind(b"#")
        if at < 0 or (at > 0 and rest[at - 1 : at] != b" "):
            return rest, NO_REQUEST
        tag = rest[at:]
        rid = self._rids.get(tag)
        if rid is None:
            if not tag[1:].isdigit():
                return rest, NO_REQUEST
            rid = _count(tag[1:], line, "request id")
            if len(self._rids) >= _KNOWN_RIDS:
                self._rids.clear()
            self._rids[tag] = rid
        return rest[: max(at - 1, 0)], rid

    def _id(self, word: bytes, line: bytes) -> int:
        token = self._tokens.get(word)
        if token is None:
            token = _count(word, line, "token id")
            if token >= self._vocabulary:
                raise ProtocolViolation(line, f"token id outside the vocabulary of {self._vocabulary}")
            if len(self._tokens) < self._most_tokens:
                self._tokens[word] = token
        return token

    def _token(self, rest: bytes, line: bytes, rid: int) -> Answer:
        words = rest.split(b" ")
        token = self._id(words[0], line)
        if len(words) == 1:
            return (_TOKEN, rid, token, None, None)
        if len(words) > 3:
            raise ProtocolViolation(line, "T has too many fields")
        logprob = _logprob(words[1], line)
        if len(words) == 2:
            return (_TOKEN, rid, token, logprob, ())
        return (_TOKEN, rid, token, logprob, self._alternatives(words[2], line))

    def _alternatives(self, text: bytes, line: bytes) -> tuple[tuple[int, float], ...]:
        pairs = (pair.split(b":") for pair in text.split(b","))
        try:
            return tuple([(self._id(token, line), _logprob(value, line)) for token, value in pairs])
        except ValueError:
            raise ProtocolViolation(line, "alternatives must be id:logprob pairs") from None

    def _resume(self, rest: bytes, line: bytes, rid: int) -> Answer:
        return (Kind.RESUME, rid, _count(rest, line, "RESUME"), 0, None)

    def _reused(self, rest: bytes, line: bytes, rid: int) -> Answer:
        return (Kind.REUSED, rid, _count(rest, line, "REUSED"), 0, None)

    def _prefill(self, rest: bytes, line: bytes, rid: int) -> Answer:
        words = rest.split()
        if len(words) < 2:
            raise ProtocolViolation(line, "PP needs a position and a total")
        position, total = _count(words[0], line, "PP"), _count(words[1], line, "PP")
        figures = [_figure(word, line, "PP") for word in words[2:4]] + [0.0, 0.0]
        return (Kind.PREFILL, rid, position, total, (figures[0], figures[1]))

    def _done(self, rest: bytes, line: bytes, rid: int) -> Answer:
        words = rest.split()
        if len(words) < 5:
            raise ProtocolViolation(line, "DONE needs five fields")
        values: list[Any] = [read(word, line, "DONE") for read, word in zip(_DONE_READERS, words, strict=False)]
        return (Kind.DONE, rid, values[0], values[1], DoneFields(*values))

    def _embedding(self, rest: bytes, line: bytes, rid: int) -> Answer:
        try:
            data = binascii.a2b_base64(rest, strict_mode=True)
        except binascii.Error as error:
            raise ProtocolViolation(line, f"E is no base64 ({error})") from None
        if not data or len(data) % 4:
            raise ProtocolViolation(line, "E holds no float32 values")
        return (Kind.EMBEDDING, rid, len(data) // 4, 0, data)

    def _error(self, rest: bytes, line: bytes) -> Answer:
        rid = 0
        if self._is_tagged:
            rest, rid = self._split_tag(rest, line)
        text = rest.decode("utf-8", "replace")
        return (Kind.ERROR, rid, text.startswith(FATAL_ERRORS), 0, text)


def _count(word: bytes, line: bytes, what: str) -> int:
    """A decimal u32. `bytes.isdigit` knows only ASCII digits: no sign, space or underscore passes."""
    if not word.isdigit() or len(word) > 10:
        raise ProtocolViolation(line, f"{what} must be a decimal number")
    value = int(word)
    if value > _MAX_U32:
        raise ProtocolViolation(line, f"{what} must fit 32 bits")
    return value


def _figure(word: bytes, line: bytes, what: str) -> float:
    """A time or a rate. What is infinite, not a number or negative is taken as 0: it is only told, never counted on."""
    if _NUMBER.fullmatch(word):
        value = float(word)
        return value if 0 <= value < 1e15 else 0.0
    if word in _ODD_NUMBERS:
        return 0.0
    raise ProtocolViolation(line, f"{what} needs a number")


def _finish(word: bytes, line: bytes, what: str) -> DoneFinish:
    finish = _FINISHES.get(word)
    if finish is None:
        raise ProtocolViolation(line, f"{what} has an unknown finish")
    return finish


def _logprob(word: bytes, line: bytes) -> float:
    """A natural log of a probability: at most 0, apart from rounding."""
    if _NUMBER.fullmatch(word):
        value = float(word)
        if value > 1e-3:
            raise ProtocolViolation(line, "a logprob must not be positive")
        return max(min(value, 0.0), LEAST_LOGPROB)
    if word == b"-inf":
        return LEAST_LOGPROB
    raise ProtocolViolation(line, "a logprob must be a number")


_FINISHES = {finish.encode(): finish for finish in DoneFinish}
_DONE_READERS: tuple[Callable[[bytes, bytes, str], Any], ...] = (
    *(_count, _count, _figure, _figure, _finish),
    *(_count, _count, _count, _count, _count, _count, _count),
    *(_figure, _count, _count),
)
