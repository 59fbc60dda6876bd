"""What a decoder says of itself at its start (INFO and READY lines), and the dialect that follows from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from native.lines import ProtocolViolation


class Dialect(StrEnum):
    """How a decoder takes requests: one at a time, many by request id, or by batch slot."""

    SOLO = "solo"
    TAGGED = "tagged"
    BATCH = "batch"


class UnsupportedDialect(Exception):
    """The decoder speaks a dialect that this version doesn't; the message says what to do."""


def words_of(text: bytes) -> dict[str, str]:
    """`key=value` words, each split at its first `=`; a word without one has an empty value."""
    pairs = (word.partition("=") for word in text.decode("utf-8", "replace").split())
    return {key: value for key, _, value in pairs}


@dataclass(frozen=True, slots=True)
class Info:
    """Everything the INFO lines said so far. Unknown keys are kept in `values`; an absent or odd number is 0."""

    values: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def add(self, line: bytes) -> "Info":
        """This and another INFO line; later values win. Raises ProtocolViolation for a line that is no INFO."""
        if line[:5] != b"INFO " and line != b"INFO":
            raise ProtocolViolation(line, "not an INFO line")
        return self.merged(words_of(line[5:]))

    def merged(self, values: Mapping[str, str]) -> "Info":
        return Info(MappingProxyType({**self.values, **values}))

    def number(self, key: str) -> int:
        text = self.values.get(key, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else 0

    @property
    def vocabulary(self) -> int:
        """Tokens in the vocabulary, 0 when the decoder has not said."""
        return self.number("vocab")

    @property
    def model(self) -> str:
        return self.values.get("model", "")

    @property
    def backend(self) -> str:
        return self.values.get("backend", "")

    @property
    def engine(self) -> str:
        return self.values.get("engine", "")

    @property
    def kv_cells(self) -> int:
        return self.number("kv_cells")

    @property
    def batch_slots(self) -> int:
        return self.number("batch_slots")

    @property
    def load_percent(self) -> int:
        """How far loading is, 0 to 100."""
        return min(self.number("load"), 100)

    @property
    def logprobs(self) -> int:
        """Alternatives per token that can be asked for; 0: no logprobs at all."""
        return self.number("logprobs")

    @property
    def grammar(self) -> bool:
        return self.values.get("grammar") == "1"

    @property
    def logit_bias(self) -> bool:
        return self.values.get("logit_bias") == "1"

    @property
    def embeddings(self) -> bool:
        return self.values.get("embeddings") == "1"

    @property
    def resume(self) -> bool:
        return self.values.get("resume") == "1"


@dataclass(frozen=True, slots=True)
class Ready:
    """A READY line. context: tokens. slots: requests at once, None when the decoder has no tags."""

    context: int
    flags: frozenset[str]
    slots: int | None = None

    @property
    def capacity(self) -> int:
        """Requests that run at once."""
        return self.slots or 1


def is_ready(line: bytes) -> bool:
    """Whether this is a READY line (a bad one included)."""
    return line[:6] == b"READY " or line == b"READY"


def parse_ready(line: bytes) -> Ready:
    """A READY line: `READY <context> stop [slots=N]`. Raises ProtocolViolation for anything else."""
    words = line.split()
    if not is_ready(line) or len(words) < 2:
        raise ProtocolViolation(line, "READY needs a context")
    context = _positive(words[1], line, "READY's context")
    slots = None
    flags = set()
    for word in words[2:]:
        if word.startswith(b"slots="):
            slots = _positive(word[6:], line, "READY's slots")
        else:
            flags.add(word.decode("utf-8", "replace"))
    return Ready(context, frozenset(flags), slots)


def choose_dialect(info: Info, ready: Ready) -> Dialect:
    """Solo or tagged. Raises UnsupportedDialect for batch slots, and for a decoder that cannot be stopped."""
    if "stop" not in ready.flags:
        raise UnsupportedDialect("the decoder's READY line has no `stop`; a request could not be cancelled.")
    if ready.slots is not None:
        return Dialect.TAGGED
    if info.batch_slots >= 2:
        raise UnsupportedDialect(
            "the batch dialect isn't spoken by this version; start strata without batch slots "
            f"(it announced batch_slots={info.batch_slots})."
        )
    return Dialect.SOLO


def _positive(word: bytes, line: bytes, what: str) -> int:
    if not word.isdigit() or len(word) > 10 or not 1 <= int(word) < 2**31:
        raise ProtocolViolation(line, f"{what} must be a positive number")
    return int(word)
