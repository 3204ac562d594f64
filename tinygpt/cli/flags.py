"""Types of flags: they read a flag's text, and say what is allowed where argparse would name a Python function."""

import argparse
from collections.abc import Callable
from typing import Any

from tinygpt.config import DTYPES


def reader(read: Callable[[str], Any], allowed: str) -> Callable[[str], Any]:
    """A type for argparse. `read` raises ValueError or KeyError for what is not `allowed`, which ends a sentence."""

    def parse(text: str) -> Any:
        try:
            return read(text)
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"it is {text!r} and must be {allowed}.") from None

    return parse


def _dtypes(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if not {*names} <= {*ALL_DTYPES}:
        raise ValueError
    return names


ALL_DTYPES = ("auto", *DTYPES)
whole_number = reader(int, "a whole number")
number = reader(float, "a number")
whole_numbers = reader(lambda text: tuple(map(int, text.split(","))), "a whole number, or several separated by commas")
dtypes = reader(_dtypes, f"one of {', '.join(ALL_DTYPES)}, or several separated by commas")
