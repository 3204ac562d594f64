"""Gate: ASGI middleware that checks the Host header and the API key, and logs and counts each request."""

import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinygpt.server.errors import ApiError, respond

# These paths tell nothing of texts; monitors and browsers ask for them without a key.
OPEN_PATHS = frozenset({"/", "/health", "/metrics", "/version", "/openapi.json"})
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
CLIENT_LEFT = 499  # nginx's status
_ID = re.compile(r"[\x21-\x7e]{1,200}")
log = logging.getLogger("tinygpt.server.access")


class Gate:
    """allowed_hosts: values of the Host header, against DNS rebinding; None is any. api_keys: none needed if empty."""

    def __init__(
        self,
        app: ASGIApp,
        allowed_hosts: frozenset[str] | None,
        api_keys: tuple[str, ...],
        paths: frozenset[str],
        count: Callable[[str, int], None],
    ):
        """count(path, status): called once for each request. paths: others count as "other", to bound the labels."""
        self._app, self._hosts, self._paths, self._count = app, allowed_hosts, paths, count
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers, begun, status, is_whole = Headers(scope=scope), time.perf_counter(), CLIENT_LEFT, False
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(16)
        notes: dict[str, Any] = {}  # of routes, for the log line
        scope["state"] = {**scope.get("state", {}), "notes": notes, "id": request_id}

        async def noted(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            elif not message.get("more_body", False):
                is_whole = True
            await send(message)

        try:
            await (self._refusal(scope["path"], headers) or self._app)(scope, receive, noted)
        except Exception:  # a bug: the outermost middleware replies with status 500
            status, is_whole = 500, True
            raise
        finally:
            status = status if is_whole else CLIENT_LEFT
            self._count(scope["path"] if scope["path"] in self._paths else "other", status)
            path = ascii(scope["path"])[1:-1]  # it may hold control characters
            fields = {"id": request_id, "method": scope["method"], "path": path, "status": status}
            log.info("request", extra={"fields": {**fields, **notes, "seconds": round(time.perf_counter() - begun, 6)}})

    def _refusal(self, path: str, headers: Mapping[str, str]) -> ASGIApp | None:
        if self._hosts is not None and host_name(headers.get("host", "")) not in self._hosts:
            listed = ", ".join(sorted(self._hosts))
            return respond(ApiError(403, f"the Host header must be one of {listed}.", code="host_not_allowed"))
        if self._keys and path not in OPEN_PATHS and not self._has_key(headers.get("authorization", "")):
            message = "the API key is missing or wrong: send the header Authorization: Bearer KEY."
            return respond(ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"}))
        return None

    def _has_key(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        matches = [secrets.compare_digest(key.encode("latin-1"), known) for known in self._keys]  # constant time
        return scheme.lower() == "bearer" and any(matches)


def host_name(host: str) -> str:
    """Return a Host header's name, without the port and the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
