"""The model's own tokenizer, read from its GGUF: a vocabulary-only load of libllama, no weights, no GPU memory.

Threads: `encode` may run in any number of threads at once (llama_tokenize only reads the vocabulary; ctypes lets go of
the interpreter lock meanwhile). Everything else is data made at load.

What libllama can't be given: text that is no UTF-8 (a lone surrogate becomes U+FFFD, two that make a pair become their
character) and text of 2 GiB (the server's body limit is far below). NULs are ordinary characters.
"""

import ctypes
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as libllama

from server.detokenizer import PieceTable

SHORT_TEXT = 2_000
"""Characters that are tokenised in less than a millisecond; see Tokenizer.is_short."""

_SPECIAL = libllama.LLAMA_TOKEN_ATTR_UNKNOWN | libllama.LLAMA_TOKEN_ATTR_CONTROL
_NO_TOKEN = -1


class TokenizerError(Exception):
    """The file can't serve as a tokenizer. The message names the file, the cause and the remedy."""


class _ErrorLog:
    """libllama's log: nothing is printed, the last errors are kept for the message of a failed load."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._callback = libllama.llama_log_callback(self._take)  # must live as long as libllama may call it

    def install(self) -> None:
        self.lines.clear()
        libllama.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _take(self, level: int, text: bytes, _: object) -> None:
        if level >= libllama.GGML_LOG_LEVEL_ERROR and level != libllama.GGML_LOG_LEVEL_CONT:
            self.lines = [*self.lines[-3:], text.decode("utf-8", "replace").strip()]

    def __str__(self) -> str:
        return "; ".join(self.lines)


_LOG = _ErrorLog()


class Tokenizer:
    """A GGUF's vocabulary. Token ids are 0 to `vocabulary` - 1.

    bos, eos: ids, or None where the model has none. eog: every id that ends a generation. adds_bos: `encode` begins
    with bos. metadata: the GGUF's scalar values as text. table: what a Detokenizer needs; special tokens are empty in it.
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
        self.eog = frozenset(
            token for token in range(self.vocabulary) if libllama.llama_vocab_is_eog(self._vocab, token)
        )
        self.metadata = dict(_metadata(model))
        self.context_train: int = libllama.llama_model_n_ctx_train(model)
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

        Measured: gemma's 262,144 tokens take 0.25 us per character on a 2.x GHz core, byte-level BPE 0.3 us.
        """
        return len(text) <= SHORT_TEXT

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of any text. add_special: with bos (and eos) where the model wants them. parse_special: text such as `<s>`
        becomes the special token rather than its characters."""
        data = _utf8(text)
        size = len(data) + 8  # a token has at least one byte
        tokens = (ctypes.c_int32 * size)()
        count = libllama.llama_tokenize(self._vocab, data, len(data), tokens, size, add_special, parse_special)
        if count < 0:  # a vocabulary with tokens of no bytes
            size = -count
            tokens = (ctypes.c_int32 * size)()
            count = libllama.llama_tokenize(self._vocab, data, len(data), tokens, size, add_special, parse_special)
        return list(tokens[:count])

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of one token; special tokens and ends of generation are empty unless `special`. Any int is accepted."""
        if special and token in self._specials:
            return self._specials[token]
        return self.table[token]

    def decode(self, ids: Iterable[int], *, special: bool = True) -> str:
        """Text of these ids at once, special tokens included, as llama-server's /detokenize has it."""
        return b"".join(self.piece(token, special=special) for token in ids).decode("utf-8", "replace")

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
