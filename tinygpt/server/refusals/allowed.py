"""allowed_at: what a field of a form may be, in words, from the schema that /openapi.json shows."""

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from tinygpt.server.protocol.fields import Strict
from tinygpt.server.protocol.schemas import ModelLimits, Schema, schemas_of

Schemas = dict[str, Schema]  # by name
KEY = "[key]"  # as part of a path: an object's names themselves
_LIMITS = {
    "minimum": "of at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "of at most {}",
    "exclusiveMaximum": "below {}",
}


def allowed_at(form: type[Strict], path: Sequence[str | int], limits: ModelLimits) -> str:
    """What may stand there, as in "a whole number from 1 to 128". path: names of fields, and positions in lists."""
    schemas = _schemas(form, limits)
    found = [schemas[form.__name__]]
    for part in path:
        found = [inner for schema in found for inner in _inside(schema, part, schemas)]
    return _either(dict.fromkeys(_words(schema, schemas) for schema in found)) or "of another type"


@lru_cache(maxsize=64)  # forms
def _schemas(form: type[Strict], limits: ModelLimits) -> Schemas:
    return schemas_of([form], limits)


def _options(schema: Schema, schemas: Schemas) -> Iterator[Schema]:
    """The types that a value may have, null left out: a field that is null is as if it were not there."""
    if "$ref" in schema:
        yield from _options(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    elif "anyOf" in schema:
        for option in schema["anyOf"]:
            yield from _options(option, schemas)
    elif schema.get("type") != "null":
        yield schema


def _inside(schema: Schema, part: str | int, schemas: Schemas) -> Iterator[Schema]:
    for option in _options(schema, schemas):
        if "oneOf" in option:
            for kind in option["oneOf"]:
                yield from _inside(kind, part, schemas)
        elif part == KEY:
            yield {"type": "string", **option.get("propertyNames", {})}
        elif isinstance(part, int):
            yield from [option["items"]] if "items" in option else []
        else:
            inner = option.get("properties", {}).get(part, option.get("additionalProperties"))
            yield from [inner] if isinstance(inner, dict) else []


def _words(schema: Schema, schemas: Schemas) -> str:
    if "description" in schema:
        return schema["description"]
    return _either(dict.fromkeys(_words_of_one(option, schemas) for option in _options(schema, schemas)))


def _words_of_one(schema: Schema, schemas: Schemas) -> str:
    if "const" in schema or "enum" in schema:
        return _either(map(json.dumps, schema.get("enum") or [schema["const"]]))
    if "discriminator" in schema:
        kinds = schema["discriminator"]
        return f"an object whose {kinds['propertyName']} is {_either(map(json.dumps, kinds['mapping']))}"
    match schema.get("type"):
        case "integer":
            return _number("a whole number", schema)
        case "number":
            return _number("a number", schema)
        case "boolean":
            return "true or false"
        case "string":
            return "a text" + _size(schema.get("minLength"), schema.get("maxLength"), " characters")
        case "array":
            size = _size(schema.get("minItems"), schema.get("maxItems"), "")
            return f"a list{size}, each {_words(schema['items'], schemas)}"
        case _:
            *others, last = schema.get("properties") or [""]
            return f"an object with {', '.join(others)} and {last}" if others else "an object"


def _number(noun: str, schema: Schema) -> str:
    limits = {
        name: f"{schema[name]:g}" if isinstance(schema[name], float) else schema[name]
        for name in _LIMITS
        if name in schema
    }
    if limits.keys() == {"minimum", "maximum"}:
        return f"{noun} from {limits['minimum']} to {limits['maximum']}"
    return " ".join([noun, " and ".join(_LIMITS[name].format(limit) for name, limit in limits.items())]).rstrip()


def _size(least: int | None, most: int | None, unit: str) -> str:
    if most is None:
        return " that is not empty" if least else ""
    return f" of {f'{least} to' if least else 'up to'} {most}{unit}"


def _either(words: Any) -> str:
    *others, last = [*words] or [""]
    return f"{', '.join(others)} or {last}" if others else last
