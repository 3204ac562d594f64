"""Texts of a schema beside jsonschema and integers: they fit it, or it is refused by name before any work."""

import json
import random

import numpy as np
import pytest

from support.tables import rows
from tinygpt.engine.grammar_process import Matchers

pytest.importorskip("llguidance", reason="llguidance, the extra `guided`, is not installed")

TOKENS = [*(bytes([byte]) for byte in range(256)), b""]  # the last is the end
PRINTABLE = range(32, 127)
INTEGER = {"type": "integer"}


def matchers_of(field, value) -> tuple[Matchers, str]:
    """Return what follows a grammar, and the reason if it is refused."""
    matchers = Matchers(TOKENS, [])
    text = value if isinstance(value, str) else json.dumps(value)
    return matchers, matchers.read(field, text) or matchers.compile()


def allowed(matchers, sample: int) -> list[int]:
    packed, error = matchers.mask(sample)
    assert not error, error
    return [token for token in range(257) if packed[token // 8] >> token % 8 & 1]


def texts_of(schema, count: int = 8) -> list[str] | str:
    """Return random texts that the masks allow, or the reason why the schema is refused."""
    matchers, problem = matchers_of("guided_json", schema)
    if problem:
        return problem
    chosen, texts = random.Random(0), []
    for sample in range(count):
        text = b""
        while (ids := allowed(matchers, sample)) != [256] and len(text) < 400:
            token = chosen.choice([i for i in ids if i in PRINTABLE or i == 256] or ids)
            if token == 256:
                break
            matchers.take(sample, token)
            text += TOKENS[token]
        texts.append(text.decode())
    return texts


def is_allowed(schema, text: str) -> bool:
    matchers, problem = matchers_of("guided_json", schema)
    assert not problem, problem
    for byte in text.encode():
        if byte not in allowed(matchers, 0):
            return False
        matchers.take(0, byte)
    return True


LARGE = 2**53
# Bounds, the lowest and the highest number that they allow, and whether they are served.
BOUNDS = [
    ({"minimum": LARGE - 5, "maximum": LARGE}, LARGE - 5, LARGE, True),
    ({"minimum": LARGE + 1, "maximum": LARGE + 3}, LARGE + 1, LARGE + 3, False),
    ({"minimum": LARGE + 2, "maximum": LARGE + 4}, LARGE + 2, LARGE + 4, True),
    ({"exclusiveMinimum": LARGE, "maximum": LARGE + 4}, LARGE + 1, LARGE + 4, False),
    ({"minimum": LARGE - 8, "exclusiveMaximum": LARGE}, LARGE - 8, LARGE - 1, False),
    ({"minimum": 10**18, "maximum": 10**18 + 512}, 10**18, 10**18 + 512, True),
    ({"minimum": 10**18 + 1, "maximum": 10**18 + 9}, 10**18 + 1, 10**18 + 9, False),
    ({"minimum": -(10**18) - 9, "maximum": -(10**18) - 1}, -(10**18) - 9, -(10**18) - 1, False),
    ({"minimum": 2**60, "maximum": 2**63 - 1}, 2**60, 2**63 - 1, True),
    ({"minimum": 2**60, "maximum": 2**64 - 1}, 2**60, 2**64 - 1, True),
    ({"minimum": 2**63 - 9, "maximum": 2**63 - 1}, 2**63 - 9, 2**63 - 1, False),
    ({"minimum": 2**63, "maximum": 2**63 + 1}, 2**63, 2**63 + 1, False),
    ({"minimum": 10**400}, 10**400, None, False),
    ({"minimum": 1e16, "exclusiveMaximum": 1e16 + 2}, 10**16, 10**16 + 1, False),
    ({"enum": [LARGE + 1, 3]}, 3, LARGE + 1, False),
    ({"const": 2**63}, 2**63, 2**63, False),
    ({"const": 2**60}, 2**60, 2**60, True),
    ({"minimum": 2.0, "maximum": 4.0}, 2, 4, True),
]


@pytest.mark.parametrize(("bounds", "low", "high", "is_served"), BOUNDS, ids=lambda value: str(value)[:50])
def test_whole_numbers_stay_whole(bounds, low, high, is_served):
    for schema in (
        INTEGER | bounds,
        {"items": INTEGER | bounds, "type": "array", "minItems": 1.0, "maxItems": 1},
    ):
        texts = texts_of(schema)
        assert isinstance(texts, list) == is_served, texts
        if is_served:
            values = np.ravel([json.loads(text) for text in texts]).tolist()
            assert all(low <= value <= high for value in values)
        else:
            assert any(texts.startswith(f"{keyword} ") for keyword in bounds)


def test_numbers_of_a_schema_within_a_grammar_stay_whole():
    grammar = f"start: %json {json.dumps(INTEGER | {'minimum': LARGE + 1})}"
    assert matchers_of("guided_grammar", grammar)[1].startswith("minimum is 9007199254740993")
    assert not matchers_of("guided_grammar", grammar.replace("993", "990"))[1]


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_a_number_beyond_int64_is_refused_by_name(kind):
    problem = texts_of({"type": kind, "maximum": -(2**64) - 1})
    assert problem.startswith("maximum is -18446744073709551617")


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize(("keyword", "bound"), [("minimum", 10**18), ("maximum", -(10**18))])
def test_a_large_bound_without_the_other_is_refused_in_our_words(kind, keyword, bound):
    problem = texts_of({"type": kind, keyword: bound})
    assert f"{keyword} has 19 digits or more" in problem
    assert "between -10**18 and 10**18" in problem


# What the grammar would not keep, and the keyword that the refusal begins with.
REFUSED = rows("""
minProperties | {"patternProperties": {"^x[01]$": {"type": "integer"}}, "minProperties": 2,
  "additionalProperties": false}
minProperties | {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2}
minProperties | {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 3,
  "additionalProperties": {}}
patternProperties | {"properties": {"x1": {"type": "integer", "multipleOf": 7}},
  "patternProperties": {"^x1$": {"type": "integer", "maximum": 50}}}
patternProperties | {"required": ["x1"], "patternProperties": {"1": {"type": "integer"}}}
patternProperties | {"allOf": [{"properties": {"x1": {"type": "integer"}}}, {"patternProperties": {"^x1$": {}}}]}
patternProperties | {"$ref": "#/$defs/a", "$defs": {"a": {"patternProperties": {"^x": {}}}}, "properties": {"x": {}}}
multipleOf | {"allOf": [{"type": "integer", "multipleOf": 65536}, {"multipleOf": 65537}]}
multipleOf | {"allOf": [{"type": "number", "multipleOf": 0.0001}, {"multipleOf": 999999.7}]}
""")


@pytest.mark.parametrize(("keyword", "schema"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_is_not_kept_is_refused_by_name(keyword, schema):
    problem = texts_of(schema)
    assert isinstance(problem, str), problem
    assert problem.startswith(keyword)


SERVED = rows("""
{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "minProperties": 2,
  "additionalProperties": {"enum": [1]}}
{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"],
  "minProperties": 2}
{"properties": {"x": {"type": "object", "patternProperties": {"^y": {"enum": [1]}}}}, "type": "object"}
{"allOf": [{"type": "integer", "multipleOf": 4}, {"multipleOf": 6}]}
""")


@pytest.mark.parametrize("schema", [schema for (schema,) in SERVED], ids=lambda value: str(value)[:50])
def test_what_is_kept_is_served(schema):
    jsonschema = pytest.importorskip("jsonschema")
    for text in texts_of(schema):
        if len(text) < 400:
            jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": INTEGER}, "required": ["a"], "additionalProperties": {"enum": ["x"]}},
        {"patternProperties": {"^a$": INTEGER}, "additionalProperties": {"enum": ["x"]}},
    ],
)
def test_a_key_is_spelled_in_one_way(schema):
    """Spelled in another, it would be a key of another keyword, and the value of this one."""
    assert is_allowed({"type": "object", **schema}, '{"a":1,"b":"x"}')
    assert not is_allowed({"type": "object", **schema}, '{"a":1,"\\u0061":"x"}')


WORDS = [
    "allOf",
    "not",
    "if",
    "$ref",
    "patternProperties",
    "dependentSchemas",
    "unevaluatedProperties",
    "anyOf",
]
# Schemas with a word in other positions than a keyword's.
PLACES = rows("""
{"properties": {"WORD": {"type": "integer"}}, "required": ["WORD"]}
{"properties": {"a": {"enum": ["and", "WORD"]}}}
{"properties": {"a": {"const": "WORD"}}}
{"properties": {"a": {"const": {"WORD": "#/$defs/b"}}}}
{"properties": {"a": {"type": "integer"}}, "title": "WORD", "description": "WORD"}
{"properties": {"a": {"type": "string", "default": "WORD", "examples": [{"WORD": []}]}}, "$comment": "WORD"}
{"properties": {"a": {"$ref": "#/$defs/WORD"}}, "$defs": {"WORD": {"type": "integer"}}}
{"properties": {"a": {"$ref": "#/definitions/WORD"}}, "definitions": {"WORD": {"properties": {"b": {}}}}}
""")


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("place", [json.dumps(schema) for (schema,) in PLACES])
def test_a_word_in_another_position_is_no_keyword(place, word):
    schema = {"type": "object", **json.loads(place.replace("WORD", word))}
    assert not is_allowed(schema, '{"other"')
    assert is_allowed(schema, f'{{"{next(iter(schema["properties"]))}"')


FORMATS = [
    "password",
    "path",
    "file-path",
    "binary",
    "json-string",
    "base64",
    "ipv4network",
    "regex",
    "color",
]


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_that_only_annotates_is_passed_over(name):
    assert is_allowed(
        {"type": "object", "properties": {"a": {"type": "string", "format": name}}}, '{"a":"/ä b"}'
    )
    assert is_allowed({"properties": {"format": {"const": name}}, "type": "object"}, f'{{"format":"{name}"}}')


def test_a_format_that_the_grammar_has_is_kept():
    schema = {"type": "string", "format": "hostname"}
    assert is_allowed(schema, f'"{"a" * 63}.{"b" * 63}"')
    assert not is_allowed(schema, f'"{"a" * 64}')
    assert not is_allowed({"type": "string", "format": "date"}, '"2023-13')
    assert isinstance(texts_of({"type": "string", "format": "password", "not": {}}), str)
