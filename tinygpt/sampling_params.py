"""What a request may ask of decoding: the fields, their defaults and their limits."""

import functools
import math
import operator
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from numbers import Real
from typing import Any, TypeVar

from tinygpt.errors import RequestError

MAX_COUNT = 2**31 - 1
MAX_SEED = 2**64 - 1
MAX_SAMPLES = 10_000  # of one prompt: all of them are kept in memory until the last is finished
# Logits are float32: divided by less than this, they overflow to infinity.
MIN_TEMPERATURE = 1e-30

_Class = TypeVar("_Class", bound=type)


def _refuse_unknown_fields(cls: _Class) -> _Class:
    """Make the constructor raise RequestError for an unknown keyword, where Python's own is a TypeError."""
    init = cls.__init__

    @functools.wraps(init)
    def __init__(self, /, *args, **kwargs):  # "self" may be a keyword too, and is as unknown as any
        names = [field.name for field in fields(cls)]
        if unknown := [name for name in kwargs if name not in names]:
            raise RequestError(_describe_unknown(unknown, names))
        init(self, *args, **kwargs)

    cls.__init__ = __init__
    return cls


@_refuse_unknown_fields
@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request. A RequestError (a ValueError) names every impossible value.

    max_tokens: tokens to generate at most, 1 or more.
    temperature: what logits are divided by; 0 is greedy (the most probable token, ties to the lowest id).
    top_k: only the k most probable tokens stay, and those tied with the k-th; 0 is off.
    top_p: of those, only the most probable stay that reach probability p, the last one included; 1.0 is off.
    seed: 0 to 2**64 - 1; the same seed and prompt give the same tokens. None: the engine draws one.
    n: samples per prompt, 1 to 10 000.
    stop: text, or several texts, that ends a sample and is cut off it.
    stop_token_ids: token ids that end a sample.
    ignore_eos: go on past the end-of-text token.
    logprobs: how many of the most probable tokens to report at each step (0: the chosen one alone).
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    n: int = 1
    stop: str | Iterable[str] | None = None  # kept as tuple[str, ...]
    stop_token_ids: Iterable[int] | None = None  # kept as tuple[int, ...]
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        problems = []
        for name, (allowed, normalise) in _RULES.items():
            given = getattr(self, name)
            try:
                object.__setattr__(self, name, normalise(given))
            except (TypeError, ValueError):
                problems.append(f"{name}={reprlib.repr(given)} is not possible: it must be {allowed}")
        if problems:
            raise RequestError("; ".join(problems) + ".")


def _describe_unknown(unknown: list[str], names: list[str]) -> str:
    hints = {name: get_close_matches(name, names, n=1) for name in unknown}
    listed = [f"{name!r}" + (f" (did you mean {hint[0]!r}?)" if hint else "") for name, hint in hints.items()]
    return f"unknown sampling field {', '.join(listed)}; the fields are {', '.join(names)}."


# Each reads one value into the type that the engine sees, and raises TypeError or ValueError if it cannot.


def _integer(value, low: int, high: int = MAX_COUNT) -> int:
    if isinstance(value, bool):  # True == 1 would be taken for a count
        raise TypeError
    number = operator.index(value)
    if not low <= number <= high:
        raise ValueError
    return number


def _real(value, is_allowed: Callable[[float], bool]) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError from error
    if not is_allowed(number):  # false for NaN
        raise ValueError
    return number


def _boolean(value) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _texts(value) -> tuple[str, ...]:
    texts = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError
    return texts


def _token_ids(value) -> tuple[int, ...]:
    return () if value is None else tuple(_integer(token_id, 0) for token_id in value)


def _optional(value, low: int, high: int = MAX_COUNT) -> int | None:
    return None if value is None else _integer(value, low, high)


_RULES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "max_tokens": ("a whole number from 1 to 2**31 - 1", lambda value: _integer(value, 1)),
    "temperature": (
        f"0 (greedy) or a finite number, {MIN_TEMPERATURE:g} or more",
        lambda value: _real(value, lambda number: number == 0 or MIN_TEMPERATURE <= number < math.inf),
    ),
    "top_k": ("a whole number from 0 (off) to 2**31 - 1", lambda value: _integer(value, 0)),
    "top_p": (
        "a number above 0 and at most 1 (off)",
        lambda value: _real(value, lambda number: 0 < number <= 1),
    ),
    "seed": ("None or a whole number from 0 to 2**64 - 1", lambda value: _optional(value, 0, MAX_SEED)),
    "n": (f"a whole number from 1 to {MAX_SAMPLES}", lambda value: _integer(value, 1, MAX_SAMPLES)),
    "stop": ("None, a text or a list of texts, none of them empty", _texts),
    "stop_token_ids": ("None or a list of token ids, each a whole number from 0 to 2**31 - 1", _token_ids),
    "ignore_eos": ("True or False", _boolean),
    "logprobs": ("None or a whole number from 0 to 2**31 - 1", lambda value: _optional(value, 0)),
}
