"""Every error that a client can see: one function from cause to status, code and text.

The body is OpenAI's envelope, `{"error": {"message", "type", "param", "code"}}`. A message names the cause and what
to do about it; it never carries a stack trace, a path of this machine or another user's text. `Retry-After` comes
with each 429 and 503, in whole seconds.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from native.refusal import is_refusal
from server import failures
from server.badrequest import BadRequest
from workers import errors

INVALID = "invalid_request_error"
SERVER = "server_error"

Header = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """An error as HTTP carries it. `closes`: the connection can't be used again. retry_after_s: 429 and 503 only."""

    status: int
    message: str
    type: str
    code: str | None
    param: str | None = None
    retry_after_s: int | None = None
    closes: bool = False
    headers: tuple[Header, ...] = field(default=())

    def body(self) -> bytes:
        """The envelope as JSON."""
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )

    def event(self) -> bytes:
        """The envelope as the event that ends a stream whose headers were sent before the error."""
        return b"data: " + self.body() + b"\n\n"

    def header_list(self) -> list[Header]:
        headers = [(b"content-type", b"application/json"), *self.headers]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.closes:
            headers.append((b"connection", b"close"))
        return headers


def whole_seconds(seconds: float) -> int:
    """Seconds for Retry-After: whole, at least 1."""
    return max(1, math.ceil(seconds)) if math.isfinite(seconds) else 60


def describe(error: BaseException) -> ErrorReply:
    """Status, code and text for any cause. What is unknown is a 500 that says nothing of its inside."""
    for kind in type(error).__mro__:
        describer = _DESCRIBERS.get(kind)
        if describer is not None:
            return describer(error)
    return ErrorReply(
        status=500,
        type=SERVER,
        code="internal_error",
        message="The server failed on this request. The log has the details under its x-request-id.",
    )


# ---- the request's own faults ----------------------------------------------------------------------------------------


def _bad_request(error: BadRequest) -> ErrorReply:
    return ErrorReply(status=400, type=INVALID, code=error.code, param=error.param, message=error.message)


def _prompt_too_long(error: errors.PromptTooLong) -> ErrorReply:
    return ErrorReply(
        status=400,
        type=INVALID,
        code="context_length_exceeded",
        param="prompt",
        message=f"The prompt has {error.prompt_tokens} tokens, and this model's context is {error.context} tokens, of "
        "which the output needs at least one. Shorten the prompt.",
    )


def _unsupported(error: errors.Unsupported) -> ErrorReply:
    if error.capability == "embeddings":
        return ErrorReply(
            status=400,
            type=INVALID,
            code="unsupported_operation",
            message="The decoder that serves this model makes no embeddings. Ask a server whose decoder does.",
        )
    return ErrorReply(
        status=400,
        type=INVALID,
        code="unsupported_parameter",
        param=error.capability,
        message=f"The decoder that serves this model has no {error.capability}. Leave it out of the request.",
    )


def _route_not_found(error: failures.RouteNotFound) -> ErrorReply:
    return ErrorReply(
        status=404,
        type=INVALID,
        code="unknown_url",
        message=f"Unknown request URL: {error.method} {error.path[:200]}. See /openapi.json for the routes.",
    )


def _method_not_allowed(error: failures.MethodNotAllowed) -> ErrorReply:
    allowed = ", ".join(error.allowed)
    return ErrorReply(
        status=405,
        type=INVALID,
        code="method_not_allowed",
        message=f"{error.method} is not allowed here. Use {allowed}.",
        headers=((b"allow", allowed.encode()),),
    )


def _model_not_found(error: failures.ModelNotFound) -> ErrorReply:
    served = ", ".join(repr(name) for name in error.served)
    return ErrorReply(
        status=404,
        type=INVALID,
        code="model_not_found",
        param="model",
        message=f"The model {error.model[:200]!r} does not exist here. Use {served}, or leave `model` out.",
    )


def _worker_not_found(error: failures.WorkerNotFound) -> ErrorReply:
    return ErrorReply(
        status=404,
        type=INVALID,
        code="worker_not_found",
        message=f"There is no worker {error.worker[:20]!r}. They are numbered 0 to {error.workers - 1}; see /status.",
    )


