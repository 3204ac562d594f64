"""Refusals in OpenAI's shape, with the field that the client sent."""

import json
import reprlib
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..aliases import OURS
from ..engine.sampling_state import NOT_FINITE
from ..errors import FailedRequestError, NoTokenizerError, QueueFullError, RequestError, TinyGPTError, suggest
from .values import Strict

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
RETRIED = {429, 500, 503}  # OpenAI's library retries these; other refusals tell it not to
RETRY = {"retry-after": "1"}  # seconds
MAX_SHOWN = 100  # characters of a field name that the client made up
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


def from_validation(error: RequestValidationError, form: type[Strict]) -> ApiError:
    """Return a refusal with the most specific error, a missing field last."""
    found = [(_path(each["loc"][1:], error.body), each) for each in error.errors()]
    path, first = max(found, key=lambda pair: (len(pair[0]), pair[1]["type"] != "missing"))
    if first["type"] == "json_invalid" or not path:
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"the body must be a JSON object: {reason}.")
    param, name = path[0], ".".join(path)
    if first["type"] == "missing":
        lacking = "" if first["loc"][-1] == path[-1] else f".{first['loc'][-1]}"
        return ApiError(400, f"{name}{lacking} is required.", param)
    if first["type"] != "extra_forbidden":
        first_reason, *others = dict.fromkeys(
            _reason(each) for one, each in found if one == path
        )  # of a union
        reasons = ", or ".join([first_reason, *(each.removeprefix("Input should be ") for each in others)])
        return ApiError(400, f"{name} is {reprlib.repr(first['input'])}: {reasons}.", param)
    known = form.fields_by_name() if len(path) == 1 else {}
    if known and (ours := OURS.get(param, param)) in form.model_fields:
        ours = form.model_fields[ours].alias or ours
        return ApiError(400, f"{name} and {ours} name one thing: give one of them.", param)
    return ApiError(400, f"unrecognized request argument: {name}{suggest(param, known) or '.'}", param)


def from_engine(error: TinyGPTError, form: Strict | None = None) -> ApiError:
    """Return status 400 or 429 for the request's own fault, 500 for another. form: for the field's name."""
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", **RETRY)
    if not isinstance(error, RequestError):
        is_own = isinstance(error, NoTokenizerError | FailedRequestError) and NOT_FINITE not in str(error)
        return ApiError(400 if is_own else 500, str(error))
    param = form.name_of(error.field) if form and error.field else None
    return ApiError(400, str(error.named(param) if param else error), param)


def _reason(error: dict[str, Any]) -> str:
    return error["msg"].removeprefix("Value error, ")


def _path(place: tuple[str | int, ...], given: Any) -> list[str]:
    """Return the names and positions in the body: pydantic also lists the types of a union that it tried."""
    path = []
    for part in place:
        is_there = (
            part in given if isinstance(given, dict) else isinstance(given, list) and isinstance(part, int)
        )
        if is_there or part == place[0]:
            path.append(text if len(text := str(part)) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")
            given = given[part] if is_there else None
    return path
