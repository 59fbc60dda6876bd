"""Which ERR of a decoder blames the request, by how its text begins (docs/protocol.md)."""

_REFUSALS = (
    "busy",
    "context",
    "grammar",
    "bad",
    "invalid",
    "unknown",
    "unsupported",
    "prompt",
    "refused",
    "id ",
    "ids",
    "token id",
    "max_new",
    "too long",
    "logit_bias",
    "usage",
)


def is_refusal(text: str) -> bool:
    """Whether an ERR blames the request (it would fail anywhere) rather than the engine."""
    return text.lower().startswith(_REFUSALS)