def _admin_failed(error: failures.AdminFailed) -> ErrorReply:
    return ErrorReply(
        status=409,
        type=INVALID,
        code="admin_refused",
        message=f"The worker did not {error.action}: {error.reason}. See /status for its state.",
    )


def _body_too_large(error: failures.BodyTooLarge) -> ErrorReply:
    return ErrorReply(
        status=413,
        type=INVALID,
        code="request_too_large",
        message=f"The request body is larger than {error.limit_bytes} bytes. Send less, or raise `body_limit`.",
        closes=True,
    )


def _bodies_full(error: failures.BodiesFull) -> ErrorReply:
    return ErrorReply(
        status=503,
        type=SERVER,
        code="bodies_full",
        message=f"The bodies of all requests together would exceed {error.total_bytes} bytes. Try again after the time "
        "in Retry-After, or raise `body_total`.",
        retry_after_s=1,
        closes=True,
    )


def _body_too_slow(error: failures.BodyTooSlow) -> ErrorReply:
    return ErrorReply(
        status=408,
        type=INVALID,
        code="request_timeout",
        message=f"The request did not arrive within {error.limit_s:g} s. Send it faster, or raise `body_timeout_s`.",
        closes=True,
    )


def _unsupported_media_type(error: failures.UnsupportedMediaType) -> ErrorReply:
    return ErrorReply(
        status=415,
        type=INVALID,
        code="unsupported_media_type",
        message=f"{error.what[:200]} can't be read. Send uncompressed JSON with `Content-Type: application/json`.",
        closes=True,
    )


def _headers_too_large(error: failures.HeadersTooLarge) -> ErrorReply:
    return ErrorReply(
        status=431,
        type=INVALID,
        code="headers_too_large",
        message=f"The request's line and headers are larger than {error.limit_bytes} bytes. Send fewer.",
        closes=True,
    )


def _malformed(_: failures.MalformedRequest) -> ErrorReply:
    return ErrorReply(
        status=400, type=INVALID, code="malformed_request", message="This is not an HTTP/1.1 request.", closes=True
    )


# ---- keys ------------------------------------------------------------------------------------------------------------


def _unauthorized(error: failures.Unauthorized) -> ErrorReply:
    cause = "The API key is not valid" if error.given else "There is no API key in the request"
    return ErrorReply(
        status=401,
        type="authentication_error",
        code="invalid_api_key",
        message=f"{cause}. Send `Authorization: Bearer KEY` with a key of this server.",
        headers=((b"www-authenticate", b"Bearer"),),
    )


def _admin_disabled(_: failures.AdminDisabled) -> ErrorReply:
    return ErrorReply(
        status=403,
        type="permission_error",
        code="admin_disabled",
        message="Admin routes are off: no admin key is configured. Set `admin_key` and send it as the Bearer key.",
    )


# ---- load and life of the server -------------------------------------------------------------------------------------


def _overloaded(error: errors.Overloaded) -> ErrorReply:
    return ErrorReply(
        status=429,
        type="rate_limit_error",
        code="queue_full",
        message=f"The queue is full ({error.bound}: {error.limit}). Try again after the time in Retry-After.",
        retry_after_s=whole_seconds(error.retry_after_s),
    )


def _no_workers(error: errors.NoWorkers) -> ErrorReply:
    return ErrorReply(
        status=503,
        type=SERVER,
        code="no_workers",
        message="No worker can serve now; /health has the reason for each. Try again after the time in Retry-After.",
        retry_after_s=whole_seconds(error.retry_after_s),
    )


def _deadline_exceeded(error: errors.DeadlineExceeded) -> ErrorReply:
    return ErrorReply(
        status=503,
        type=SERVER,
        code="queue_deadline",
        message=f"The request waited {error.waited_s:.1f} s, its deadline, and no worker came free. Try again later.",
        retry_after_s=whole_seconds(error.waited_s / 4),
    )


