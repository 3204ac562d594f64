"""Refusals in the shape that OpenAI's clients read, whatever has refused."""

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from tinygpt.errors import QueueFullError, TinyGPTError, suggest
from tinygpt.server.protocol.fields import Strict
from tinygpt.server.refusals.wording import for_client

# What a client's retries should do: its library retries these statuses unless it is told that waiting will not help.
RETRIED = {408, 409, 429, 500, 503}
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(Exception):
    """A request is refused with this status. param: the field that is wrong; code: a word that programs can compare."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status, str(self), self.param, self.code)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def queue_full(message: str) -> ApiError:
    return ApiError(429, message, code="queue_full", headers={"retry-after": "1"})


def bug_body() -> dict[str, Any]:
    """Of what nobody has refused: no client is told what went wrong inside."""
    return error_body(500, "internal error: the server's log says more.")


def from_engine(error: TinyGPTError, form: Strict) -> ApiError:
    """What the engine refuses of a request."""
    message, name = for_client(str(error), form)
    if isinstance(error, QueueFullError):
        return queue_full(message)
    return ApiError(400, message, param=name)


async def answer_api_error(request: Request, error: ApiError) -> JSONResponse:
    retried = {} if error.status in RETRIED else {"x-should-retry": "false"}
    return JSONResponse(error.body, error.status, headers={**retried, **error.headers})


async def answer_http_error(request: Request, error: HTTPException) -> JSONResponse:
    message = _no_path(request) if error.status_code == 404 else _no_method(request, error)
    return JSONResponse(error_body(error.status_code, message), error.status_code, headers=error.headers)


def _no_path(request: Request) -> str:
    """A base URL without its /v1 is what is wrong most often."""
    paths = [route.path for route in request.app.routes if "{" not in route.path]
    # As in the log: a path may hold anything.
    path = ascii(request.url.path)[1:-1]
    return f"there is no path {path}{suggest(request.url.path, paths)}: /openapi.json lists all paths."


def _no_method(request: Request, error: HTTPException) -> str:
    methods = {each.strip() for each in (error.headers or {}).get("Allow", "").split(",")} - {"", "HEAD"}
    if error.status_code != 405 or not methods:
        return error.detail
    return f"{request.method} is not possible here: use {' or '.join(sorted(methods))}."


async def answer_bug(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(bug_body(), 500)
