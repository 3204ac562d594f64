"""create_app: the ASGI app of one model."""

import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from tinygpt.llm import LLM
from tinygpt.server.config import ServerConfig
from tinygpt.server.refusals.errors import ApiError, answer_api_error, answer_bug, answer_http_error
from tinygpt.server.routes import all_routes
from tinygpt.server.state import ServerState
from tinygpt.server.transport.access import AccessLog
from tinygpt.server.transport.rest_of_body import RestOfBody
from tinygpt.server.transport.security import HostCheck, KeyCheck


def create_app(llm: LLM, config: ServerConfig) -> Starlette:
    """An app for any ASGI server. The LLM is its owner's to close."""
    state = ServerState(llm, config, int(time.time()))
    routes = all_routes(state)
    paths = frozenset(route.path for route in routes)
    middleware = [
        Middleware(RestOfBody),
        Middleware(AccessLog, state.metrics, lambda start, stop: 0.0, paths),
    ]
    if config.allowed_hosts is not None:
        middleware.append(Middleware(HostCheck, config.allowed_hosts))
    if config.allowed_origins:
        middleware.append(
            Middleware(CORSMiddleware, allow_origins=config.allowed_origins, allow_methods=["*"], allow_headers=["*"])
        )
    if config.api_keys:
        middleware.append(Middleware(KeyCheck, config.api_keys))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={ApiError: answer_api_error, HTTPException: answer_http_error, Exception: answer_bug},
    )
    app.state.server = state
    return app