def _shutting_down(_: errors.ShuttingDown) -> ErrorReply:
    return ErrorReply(
        status=503,
        type=SERVER,
        code="shutting_down",
        message="The server is stopping. Send the request again when it is back, or to another server.",
        retry_after_s=5,
        closes=True,
    )


def _too_many_connections(error: failures.TooManyConnections) -> ErrorReply:
    return ErrorReply(
        status=503,
        type=SERVER,
        code="too_many_connections",
        message=f"The server has {error.limit} connections open, its limit. Close some, or raise `connection_limit`.",
        retry_after_s=1,
        closes=True,
    )


# ---- faults of decoders ----------------------------------------------------------------------------------------------


def _decoder_refused(error: errors.DecoderRefused) -> ErrorReply:
    if is_refusal(error.text) and not error.text.startswith("busy"):  # what the request itself did wrong
        return ErrorReply(
            status=400,
            type=INVALID,
            code="decoder_refused",
            message=f"The decoder refused the request: {without_paths(error.text)}.",
        )
    return _decoder_failed(error)


def _decoder_failed(_: errors.DecoderRefused | errors.EngineFailed) -> ErrorReply:
    return ErrorReply(
        status=500,
        type=SERVER,
        code="decoder_error",
        message="The decoder failed on this request. The log has its message under the x-request-id. Try again.",
    )


def _non_finite(_: errors.NonFinite) -> ErrorReply:
    return ErrorReply(
        status=500,
        type=SERVER,
        code="decoder_nonfinite",
        message="The decoder computed values that are no numbers, twice, for this request. Try again; if it recurs, "
        "tell the operator.",
    )


def _poison(error: errors.PoisonRequest) -> ErrorReply:
    return ErrorReply(
        status=500,
        type=SERVER,
        code="poison_request",
        message=f"{error.deaths} decoders died while they ran this request, so it is not given another. Change it, and "
        "tell the operator.",
    )


def _worker_lost(error: errors.WorkerLost) -> ErrorReply:
    return ErrorReply(
        status=503,
        type=SERVER,
        code="worker_lost",
        message=f"Worker {error.worker} was lost with this request, which could not go on elsewhere. Try again.",
        retry_after_s=1,
    )


def _slow_client(error: errors.SlowClient) -> ErrorReply:
    return ErrorReply(
        status=408,
        type=INVALID,
        code="slow_client",
        message=f"The client took nothing for {error.stalled_s:.0f} s, so the generation was stopped. Read faster.",
        closes=True,
    )


def without_paths(text: str) -> str:
    """A decoder's words without anything that looks like a path, and not long."""
    words = ["(path)" if "/" in word else word for word in text.split()]
    return " ".join(words)[:300].rstrip(".")


_DESCRIBERS: dict[type[BaseException], Callable[[Any], ErrorReply]] = {
    BadRequest: _bad_request,
    failures.Unauthorized: _unauthorized,
    failures.AdminDisabled: _admin_disabled,
    failures.RouteNotFound: _route_not_found,
    failures.MethodNotAllowed: _method_not_allowed,
    failures.ModelNotFound: _model_not_found,
    failures.WorkerNotFound: _worker_not_found,
    failures.AdminFailed: _admin_failed,
    failures.BodyTooLarge: _body_too_large,
    failures.BodiesFull: _bodies_full,
    failures.BodyTooSlow: _body_too_slow,
    failures.UnsupportedMediaType: _unsupported_media_type,
    failures.HeadersTooLarge: _headers_too_large,
    failures.MalformedRequest: _malformed,
    failures.TooManyConnections: _too_many_connections,
    errors.Overloaded: _overloaded,
    errors.NoWorkers: _no_workers,
    errors.DeadlineExceeded: _deadline_exceeded,
    errors.DecoderRefused: _decoder_refused,
    errors.EngineFailed: _decoder_failed,
    errors.NonFinite: _non_finite,
    errors.PoisonRequest: _poison,
    errors.WorkerLost: _worker_lost,
    errors.SlowClient: _slow_client,
    errors.PromptTooLong: _prompt_too_long,
    errors.Unsupported: _unsupported,
    errors.ShuttingDown: _shutting_down,
}
