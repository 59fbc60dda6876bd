"""What a request asks of a decoder besides its prompt, in one value that crosses shared memory as msgpack."""

import msgspec


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn. Meanings and ranges are those of the decoder protocol (docs/protocol.md).

    seed: 1 to 2**32-1, or 0 for none. A pool gives every sampled request (temperature > 0) a seed, because only a
    seeded draw can go on in another decoder. logprobs: alternatives per token (0: the chosen one only), None for none.
    logit_bias: (token id, bias) sorted by id. grammar: GBNF text.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    penalty_repeat: float = 1.0
    penalty_freq: float = 0.0
    penalty_present: float = 0.0
    penalty_last_n: int = 64
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    grammar: str | None = None

    def encode(self) -> bytes:
        """As stored in a request slot."""
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "SamplingOptions":
        """From a request slot. Raises msgspec.MsgspecError for anything else."""
        return _DECODER.decode(data)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(SamplingOptions)
