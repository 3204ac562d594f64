"""The FastAPI app of one model, and uvicorn, which serves it."""

import asyncio
import base64
import faulthandler
import hashlib
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import signature
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

import tinygpt

from ..errors import RequestError, suggest
from ..llm import LLM
from .api import Api
from .config import ServerConfig
from .gate import CLIENT_LEFT, OPEN_PATHS, Connection, Gate, JsonRoute, from_validation
from .info_routes import InfoRoutes
from .protocol import Strict
from .refusals import BUG, ApiError, ErrorReply, respond

PAGE = Path(__file__).resolve().parent / "page.html"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
log = logging.getLogger("tinygpt.server")
REFUSED = {"4XX": {"model": ErrorReply}, "5XX": {"model": ErrorReply}}
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
STREAMED = {200: {"content": {"text/event-stream": {"schema": _EVENT}}}}
KEEP_ALIVE_SECONDS = 30
UNREAD_SECONDS = 60.0  # until the connection of a client ends that reads nothing
FLUSH_SECONDS = 2.0  # for clients to read why their streams have ended
END_SECONDS = 5.0  # after that, for threads to end
# After a kernel the engine waits so long for the GIL while the loop writes; Python's default is 0.005.
SWITCH_SECONDS = 0.001
BACKLOG = 128  # connections that wait to be accepted; asyncio tries as many at once

Call = Callable[[], None]


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


def forms() -> dict[str, type[Strict]]:
    """Return the form of each route that takes one, by its path."""
    methods = [method for owner in (Api, InfoRoutes) for method in vars(owner).values()]
    parameters = {m.route[0]: signature(m).parameters for m in methods if hasattr(m, "route")}
    return {path: own["form"].annotation for path, own in parameters.items() if "form" in own}


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
            described = get_openapi(title=app.title, version=app.version, routes=app.routes)
        keys = api.config.api_keys
        for path, methods in described["paths"].items():
            for method, operation in methods.items():
                operation["operationId"] = f"{method}_{path.strip('/')}"
                if keys:
                    operation["security"] = [] if path in OPEN_PATHS else [{"key": []}]
        schemas = described["components"]["schemas"]
        schemas["ModelName"]["enum"] = list(api.model_names)
        schemas["TokenId"]["maximum"] = api.llm.config.vocab_size - 1
        schemas["NumLogprobs"]["maximum"] = api.config.max_logprobs
        if keys:
            described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = described
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
    """Return CSP hashes of the page's scripts or styles; no others run."""
    texts = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


async def _http_error(request: Request, error: HTTPException) -> Response:
    if isinstance(error, ApiError):
        return respond(error)
    path = ascii(request.url.path)[1:-1]
    paths = [route.path for route in request.app.routes if "{" not in route.path]
    near = [other for other in paths if suggest(path.rpartition("/")[2], [other.rpartition("/")[2]])]
    hint = suggest(path, near) if error.status_code == 404 else ""
    message = f"{request.method} {path}: {error.detail}{hint}"
    return respond(HTTPException(error.status_code, message, error.headers))


async def _invalid(request: Request, error: RequestValidationError) -> Response:
    return respond(from_validation(error, request.scope["route"].body_field.field_info.annotation))


async def _client_left(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=CLIENT_LEFT)


async def _bug(request: Request, error: Exception) -> Response:
    return respond(BUG)


class Server(uvicorn.Server):
    """uvicorn's server, which drains after a signal and then ends with status 0.

    It listens while it drains, so that load balancers read status 503 from /health. A second signal ends it at once.
    """

    def __init__(self, app: FastAPI, drain_seconds: float, on_start: Call, on_signal: Call = lambda: None):
        """drain_seconds: until running requests end with an error.

        on_start, on_signal: called when requests can come, and at the first signal.
        """
        off = {"http": Connection, "ws": "none", "lifespan": "off", "log_config": None}
        off |= {"access_log": False, "server_header": False, "proxy_headers": False, "backlog": BACKLOG}
        seconds = {"timeout_keep_alive": KEEP_ALIVE_SECONDS, "timeout_graceful_shutdown": int(FLUSH_SECONDS)}
        super().__init__(uvicorn.Config(app, **off, **seconds))
        self._api = app.state.api
        self._drain_seconds = drain_seconds
        self._on_start = on_start
        self._on_signal = on_signal
        self._deadline: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_start()

    async def on_tick(self, counter: int) -> bool:
        is_told = await super().on_tick(counter)
        running = len(self.server_state.tasks)
        if is_told and self._deadline is None:
            self._deadline = time.monotonic() + self._drain_seconds + FLUSH_SECONDS
            asyncio.get_running_loop().call_later(self._drain_seconds, self._api.stop_all)
            if running:
                fields = {"running": running, "drain_seconds": self._drain_seconds}
                log.info("shutting down: a second signal ends it at once", extra={"fields": fields})
        return is_told and (not running or time.monotonic() > self._deadline)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self._on_signal()
        self.should_exit = self._api.is_draining = True


def serve(app: FastAPI, listener: socket.socket, drain_seconds: float, on_start: Call) -> None:
    """Serve until SIGTERM or Ctrl-C, and until all that ran then has ended; END_SECONDS too late with status 1."""
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises it again at its end: status 0
        signal.signal(number, lambda *_: None)
    allow_all_descriptors()
    sys.setswitchinterval(SWITCH_SECONDS)
    # Python waits for its threads; faulthandler's needs no GIL, and a full stderr cannot block it.
    seconds = min(drain_seconds + FLUSH_SECONDS + END_SECONDS, threading.TIMEOUT_MAX / 2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    end_in_any_case = partial(faulthandler.dump_traceback_later, seconds, exit=True, file=nowhere)
    Server(app, drain_seconds, on_start, end_in_any_case).run(sockets=[listener])
    log.info("the server has ended")


def allow_all_descriptors() -> None:
    """Raise the soft limit of open files, often 1024, to the hard limit: each connection takes a descriptor."""
    with suppress(ImportError, OSError, ValueError):  # Windows has no such limit; macOS refuses some values
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket: clients that connect before the model is loaded wait. RequestError if it is taken."""
    try:
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except (OSError, OverflowError, TypeError) as error:  # TypeError: of a name that IDNA does not have
        why = str(getattr(error, "strerror", None) or error).partition(" (while ")[0]
        message = (
            f"{host}:{port} cannot be listened on ({why}): give another --port, or a --host of this machine."
        )
        raise RequestError(message) from None
    # asyncio does so for sockets of proto TCP alone; a reply's second packet would wait 40 ms for the client's ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux's; a reply of 70 MB would wait for ever
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_SECONDS))
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
