"""Lines to a decoder. A GEN line is written in three pieces, so that the prompt is never copied:

    os.writev(stdin, [encoder.head(...), prompt_text, b"\\n"])

`prompt_text` is what `encode_ids` made. Keys that the decoder has not announced are left out; whether a request can do
without them is for `unsupported` to say, before it is sent.
"""

from base64 import b64encode
from collections.abc import Sequence

import msgspec

from native.dialect import Dialect, Info
from native.sampling import SamplingOptions

QUIT = b"QUIT\n"
STRATA_TOP_K = 64  # the most that Strata's kernel keeps

# Every JSON value but a whole number of 0 or more holds one of these: minus, fraction, exponent (and true, false), null,
# string, array, object. Looking for each is five times faster than looking at every byte.
_NO_IDS = (b"-", b".", b"e", b"l", b'"', b"[", b"{")
_encode_json = msgspec.json.Encoder().encode


def encode_ids(ids: Sequence[int]) -> bytes:
    """Token ids as the decoder reads them: decimal, comma separated. Lists, tuples, arrays and numpy arrays alike.

    4,097 ids take about 28 microseconds. Raises ValueError for no ids, and for anything that isn't a whole number >= 0.
    """
    values = ids if isinstance(ids, list | tuple) else list(getattr(ids, "tolist", ids.__iter__)())
    try:
        text = _encode_json(values)[1:-1]
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise ValueError(f"token ids must be whole numbers: {error}") from error
    if not text or any(mark in text for mark in _NO_IDS):
        raise ValueError("a prompt needs at least one token id, and ids are whole numbers of 0 or more")
    return text


def unsupported(options: SamplingOptions, info: Info, *, is_embedding: bool = False) -> str | None:
    """The first capability that a request needs and this decoder has not announced, or None."""
    if is_embedding and not info.embeddings:
        return "embeddings"
    if options.grammar is not None and not info.grammar:
        return "grammar"
    if options.logprobs is not None and not 0 < info.logprobs >= options.logprobs:
        return "logprobs"
    if options.logit_bias and not info.logit_bias:
        return "logit_bias"
    return None


class Encoder:
    """Commands for one decoder. `rid` is ignored in the solo dialect, which has no request ids."""

    def __init__(self, dialect: Dialect, info: Info) -> None:
        if dialect is Dialect.BATCH:
            raise ValueError("the batch dialect isn't spoken by this version")
        self._is_tagged = dialect is Dialect.TAGGED
        self._info = info

    def __repr__(self) -> str:
        return f"Encoder(dialect={'tagged' if self._is_tagged else 'solo'}, engine={self._info.engine!r})"

    def generate_head(self, rid: int, max_new: int, options: SamplingOptions, resume: int = 0) -> bytes:
        """A GEN line up to its ids. resume: how many of the last ids are this request's own earlier output."""
        return self.head(rid, max_new, self.keys(options), resume)

    def keys(self, options: SamplingOptions) -> bytes:
        """The keys of a GEN line, each after a space. They depend on the options alone and can be kept."""
        words = [""]
        self._add_sampling(words, options)
        self._add_announced(words, options)
        return " ".join(words).encode()

    def head(self, rid: int, max_new: int, keys: bytes, resume: int = 0) -> bytes:
        """A GEN line up to its ids, with what `keys` made."""
        if resume > 0 and self._info.resume:
            keys += b" resume=%d" % resume
        return b"GEN %d %d%b " % (rid, max_new, keys) if self._is_tagged else b"GEN %d%b " % (max_new, keys)

    def embed_head(self, rid: int) -> bytes:
        """An EMB line up to its ids."""
        return b"EMB %d " % rid if self._is_tagged else b"EMB "

    def stop(self, rid: int) -> bytes:
        return b"STOP %d\n" % rid if self._is_tagged else b"STOP\n"

    def _add_sampling(self, words: list[str], options: SamplingOptions) -> None:
        if options.temperature > 0:
            words.append(f"temperature={options.temperature!r}")
        if options.top_p < 1:
            words.append(f"top_p={options.top_p!r}")
        if options.top_k is not None:
            words.append(f"top_k={self._top_k(options.top_k)}")
        if 0 < options.min_p <= 1:
            words.append(f"min_p={options.min_p!r}")
        penalties = len(words)
        if options.penalty_repeat != 1:
            words.append(f"penalty_repeat={options.penalty_repeat!r}")
        if options.penalty_freq != 0:
            words.append(f"penalty_freq={options.penalty_freq!r}")
        if options.penalty_present != 0:
            words.append(f"penalty_present={options.penalty_present!r}")
        if len(words) > penalties:
            words.append(f"penalty_last_n={options.penalty_last_n}")
        if options.seed > 0:
            words.append(f"seed={options.seed}")

    def _top_k(self, top_k: int) -> int:
        return top_k if self._is_tagged or 0 < top_k <= STRATA_TOP_K else STRATA_TOP_K

    def _add_announced(self, words: list[str], options: SamplingOptions) -> None:
        if options.logit_bias and self._info.logit_bias:
            biases = ",".join(f"{token}:{bias!r}" for token, bias in sorted(options.logit_bias))
            words.append(f"logit_bias={biases}")
        if options.logprobs is not None and self._info.logprobs:
            words.append(f"logprobs={min(options.logprobs, self._info.logprobs)}")
        if options.grammar is not None and self._info.grammar:
            words.append(f"grammar={b64encode(options.grammar.encode()).decode()}")
