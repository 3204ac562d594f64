"""Refusals in OpenAI's shape, with the field that the client sent."""

import json
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..engine.sampling_state import NOT_FINITE
from ..errors import FailedRequestError, NoTokenizerError, QueueFullError, RequestError, TinyGPTError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
NameOf = Callable[[str], str | None]
RETRIED = {429, 500, 503}  # OpenAI's library retries these; other refusals tell it not to
RETRY = {"retry-after": "1"}  # seconds
to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    error: Error


class ApiError(HTTPException):
    """A refused request. param: the wrong field; code: a word that programs can compare."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, **headers: str
    ):
        super().__init__(status, message, headers)
        self.param = param
        self.code = code


BUG = ApiError(500, "internal error: the server's log says more.")  # clients are not told the exception


def error_body(error: HTTPException) -> dict[str, Any]:
    kind = TYPES.get(error.status_code, "invalid_request_error")
    param = getattr(error, "param", None)
    code = getattr(error, "code", None)
    return {"error": {"message": error.detail, "type": kind, "param": param, "code": code}}


def respond(error: HTTPException) -> Response:
    """`x-should-retry` is a header of OpenAI's client library."""
    retry = {} if error.status_code in RETRIED else {"x-should-retry": "false"}
    headers = retry | dict(error.headers or {})
    return Response(to_json(error_body(error)), error.status_code, headers, "application/json")


def from_engine(error: TinyGPTError, name_of: NameOf = lambda field: None) -> ApiError:
    """Return status 400 or 429 for the request's own fault, 500 for another. name_of: the client's, of a field."""
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", **RETRY)
    if not isinstance(error, RequestError):
        is_own = isinstance(error, NoTokenizerError | FailedRequestError) and NOT_FINITE not in str(error)
        return ApiError(400 if is_own else 500, str(error))
    param = name_of(error.field) if error.field else None
    return ApiError(400, str(error.named(param) if param else error), param)
