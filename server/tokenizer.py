"""The model's own tokenizer, read from its GGUF: a vocabulary-only load of libllama, no weights, no GPU memory.

Threads: `encode` may run in any number of threads at once (llama_tokenize only reads the vocabulary; ctypes lets go of
the interpreter lock meanwhile). Everything else is data made at load.

What libllama can't be given: text that is no UTF-8 (a lone surrogate becomes U+FFFD, two that make a pair become their
character), text of 2 GiB (the server's body limit is far below), and, for most byte-pair vocabularies, a long run
without a space. Those are split by std::regex, which recurses for every character of a match, at 256 bytes of stack
each: 32 KB of one letter kill the process. Such a run is tokenised in parts of RUN_LIMIT bytes; the few tokens at their
seams may differ from libllama's, their text does not. NULs are ordinary characters.
"""

import ctypes
import re
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as libllama

from server.detokenizer import PieceTable

SHORT_TEXT = 2_000
SHORT_REGEX_TEXT = 500
"""Characters that are tokenised in less than a millisecond or so; see Tokenizer.is_short."""

RUN_LIMIT = 4_096
"""Bytes with or without ASCII space in a row that std::regex is given: 1 MiB of stack, of 2 or 8 that threads have."""

_LOG_ERROR = 4  # GGML_LOG_LEVEL_ERROR of ggml.h, for which the Python package has no name
_SPECIAL = libllama.LLAMA_TOKEN_ATTR_UNKNOWN | libllama.LLAMA_TOKEN_ATTR_CONTROL
_NO_TOKEN = -1
_STEP = 16_384  # ids made into Python objects at once: less than half a millisecond


class TokenizerError(Exception):
    """The file can't serve as a tokenizer. The message names the file, the cause and the remedy."""


@dataclass(slots=True, eq=False)
class TooManyTokens(Exception):
    """A text has more tokens than the caller has use for; none of them was made a Python object."""

    count: int


