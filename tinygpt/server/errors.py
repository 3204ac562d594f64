"""Refusals in the shape that OpenAI's clients read."""

from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tinygpt.errors import NoTokenizerError, QueueFullError, RequestError, TinyGPTError, suggest
from tinygpt.server.protocol import Strict
from tinygpt.server.replies import to_json

RETRIED = {429, 500, 503}  # OpenAI's library retries these; other refusals tell it not to
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
TYPES |= {500: "server_error", 503: "server_error"}
MAX_SHOWN = 100  # characters of a field name that the client made up


class ApiError(HTTPException):
    """A refused request. param: the wrong field; code: a word that programs can compare."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(status, message, headers)
        self.param, self.code = param, code


BUG = ApiError(500, "internal error: the server's log says more.")  # clients are not told the exception


def error_body(error: HTTPException) -> dict[str, Any]:
    kind = TYPES.get(error.status_code, "invalid_request_error")
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return {"error": {"message": error.detail, "type": kind, "param": param, "code": code}}


def respond(error: HTTPException) -> Response:
    """Return the reply. `x-should-retry` is a header of OpenAI's client library."""
    retry = {} if error.status_code in RETRIED else {"x-should-retry": "false"}
    headers = retry | dict(error.headers or {})
    return Response(to_json(error_body(error)), error.status_code, headers, "application/json")


def from_validation(error: RequestValidationError, form: type[Strict] | None) -> ApiError:
    """Return a refusal with the most specific error, a missing field last."""
    found = [(_path(each["loc"][1:], error.body), each) for each in error.errors()]
    path, first = max(found, key=lambda pair: (pair[1]["type"] != "missing", len(pair[0])))
    if first["type"] == "json_invalid" or not path:
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(400, f"the body must be a JSON object: {reason}.")
    param, name = path[0], ".".join(path)
    if first["type"] != "extra_forbidden":
        return ApiError(400, f"{name}: {first['msg']}", param)
    known = [field.alias or name for name, field in form.model_fields.items()] if form and len(path) == 1 else []
    return ApiError(400, f"unrecognized request argument: {name}{suggest(param, known) or '.'}", param)


def from_engine(error: TinyGPTError, form: Strict | None = None) -> ApiError:
    """Return status 400 or 429 for a refusal of the engine, 500 for a failure. form: for the field's name."""
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"retry-after": "1"})
    if not isinstance(error, RequestError):
        return ApiError(400 if isinstance(error, NoTokenizerError) else 500, str(error))
    param = form.name_of(error.field) if form and error.field else None
    return ApiError(400, str(error.named(param) if param else error), param)


def _path(place: tuple[str | int, ...], given: Any) -> list[str]:
    """Return the names and positions in the body: pydantic also lists the types of a union that it tried."""
    path = []
    for part in place:
        is_there = part in given if isinstance(given, dict) else isinstance(given, list) and isinstance(part, int)
        if is_there or part == place[0]:
            path.append(text if len(text := str(part)) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")
            given = given[part] if is_there else None
    return path
