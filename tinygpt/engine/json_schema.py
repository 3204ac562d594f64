"""JSON schemas as grammars can keep them: keywords in keyword position, closed objects, refusals by name.

llguidance reads bounds as float64 and whole numbers as int64, and does not compare the keys of an object.
"""

import json
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from decimal import Decimal
from math import lcm
from typing import Any
from urllib.parse import unquote

BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref")
ELSEWHERE = ("prefixItems", "items", "additionalItems", "unevaluatedItems", "contains", "contentSchema")
ELSEWHERE += ("additionalProperties", "unevaluatedProperties", "propertyNames", "not", "if", "then", "else")
ALL = (*BY_NAME, *IN_PLACE, *ELSEWHERE)

# A closed object is another condition inside of these: the schema stays as it is.
COMBINING = {"allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "patternProperties"}
HAVING_KEYS = {"anyOf", "oneOf", "$ref"}  # may have the properties of an object that these stand in
# Other formats are annotations: the package would refuse them.
FORMATS = {
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
    "unknown",
}
EXACT = 2**53  # float64 has all whole numbers up to it
MAX_INT = 2**63 - 1
MAX_MULTIPLE = 2**32 - 1  # the package's least common multiples wrap around
# As json.dumps writes, or less. A small model that may write any white space often writes nothing else.
SPACES = {"whitespace_pattern": "[ ]?"}
# Without \u, by which a key could be spelled that another keyword has conditions for.
ONE_SPELLING = {"json_allowed_escapes": 'nrbtf\\"'}

Schema = dict[str, Any]


def subschemas(schema: Any, keywords: Collection[str] = ALL, root: Any = None) -> Iterator[Schema]:
    """Yield each object in the position of a schema once: `schema`, and those below these keywords.

    root: what references are read in, if it is another.
    """
    pending, seen = [schema], set()
    while pending:
        node = pending.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        for keyword in keywords:
            value = node.get(keyword)
            if keyword == "$ref":
                pending.append(_target(root or schema, value))
            elif keyword in BY_NAME:
                pending += value.values() if isinstance(value, dict) else ()
            else:
                pending += value if isinstance(value, list) else [value]


def _target(schema: Any, reference: Any) -> Any:
    """Return what a JSON pointer names, or None."""
    with suppress(LookupError, ValueError, TypeError, AttributeError):
        for part in reference.removeprefix("#").split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            schema = schema[int(name) if isinstance(schema, list) else name]
        return schema


def whole_number(text: str) -> float:
    """Read a number of JSON that has a fraction or an exponent: 2.0 is 2."""
    number = float(text)
    return int(number) if abs(number) <= EXACT and number.is_integer() else number


def prepared(text: str, has_open_schemas: bool) -> Schema:
    """Return a schema for the package. Raise ValueError for what no grammar would keep."""
    schema = json.loads(text, parse_float=whole_number)
    if not has_open_schemas:
        close(schema)
    check(schema)
    options = SPACES
    for node in subschemas(schema):
        if isinstance(name := node.get("format"), str) and name not in FORMATS:
            del node["format"]
        has_names = _names(node, "properties", "required", "patternProperties")
        if has_names and node.get("additionalProperties") is not False:
            options = SPACES | ONE_SPELLING
    return {"x-guidance": options, **schema}


def check_embedded(grammar: str) -> None:
    """Check the schemas of a grammar in Lark's syntax, as `check` does."""
    for found in re.finditer(r"%json\s*(?=\{)", grammar):
        with suppress(json.JSONDecodeError):
            schema, _ = json.JSONDecoder(parse_float=whole_number).raw_decode(grammar, found.end())
            check(schema)


def close(schema: Schema) -> None:
    """Let objects have no keys but their properties, if the schema does not say otherwise."""
    nodes = [*subschemas(schema)]
    if all(map(_can_close, nodes)):
        for node in nodes:
            if "properties" in node:
                node.setdefault("additionalProperties", False)


def _can_close(node: Schema) -> bool:
    """Return whether an object lists all properties that it asks for."""
    lists_all = {*_names(node, "required")} <= {*_names(node, "properties")}
    has_more = {"properties", "required"} & node.keys() and HAVING_KEYS & node.keys()
    return lists_all and not has_more and not COMBINING & node.keys()


def _names(node: Schema, *keywords: str) -> list[str]:
    """Return the names that an object or a list has. What is malformed the package refuses."""
    values = [value for keyword in keywords if isinstance(value := node.get(keyword), dict | list)]
    return [name for value in values for name in value if isinstance(name, str)]


def check(schema: Schema) -> None:
    """Raise ValueError, with the keyword, for conditions that the package would not keep."""
    nodes = [*subschemas(schema)]
    for node in nodes:
        _check_numbers(node)
        least = node.get("minProperties")
        if isinstance(least, int) and least > len({*_names(node, "required")}) + 1 and _has_free_keys(node):
            raise ValueError(f"minProperties is {least}, and a key that no property lists may come twice")
    _check_multiples(nodes)
    if any("patternProperties" in node for node in nodes):
        for node in nodes:
            _check_patterns([*subschemas(node, IN_PLACE, schema)])


def _has_free_keys(node: Schema) -> bool:
    return node.get("additionalProperties") is not False or "patternProperties" in node


def _check_numbers(node: Schema) -> None:
    is_integer = "number" not in str(node.get("type", "number"))
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        value = node.get(keyword)
        if not isinstance(value, int | float) or value % 1 != 0:
            continue
        number = int(value)
        is_kept = abs(number) <= EXACT - keyword.startswith("exclusive")
        if not is_integer:
            is_kept |= abs(number) <= MAX_INT and Decimal(str(float(number))) == number
        elif keyword in ("minimum", "maximum"):
            is_kept |= _is_exact(number) or (keyword == "maximum" and number >= MAX_INT)
        if not is_kept:
            raise ValueError(f"{keyword} is {number}, and grammars keep whole numbers up to 2**53")
    constants = [node.get("const"), node.get("enum")]
    while constants:
        value = constants.pop()
        if isinstance(value, dict | list):
            constants += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and not _is_exact(value):
            keyword = "const" if "const" in node else "enum"
            raise ValueError(f"{keyword} has {value}, and grammars keep whole numbers up to 2**53")


def _is_exact(number: int) -> bool:
    """Return whether a whole number is the same as float64, and fits into int64."""
    return abs(number) <= MAX_INT and float(number) == number


def in_our_words(problem: str) -> str:
    """Name the keyword of a bound that the package has no regex for: without the other, of 19 digits."""
    if "Failed to generate regex for" not in problem:
        return problem
    keyword, other = ("minimum", "maximum") if "max=None" in problem else ("maximum", "minimum")
    return f"{keyword} has 19 digits or more: without {other}, it must be between -10**18 and 10**18"


def _check_multiples(nodes: list[Schema]) -> None:
    """Refuse numbers that an intersection of subschemas may bring together to one that is too large."""
    values = [value for node in nodes if isinstance(value := node.get("multipleOf"), int | float)]
    if len(values) < 2 or not any(node.keys() & {*IN_PLACE} for node in nodes):
        return
    numbers = [abs(Decimal(str(value))) for value in values]
    places = max(0, *(-int(number.as_tuple().exponent) for number in numbers))
    if lcm(*(int(number.scaleb(places)) for number in numbers)) > MAX_MULTIPLE:
        listed = " and ".join(map(str, values[:3]))
        raise ValueError(f"multipleOf is {listed}, and their common multiples are too large")


def _check_patterns(group: list[Schema]) -> None:
    """Refuse a name with conditions by its pattern and by itself. group: schemas of one object."""
    names = {name for node in group for name in _names(node, "properties", "required")}
    for pattern in [pattern for node in group for pattern in _names(node, "patternProperties")]:
        for name in names:
            if _matches(pattern, name):
                problem = (
                    f"patternProperties has {pattern!r} for {name!r}, which properties or required has, too"
                )
                raise ValueError(problem)


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:  # another syntax than Python's
        return True
