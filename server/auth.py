"""Who may call what. Pure ASGI; a refused request costs no reading of its body.

The allow list is of exact paths, as the router matches them: any other spelling of a path is either no route (404
after the key was checked) or needs the key. Keys come in `Authorization: Bearer KEY` only: a query would end up in
logs.
"""

import hmac
from collections.abc import Iterable

from server.exchange import Receive, Scope, Send
from server.failures import AdminDisabled, Unauthorized

OPEN_PATHS = frozenset({"/livez", "/readyz", "/health"})
METRICS_PATHS = frozenset({"/metrics", "/status"})
ADMIN_PREFIX = "/admin"


class Auth:
    """Middleware that raises Unauthorized or AdminDisabled; the entrance answers."""

    def __init__(
        self, app: "object", *, keys: Iterable[str], admin_keys: Iterable[str], public_metrics: bool = False
    ) -> None:
        self.app = app
        self._keys = tuple(key.encode() for key in keys)
        self._admin_keys = tuple(key.encode() for key in admin_keys)
        self._open_paths = OPEN_PATHS | METRICS_PATHS if public_metrics else OPEN_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.check(scope["path"], scope["headers"])
        await self.app(scope, receive, send)  # type: ignore[operator]

    def check(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raise unless a request for this path carries what it needs."""
        if path.lower().startswith(ADMIN_PREFIX):
            if not self._admin_keys:
                raise AdminDisabled
            self._check_key(headers, self._admin_keys)
        elif self._keys and path not in self._open_paths:
            # The admin key opens everything else, so that one operator needs one key.
            self._check_key(headers, self._keys + self._admin_keys)

    def _check_key(self, headers: Iterable[tuple[bytes, bytes]], keys: tuple[bytes, ...]) -> None:
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1:
            raise Unauthorized(given=bool(given))
        scheme, _, key = given[0].partition(b" ")
        if scheme.lower() != b"bearer" or not _is_among(key.strip(b" "), keys):
            raise Unauthorized(given=True)


def _is_among(given: bytes, keys: tuple[bytes, ...]) -> bool:
    """Compares with every key, in the same time whichever fits."""
    matches = [hmac.compare_digest(given, key) for key in keys]
    return any(matches)
