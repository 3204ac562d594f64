"""create_app: the ASGI app of one model."""

import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from tinygpt.llm import LLM
from tinygpt.server.config import ServerConfig
from tinygpt.server.errors import ApiError, answer_api_error, answer_bug, answer_http_error
from tinygpt.server.routes import completions, health, models, page
from tinygpt.server.state import ServerState


def create_app(llm: LLM, config: ServerConfig) -> Starlette:
    """An app for any ASGI server. The LLM is its owner's to close."""
    state = ServerState(llm, config, int(time.time()))
    app = Starlette(
        routes=[*completions.routes(state), *models.routes(state), *health.routes(state), *page.routes()],
        exception_handlers={ApiError: answer_api_error, HTTPException: answer_http_error, Exception: answer_bug},
    )
    app.state.server = state
    return app
