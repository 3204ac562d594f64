"""read_form: from a request's body to a form of protocol/, or to one refusal that names the field."""

import json
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from tinygpt.server.errors import ApiError
from tinygpt.server.protocol.fields import Strict
from tinygpt.suggestions import field_hint

Form = TypeVar("Form", bound=Strict)
SHOWN = 100  # characters of a name that a client has made up


def read_form(form: type[Form], body: bytes) -> Form:
    """ApiError at the first thing that is wrong. Of a name that is given twice, the last value counts."""
    given = _read_json(body)
    if not isinstance(given, dict):
        raise ApiError(400, "the body is JSON, and must be an object of it.")
    try:
        return form.model_validate(given)
    except ValidationError as error:
        raise _refusal(error, form, given) from None


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
            return _shown(name) if name.isascii() else None
    return None


def _refusal(error: ValidationError, form: type[Strict], given: dict[str, Any]) -> ApiError:
    """What is wrong with the first field that is. The protocol keeps the list of errors short."""
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    first, name = errors[0], _shown(str(errors[0]["loc"][0]))
    path = ".".join(_path(first["loc"], given, is_missing=first["type"] == "missing"))
    if first["type"] == "extra_forbidden":
        names = [field.alias or name for name, field in form.model_fields.items()]
        hint = field_hint(name, names) if path == name else None
        return ApiError(400, f"unrecognized request argument: {path}{f' ({hint})' if hint else ''}.", name)
    choices = {part for other in errors if other["loc"][0] == name for part in other["loc"][1:2]}
    if len(choices) > 1 and name in form.model_fields:  # a field of several types: each says why it is none of them
        return ApiError(400, f"{name} must be {form.model_fields[name].description or 'of another type'}.", name)
    return ApiError(400, f"{path}: {first['msg']}.", name)


def _path(loc: tuple[int | str, ...], given: Any, is_missing: bool) -> list[str]:
    """Names and positions as the client has them: pydantic puts the types that it has tried between them."""
    found = []
    for part in loc[: len(loc) - is_missing]:
        if (isinstance(given, dict) and part in given) or (isinstance(given, list) and isinstance(part, int)):
            given = given[part]
            found.append(_shown(str(part)))
    return found + [str(part) for part in loc[len(loc) - is_missing :]]


def _shown(name: str) -> str:
    return name if len(name) <= SHOWN else f"{name[:SHOWN]}..."