class _ErrorLog:
    """libllama's log: nothing is printed, the last errors are kept for the message of a failed load."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._callback = libllama.llama_log_callback(self._take)  # must live as long as libllama may call it

    def install(self) -> None:
        self.lines.clear()
        libllama.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _take(self, level: int, text: bytes, _: object) -> None:
        if level == _LOG_ERROR:
            self.lines = [*self.lines[-3:], text.decode("utf-8", "replace").strip()]

    def __str__(self) -> str:
        return "; ".join(self.lines)


_LOG = _ErrorLog()


class Tokenizer:
    """A GGUF's vocabulary. Token ids are 0 to `vocabulary` - 1.

    bos, eos: ids, or None where the model has none. eog: every id that ends a generation. adds_bos: `encode` begins
    with bos. metadata: the GGUF's scalar values as text. table: what a Detokenizer needs; special tokens are empty in
    it.
    """

    def __init__(self, model: Any, *, path: Path) -> None:
        """Takes over `model`, a libllama model with a vocabulary; use `load`."""
        self.path = path
        self._model = model
        self._vocab = libllama.llama_model_get_vocab(model)
        # Freed with the last reference, hence never under a running encode; not at exit, where threads may still run.
        weakref.finalize(self, libllama.llama_model_free, model).atexit = False
        self.vocabulary: int = libllama.llama_vocab_n_tokens(self._vocab)
        self.bos = _token_or_none(libllama.llama_vocab_bos(self._vocab))
        self.eos = _token_or_none(libllama.llama_vocab_eos(self._vocab))
        self.adds_bos = bool(libllama.llama_vocab_get_add_bos(self._vocab)) and self.bos is not None
        self._adds_eos = bool(libllama.llama_vocab_get_add_eos(self._vocab)) and self.eos is not None
        self._has_regex = libllama.llama_vocab_type(self._vocab) != libllama.LLAMA_VOCAB_TYPE_SPM
        self.eog = frozenset(
            token for token in range(self.vocabulary) if libllama.llama_vocab_is_eog(self._vocab, token)
        )
        self.metadata = dict(_metadata(model))
        self.context_train = self._context_train()
        template: bytes | None = libllama.llama_model_chat_template(model, None)
        self.chat_template = template.decode("utf-8", "replace") if template is not None else None
        self.model_name = self.metadata.get("general.name") or path.stem
        self._specials = self._special_pieces()
        self.table = PieceTable(self._plain_pieces())

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read the vocabulary of a GGUF (0.05 to 1 s). Raises TokenizerError."""
        path = Path(path)
        if not path.is_file():
            raise TokenizerError(f"{path} is not a file. Give the path of a GGUF file as model or tokenizer.")
        _LOG.install()
        model = libllama.llama_model_load_from_file(str(path).encode(errors="surrogateescape"), _vocabulary_only())
        if not model:
            raise TokenizerError(f"{path} can't be read as a GGUF ({_LOG}). Check that it was downloaded completely.")
        if libllama.llama_vocab_type(libllama.llama_model_get_vocab(model)) == libllama.LLAMA_VOCAB_TYPE_NONE:
            libllama.llama_model_free(model)
            raise TokenizerError(f"{path} has no vocabulary. Give the model's own GGUF, or another with its tokenizer.")
        return cls(model, path=path)

    def __repr__(self) -> str:
        return f"Tokenizer({self.model_name!r}, vocabulary={self.vocabulary}, bos={self.bos}, eos={self.eos})"

    def is_short(self, text: str) -> bool:
        """Whether `encode` of it may run on the event loop.

        Measured on one busy core, in English, Chinese and noise: gemma's 262,144 tokens take at most 0.35 us per
        character, byte-pair vocabularies without std::regex 0.35 us, those with it (gpt-4o, tekken, deepseek) up to 1.5
        us.
        """
        return len(text) <= (SHORT_REGEX_TEXT if self._has_regex else SHORT_TEXT)

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, limit: int | None = None
    ) -> list[int]:
        """Ids of any text. Raises TooManyTokens if they are more than `limit`.

        add_special: with bos (and eos) where the model wants them. parse_special: text such as `<s>` becomes the
        special token rather than its characters.
        """
        steps = self.encode_in_steps(text, add_special=add_special, parse_special=parse_special, limit=limit)
        return list(chain.from_iterable(steps))

    def encode_in_steps(
        self, text: str, *, add_special: bool, parse_special: bool, limit: int | None = None
    ) -> Iterator[list[int]]:
        """As `encode`, a few thousand ids at a time: between them other threads get the interpreter."""
        data = _utf8(text)
        parts = self._parts(data) if self._has_regex and len(data) > RUN_LIMIT else [data]
        if len(parts) == 1:
            arrays = [self._encode(data, add_special, parse_special)]
        else:
            specials = self._encode(b"", add_special, parse_special)
            begin = len(specials) - (1 if len(specials) and self._adds_eos else 0)
            inner = [self._encode(part, False, parse_special) for part in parts]
            arrays = [specials[:begin], *inner, specials[begin:]]
        count = sum(map(len, arrays))
        if limit is not None and count > limit:
            raise TooManyTokens(count)
        for array in arrays:
            for start in range(0, len(array), _STEP):
                yield array[start : start + _STEP].tolist()

    def _encode(self, data: bytes, add_special: bool, parse_special: bool) -> npt.NDArray[np.int32]:
        size = len(data) + 8  # a token has at least one byte
        tokens = np.empty(size, np.int32)
        place = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        count: int = libllama.llama_tokenize(self._vocab, data, len(data), place, size, add_special, parse_special)
        return tokens[: max(0, count)]

    def _parts(self, data: bytes) -> list[bytes]:
        """`data` cut wherever a run exceeds RUN_LIMIT, but in no character and in no special token's text."""
        parts, start = [], 0
        for seam in _seams(data):
            while data[seam] & 0xC0 == 0x80:
                seam -= 1
            for match in self._special_texts.finditer(data, max(start, seam - 256), seam + 256):
                if match.start() < seam < match.end():
                    seam = match.start()
            if seam > start:
                parts.append(data[start:seam])
                start = seam
        return [*parts, data[start:]]

    @cached_property
    def _special_texts(self) -> re.Pattern[bytes]:
        """Finds the tokens that libllama takes out of a text before it splits the rest."""
        attributes, text = libllama.llama_vocab_get_attr, libllama.llama_vocab_get_text
        marked = _SPECIAL | libllama.LLAMA_TOKEN_ATTR_USER_DEFINED
        texts = {text(self._vocab, t) for t in range(self.vocabulary) if attributes(self._vocab, t) & marked} - {b""}
        return re.compile(b"|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or b"(?!)")

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of one token; special tokens and ends of generation are empty unless `special`. Any int is accepted."""
        if special and token in self._specials:
            return self._specials[token]
        return self.table[token]

    def decode(self, ids: Iterable[int], *, special: bool = True) -> str:
        """Text of these ids at once, special tokens included, as llama-server's /detokenize has it."""
        return b"".join(self.piece(token, special=special) for token in ids).decode("utf-8", "replace")

    def _context_train(self) -> int:
        """The context the model was trained for, 0 if unknown. (llama_model_n_ctx_train is 0 without weights.)"""
        text = self.metadata.get(f"{self.metadata.get('general.architecture')}.context_length", "0")
        return int(text) if text.isdecimal() else 0

    def _special_pieces(self) -> dict[int, bytes]:
        """Bytes of those tokens that show no text in an output."""
        attributes, vocab = libllama.llama_vocab_get_attr, self._vocab
        specials = {token for token in range(self.vocabulary) if attributes(vocab, token) & _SPECIAL} | self.eog
        render = _Renderer(vocab)
        return {token: render(token) for token in sorted(specials)}

    def _plain_pieces(self) -> list[bytes]:
        render = _Renderer(self._vocab)
        return [b"" if token in self._specials else render(token) for token in range(self.vocabulary)]


class _Renderer:
    """llama_token_to_piece with one buffer for many calls."""

    def __init__(self, vocab: Any) -> None:
        self._vocab = vocab
        self._buffer = ctypes.create_string_buffer(256)

    def __call__(self, token: int) -> bytes:
        buffer = self._buffer
        size = libllama.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        if size < 0:
            self._buffer = ctypes.create_string_buffer(-size)
            return self(token)
        return buffer.raw[:size]


def _vocabulary_only() -> Any:
    """Parameters of the load. The empty device list keeps libllama from asking GPUs for their memory, which would
    create a context on each."""
    parameters = libllama.llama_model_default_params()
    parameters.vocab_only = True
    parameters.devices = ctypes.cast((ctypes.c_void_p * 1)(None), ctypes.c_void_p)
    return parameters


def _token_or_none(token: int) -> int | None:
    return None if token == _NO_TOKEN else token


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def _seams(data: bytes) -> Iterator[int]:
    """Places at which to cut the runs of ASCII space, and of everything else, that are longer than RUN_LIMIT bytes."""
    values = np.frombuffer(data, np.uint8)
    is_space = (values == 0x20) | ((values >= 0x09) & (values <= 0x0D))
    borders = np.concatenate(([0], np.flatnonzero(is_space[1:] != is_space[:-1]) + 1, [len(data)]))
    for run in np.flatnonzero(np.diff(borders) > RUN_LIMIT):
        yield from range(int(borders[run]) + RUN_LIMIT, int(borders[run + 1]), RUN_LIMIT)


def _metadata(model: Any) -> Iterable[tuple[str, str]]:
    for index in range(libllama.llama_model_meta_count(model)):
        key = _text_of(libllama.llama_model_meta_key_by_index, model, index)
        yield key, _text_of(libllama.llama_model_meta_val_str_by_index, model, index)


def _text_of(reader: Any, model: Any, index: int, size: int = 1024) -> str:
    """A string that libllama copies out, telling its length."""
    buffer = ctypes.create_string_buffer(size)
    length: int = reader(model, index, buffer, size)
    if length >= size:
        return _text_of(reader, model, index, length + 1)
    return buffer.value.decode("utf-8", "replace")
