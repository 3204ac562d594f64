"""create_app: the FastAPI app of one model, from the routes, their description, and the page."""

import base64
import hashlib
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

import tinygpt
from tinygpt.errors import suggest
from tinygpt.llm import LLM
from tinygpt.server import protocol
from tinygpt.server.api import Api, ServerConfig
from tinygpt.server.connection import JsonRoute
from tinygpt.server.errors import BUG, ApiError, from_validation, respond
from tinygpt.server.security import OPEN_PATHS, Gate

PAGE = Path(__file__).resolve().parent / "page.html"
REFUSED = {"4XX": {"model": protocol.ErrorReply}, "5XX": {"model": protocol.ErrorReply}}
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
STREAMED = {200: {"content": {"text/event-stream": {"schema": _EVENT}}}}


def create_app(llm: LLM, config: ServerConfig) -> FastAPI:
    """Return an app for any ASGI server. The caller closes the LLM."""
    api = Api(llm, config)
    app = FastAPI(title="tinygpt", version=tinygpt.__version__, docs_url=None, redoc_url=None)
    app.router.route_class = JsonRoute
    app.state.api = api
    for path, handle in (
        ("/v1/completions", api.completions),
        ("/v1/chat/completions", api.chat),
        ("/generate", api.generate),
        ("/v1/embeddings", api.embeddings),
        ("/v1/score", api.score),
        ("/score_continuations", api.score_continuations),
        ("/tokenize", api.tokenize),
        ("/detokenize", api.detokenize),
    ):
        is_streamed = handle in (api.completions, api.chat, api.generate)
        app.post(path, responses=REFUSED | (STREAMED if is_streamed else {}))(api.checked(handle))
    for path, handle in (
        ("/v1/models", api.models),
        ("/tokenizer_info", api.tokenizer_info),
        ("/health", api.health),
        ("/version", api.version),
    ):
        app.get(path, responses=REFUSED)(handle)
    app.get("/metrics", responses=REFUSED, response_class=PlainTextResponse)(api.prometheus)
    app.api_route("/v1/models/{model:path}", methods=["GET", "DELETE"], responses=REFUSED)(api.model)
    app.get("/", include_in_schema=False)(page)
    app.openapi = partial(_openapi, app)
    config, paths = api.config, frozenset(route.path for route in app.routes)
    app.add_middleware(
        Gate,
        allowed_hosts=config.allowed_hosts,
        api_keys=config.api_keys,
        paths=paths,
        count=api.metrics.count_http,
    )
    if config.allowed_origins:
        origins = list(config.allowed_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ClientDisconnect, _client_left)
    app.add_exception_handler(Exception, _bug)
    return app


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
        schemas["ModelName"]["enum"] = list(api.config.served_model_names)
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
    return HTMLResponse(
        html,
        headers={
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        },
    )


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
    return respond(HTTPException(error.status_code, f"{request.method} {path}: {error.detail}{hint}", error.headers))


async def _invalid(request: Request, error: RequestValidationError) -> Response:
    field = request.scope["route"].body_field
    return respond(from_validation(error, field.field_info.annotation if field else None))


async def _client_left(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)


async def _bug(request: Request, error: Exception) -> Response:
    return respond(BUG)
