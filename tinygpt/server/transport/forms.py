"""read_form: from a request's body to a form of protocol/, or to one refusal that names the field."""

import json
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from tinygpt.server.protocol.fields import Strict
from tinygpt.server.protocol.schemas import ModelLimits
from tinygpt.server.refusals.allowed import KEY, allowed_at
from tinygpt.server.refusals.errors import ApiError
from tinygpt.server.refusals.unknown_fields import hint_for

Form = TypeVar("Form", bound=Strict)
SHOWN = 100  # characters of what a client has made up
OF_KIND = ("union_tag_invalid", "union_tag_not_found")  # pydantic's errors about the field that says which kind it is


def read_form(form: type[Form], limits: ModelLimits, body: bytes) -> Form:
    """ApiError at the first thing that is wrong. Of a name that is given twice, the last value counts."""
    given = _read_json(body)
    if not isinstance(given, dict):
        raise ApiError(400, "the body is JSON, and must be an object of it.")
    try:
        return form.model_validate(given)
    except ValidationError as error:
        raise _refusal(error, form, limits, given) from None


def _read_json(body: bytes) -> Any:
    try:
        return from_json(body)
    except ValueError as error:
        name = _half_a_character(body) if "hex escape" in str(error) else None
        if name is not None:
            raise ApiError(400, f"{name} holds half a character, a lone surrogate: no text has one.", name) from None
        raise ApiError(400, f"the body is no JSON object that this server reads: {error}.") from None


def _half_a_character(body: bytes) -> str | None:
    """The first field with a surrogate that lacks its other half; None where that is not how the body is broken."""
    try:
        given = json.loads(body)  # which takes them
    except (ValueError, RecursionError):
        return None
    for name, value in given.items() if isinstance(given, dict) else ():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return _cut(name) if name.isascii() else None
    return None


def _refusal(error: ValidationError, form: type[Strict], limits: ModelLimits, given: dict[str, Any]) -> ApiError:
    """What is wrong with the first field that is; what is missing comes last, as it may be there by a wrong name.

    The protocol keeps the list of errors short.
    """
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    first = _of_one_type(min(errors, key=lambda each: each["type"] == "missing"), errors, given)
    name, path = _cut(str(first["loc"][0])), _path(first, given)
    written = ".".join(_cut(str(part)) for part in path)
    if first["type"] == "extra_forbidden":
        hint = hint_for(name, form) if len(path) == 1 else None
        return ApiError(400, f"unrecognized request argument: {written}{f' ({hint})' if hint else ''}.", name)
    if first["loc"][-1] == KEY:
        allowed = allowed_at(form, [*path[:-1], KEY], limits)
        return ApiError(400, f"{name} has the key {_shown(path[-1])}, and a key must be {allowed}.", name)
    allowed = allowed_at(form, path, limits)
    if _is_missing(path, given):
        return ApiError(400, f"{written} is missing: give {allowed}.", name)
    return ApiError(400, f"{written} is {_shown(_at(path, given))} and must be {allowed}.", name)


def _of_one_type(first: ErrorDetails, errors: list[ErrorDetails], given: Any) -> ErrorDetails:
    """Of a field of several types, what is wrong inside, where one type alone is what was meant.

    pydantic says first that it is not the first type, whose name is behind the field's.
    """
    depth = len(first["loc"]) - 1
    inside = [each for each in errors if each["loc"][:depth] == first["loc"][:depth] and len(each["loc"]) > depth + 1]
    is_clear = len(_path(first, given)) == depth and len({each["loc"][depth] for each in inside}) == 1
    return inside[0] if is_clear else first


def _path(error: ErrorDetails, given: Any) -> list[str | int]:
    """Names and positions as the client has them: pydantic puts the types that it has tried between them."""
    *found, last = error["loc"] if error["type"] == "missing" else (*error["loc"], None)
    path = []
    for part in found:
        if (isinstance(given, dict) and part in given) or (isinstance(given, list) and isinstance(part, int)):
            given = given[part]
            path.append(part)
    return [*path, *([last] if last is not None else []), *(["type"] if error["type"] in OF_KIND else [])]


def _at(path: list[str | int], given: Any) -> Any:
    for part in path:
        given = given[part]
    return given


def _is_missing(path: list[str | int], given: Any) -> bool:
    inner = _at(path[:-1], given)
    return isinstance(inner, dict) and path[-1] not in inner


def _shown(value: Any) -> str:
    """A value in a sentence: a long one is not made JSON again."""
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, dict):
        return "an object"
    return _cut(json.dumps(value[: SHOWN + 1] if isinstance(value, str) else value))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
