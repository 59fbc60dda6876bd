"""What HTTP itself can refuse, by cause. Status, code and text are made in errors.py, as for every other cause."""

from dataclasses import dataclass


class Refusal(Exception):
    """Root of the refusals that are the HTTP layer's own; the pool's causes are in workers/errors.py."""


@dataclass(slots=True, eq=False)
class Unauthorized(Refusal):
    """No key, or not one of the configured ones. `given`: the request carried something in its place."""

    given: bool


@dataclass(slots=True, eq=False)
class AdminDisabled(Refusal):
    """An admin route was called on a server that has no admin key."""


@dataclass(slots=True, eq=False)
class RouteNotFound(Refusal):
    method: str
    path: str


@dataclass(slots=True, eq=False)
class MethodNotAllowed(Refusal):
    method: str
    allowed: tuple[str, ...]


@dataclass(slots=True, eq=False)
class ModelNotFound(Refusal):
    model: str
    served: tuple[str, ...]


@dataclass(slots=True, eq=False)
class WorkerNotFound(Refusal):
    worker: str
    workers: int


@dataclass(slots=True, eq=False)
class AdminFailed(Refusal):
    """An admin call that the worker's present state doesn't allow, or that failed; `reason` is the pool's word."""

    action: str
    reason: str


@dataclass(slots=True, eq=False)
class BodyTooLarge(Refusal):
    limit_bytes: int


@dataclass(slots=True, eq=False)
class BodiesFull(Refusal):
    """The bodies of all requests together would exceed `body_total`."""

    total_bytes: int


@dataclass(slots=True, eq=False)
class BodyTooSlow(Refusal):
    limit_s: float


@dataclass(slots=True, eq=False)
class UnsupportedMediaType(Refusal):
    """`what`: the header and value that can't be read."""

    what: str


@dataclass(slots=True, eq=False)
class TooManyConnections(Refusal):
    limit: int


@dataclass(slots=True, eq=False)
class HeadersTooLarge(Refusal):
    limit_bytes: int


@dataclass(slots=True, eq=False)
class MalformedRequest(Refusal):
    """The bytes on the connection are not HTTP/1.1."""


class ClientGone(Exception):
    """The client has closed its connection: there is nobody to answer."""
