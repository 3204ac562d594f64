"""Readers of a field's value: each gives the type that the engine sees, and raises TypeError or ValueError.

And `known_keywords`, for constructors that are given a name which they do not have.
"""

import functools
import inspect
import json
import math
import operator
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from tinygpt.errors import RequestError, suggest

MAX_COUNT = 2**31 - 1


def integer(value, low: int, high: int = MAX_COUNT) -> int:
    if isinstance(value, bool):  # True == 1 would be taken for a count
        raise TypeError
    number = operator.index(value)
    if not low <= number <= high:
        raise ValueError
    return number


def real(value, is_allowed: Callable[[float], bool]) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError from error
    if not is_allowed(number):  # false for NaN
        raise ValueError
    return number


def between(low: float, high: float) -> Callable[[object], float]:
    """A reader of numbers from `low` to `high`, both allowed."""
    return lambda value: real(value, lambda number: low <= number <= high)


def seconds(value) -> float | None:
    return None if value is None else real(value, lambda number: 0 < number < math.inf)


def boolean(value) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def one_of(*names: str) -> Callable[[object], str]:
    def read(value) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError
        return value

    return read


def optional_integer(value, low: int, high: int = MAX_COUNT) -> int | None:
    return None if value is None else integer(value, low, high)


def texts(value) -> tuple[str, ...]:
    """None, a text or several: none of them empty."""
    read = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) and text for text in read):
        raise ValueError
    return read


def words(value) -> tuple[str, ...]:
    """As `texts`, each with more than white space."""
    read = texts(value)
    if not all(map(str.strip, read)):
        raise ValueError
    return read


def token_ids(value) -> tuple[int, ...]:
    return () if value is None else tuple(integer(token_id, 0) for token_id in value)


def some_token_ids(value) -> tuple[int, ...] | None:
    """None, or token ids, one at least."""
    read = None if value is None else token_ids(value)
    if read == ():
        raise ValueError
    return read


def one_or_more_token_ids(value) -> tuple[int, ...] | None:
    """As `some_token_ids`, where one id may stand by itself."""
    is_single = value is not None and not hasattr(value, "__iter__")
    return some_token_ids((value,) if is_single else value)


def token_sequences(value) -> tuple[tuple[int, ...], ...]:
    """Lists of token ids, none of them empty."""
    read = () if value is None else tuple(token_ids(sequence) for sequence in value)
    if () in read:
        raise ValueError
    return read


def biases(value, limit: float) -> tuple[tuple[int, float], ...]:
    """A dict (or its pairs) from token ids to numbers from -limit to limit; kept as pairs, which can be hashed."""
    if value is None:
        return ()
    pairs = dict(value if isinstance(value, Mapping) else tuple(value))
    read_bias = between(-limit, limit)
    return tuple((integer(token_id, 0), read_bias(bias)) for token_id, bias in pairs.items())


def name(value) -> str | None:
    if value is not None and not (isinstance(value, str) and value):
        raise ValueError
    return value


def embeddings(value) -> Any:
    """None, or finite numbers as an array (P, C) of float32 of our own that nobody writes to; P is 1 or more."""
    if value is None:
        return None
    import numpy as np  # reading the flags of a command must not wait for it

    array = np.array(value, np.float32)  # (P, C)
    if array.ndim != 2 or not array.size or not np.isfinite(array).all():
        raise ValueError
    array.flags.writeable = False
    return array


def functions(value) -> tuple[Callable, ...]:
    read = () if value is None else (value,) if callable(value) else tuple(value)
    if not all(map(callable, read)):
        raise TypeError
    return read


def alternatives(value) -> tuple[str, ...] | None:
    """None, or texts of which one is to be chosen."""
    if value is None:
        return None
    if isinstance(value, str):  # its letters are not meant
        raise TypeError
    read = texts(value)
    if not read:
        raise ValueError
    return _checked_unicode(read)


def pattern(value) -> str | None:
    """None, or a text that is not empty."""
    return None if value is None else _checked_unicode([name(value)])[0]


def json_schema(value) -> str | None:
    """None, or a JSON schema: a dict, its JSON text, or a class that makes one, such as pydantic's. Kept as text."""
    if value is None:
        return None
    if hasattr(value, "model_json_schema"):
        try:
            value = value.model_json_schema()
        except Exception as error:  # pydantic's own, of a class whose fields no schema can describe
            raise ValueError from error
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        if not isinstance(schema, Mapping):
            raise TypeError
        return _checked_unicode([json.dumps(dict(schema), ensure_ascii=False, allow_nan=False)])[0]
    except RecursionError as error:
        raise ValueError from error


def where_no_json(error: Exception) -> str:
    """The end of a sentence: where a text that had to be JSON is none; nothing if it is, or did not have to."""
    if not isinstance(error, json.JSONDecodeError):
        return ""
    return f"; at line {error.lineno}, column {error.colno} it is no JSON ({error.msg[0].lower()}{error.msg[1:]})"


def _checked_unicode(read):
    """ValueError, which a UnicodeEncodeError is, for half a character."""
    for text in read:
        text.encode("utf-8")
    return read


def known_keywords(noun: str, owner: str) -> Callable[[Callable], Callable]:
    """Have a constructor raise RequestError for an unknown keyword, where Python's own is a TypeError.

    noun: what `owner`, a class, calls its keywords.
    """

    def decorate(init: Callable) -> Callable:
        names = list(inspect.signature(init).parameters)[1:]

        @functools.wraps(init)
        def __init__(self, /, *args, **kwargs):  # "self" may be a keyword too, and is as unknown as any
            if unknown := [name for name in kwargs if name not in names]:
                raise RequestError(f"unknown {noun} {_with_hints(unknown, names, owner)}.")
            init(self, *args, **kwargs)

        return __init__

    return decorate


def _with_hints(unknown: list[str], names: list[str], owner: str) -> str:
    return f"{', '.join(map(repr, unknown))}{suggest(unknown[0], names) or f'; help({owner}) has all names'}"
