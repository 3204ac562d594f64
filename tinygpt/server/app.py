"""create_app: the FastAPI app of one model: routes, OpenAPI, the page, and the gate in front of them."""

import base64
import hashlib
import logging
import re
import secrets
import time
import warnings
from collections.abc import Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import tinygpt

from ..errors import suggest
from ..llm import LLM
from .answers import BUG, ApiError, ErrorReply, from_validation, respond
from .api import Api, ServerConfig
from .info_routes import InfoRoutes
from .requests import JsonRoute

PAGE = Path(__file__).resolve().parent / "page.html"
# Monitors and browsers read these without a key; they hold no text of a client.
OPEN_PATHS = frozenset({"/", "/health", "/metrics", "/version", "/openapi.json"})
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
CLIENT_LEFT = 499  # nginx's status
_ID = re.compile(r"[\x21-\x7e]{1,200}")
access_log = logging.getLogger("tinygpt.server.access")
REFUSED = {"4XX": {"model": ErrorReply}, "5XX": {"model": ErrorReply}}
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
STREAMED = {200: {"content": {"text/event-stream": {"schema": _EVENT}}}}


def create_app(llm: LLM, config: ServerConfig) -> FastAPI:
    """Return an app for any ASGI server. The caller closes the LLM."""
    api = Api(llm, config)
    app = FastAPI(title="tinygpt", version=tinygpt.__version__, docs_url=None, redoc_url=None)
    app.router.route_class = JsonRoute
    app.state.api = api
    for owner in (api, InfoRoutes(api)):
        for name, method in vars(type(owner)).items():
            if hasattr(method, "route"):
                _add_route(app, getattr(owner, name), *method.route)
    app.get("/", include_in_schema=False)(page)
    app.openapi = partial(_openapi, app)
    app.add_middleware(Gate, api=api, paths=frozenset(route.path for route in app.routes))
    if config.allowed_origins:
        origins = list(config.allowed_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    handlers = {HTTPException: _http_error, RequestValidationError: _invalid, ClientDisconnect: _client_left}
    app.exception_handlers |= {**handlers, Exception: _bug}
    return app


def _add_route(
    app: FastAPI, handle: Any, path: str, methods: tuple[str, ...], options: dict[str, Any]
) -> None:
    form = signature(handle).parameters.get("form")
    responses = REFUSED
    if form is not None:
        handle = app.state.api.checked(handle)
        responses = REFUSED | (STREAMED if "stream" in form.annotation.model_fields else {})
    app.api_route(path, methods=[*methods], responses=responses, **options)(handle)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return FastAPI's description with this model's names and limits, and the API key."""
    api = app.state.api
    if app.openapi_schema is None:
        with warnings.catch_warnings():  # about one operation id for GET and DELETE, which are named below
            warnings.simplefilter("ignore")
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path, methods in found["paths"].items():
            for method, operation in methods.items():
                operation["operationId"] = f"{method}_{path.strip('/')}"
        schemas = found["components"]["schemas"]
        schemas["ModelName"]["enum"] = list(api.model_names)
        schemas["TokenId"]["maximum"] = api.llm.config.vocab_size - 1
        schemas["NumLogprobs"]["maximum"] = api.config.max_logprobs
        if api.config.api_keys:
            found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for path, methods in found["paths"].items():
                for operation in methods.values():
                    operation["security"] = [] if path in OPEN_PATHS else [{"key": []}]
        app.openapi_schema = found
    return app.openapi_schema


async def page() -> HTMLResponse:
    html = PAGE.read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_hashes('script', html)}; style-src {_hashes('style', html)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    return HTMLResponse(html, headers={"content-security-policy": policy, **headers})


def _hashes(tag: str, html: str) -> str:
    """Return the CSP hashes of the page's scripts or styles; no others run."""
    texts = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


async def _http_error(request: Request, error: HTTPException) -> Response:
    if isinstance(error, ApiError):
        return respond(error)
    path = ascii(request.url.path)[1:-1]
    paths = [route.path for route in request.app.routes if "{" not in route.path]
    hint = suggest(path, paths) if error.status_code == 404 else ""
    message = f"{request.method} {path}: {error.detail}{hint}"
    return respond(HTTPException(error.status_code, message, error.headers))


async def _invalid(request: Request, error: RequestValidationError) -> Response:
    field = request.scope["route"].body_field
    return respond(from_validation(error, field.field_info.annotation if field else None))


async def _client_left(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=CLIENT_LEFT)


async def _bug(request: Request, error: Exception) -> Response:
    return respond(BUG)


class Gate:
    """The checks of each request before its route, its id, and its line in the log."""

    def __init__(self, app: ASGIApp, api: Api, paths: frozenset[str]):
        """paths: others count as "other", to bound the labels."""
        self._app = app
        self._hosts = api.config.allowed_hosts
        self._paths = paths
        self._count = api.metrics.count_http
        self._keys = [key.encode() for key in api.config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        begun = time.perf_counter()
        told = 0
        status = CLIENT_LEFT
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(16)
        notes: dict[str, Any] = {}  # of routes, for the log line
        scope["state"] = {**scope.get("state", {}), "notes": notes, "id": request_id}

        async def noted(message: Message) -> None:
            nonlocal told, status
            if message["type"] == "http.response.start":
                told = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            elif not message.get("more_body", False):
                status = told  # the reply is whole
            await send(message)

        try:
            await (self._refusal(scope["path"], headers) or self._app)(scope, receive, noted)
        except Exception:  # a bug: the outermost middleware replies with status 500
            status = 500
            raise
        finally:
            self._count(scope["path"] if scope["path"] in self._paths else "other", status)
            path = ascii(scope["path"])[1:-1]  # it may hold control characters
            fields = {"id": request_id, "method": scope["method"], "path": path, "status": status, **notes}
            fields["seconds"] = round(time.perf_counter() - begun, 6)
            access_log.info("request", extra={"fields": fields})

    def _refusal(self, path: str, headers: Mapping[str, str]) -> ASGIApp | None:
        host = headers.get("host", "").lower()
        # Without the port.
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if self._hosts is not None and name not in self._hosts:
            listed = ", ".join(sorted(self._hosts))
            return respond(
                ApiError(403, f"the Host header must be one of {listed}.", code="host_not_allowed")
            )
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # In constant time.
        matches = [secrets.compare_digest(key.encode("latin-1"), known) for known in self._keys]
        if self._keys and path not in OPEN_PATHS and not (scheme.lower() == "bearer" and any(matches)):
            message = "the API key is missing or wrong: send the header Authorization: Bearer KEY."
            return respond(ApiError(401, message, code="invalid_api_key", **{"www-authenticate": "Bearer"}))
        return None
