"""Who may ask: the Host header and the API keys, as ASGI middleware."""

import secrets
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tinygpt.server.refusals.errors import error_body

# What needs no key: it tells nothing of texts, and monitors and browsers ask for it without one.
OPEN_PATHS = frozenset({"/", "/health", "/metrics", "/version", "/openapi.json"})
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class HostCheck:
    """Refuses requests that were sent to another name than the server's.

    A web page can give its own name the address 127.0.0.1 and then speak with a server there as with its own (DNS
    rebinding). Its name stays in the Host header.
    """

    def __init__(self, app: ASGIApp, allowed: Iterable[str]):
        self._app, self._allowed = app, frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and host_name(Headers(scope=scope).get("host", "")) not in self._allowed:
            listed = ", ".join(sorted(self._allowed))
            message = f"the Host header is none of this server's names ({listed}): ask it by one of them."
            app = JSONResponse(error_body(403, message, code="host_not_allowed"), 403)
        await app(scope, receive, send)


class KeyCheck:
    """Refuses requests without one of the keys. All are compared, each in constant time."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]):
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._is_allowed(Headers(scope=scope)):
            message = "the API key is missing or wrong: send the header Authorization: Bearer KEY."
            headers = {"www-authenticate": "Bearer", "x-should-retry": "false"}
            app = JSONResponse(error_body(401, message, code="invalid_api_key"), 401, headers)
        await app(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.encode("latin-1")  # as the header's bytes were read
        found = [secrets.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(found)


def host_name(host: str) -> str:
    """Without the port, and the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
