"""Types of flags: they read a flag's text, and say what is allowed where argparse would name a Python function."""

import argparse
from collections.abc import Callable
from typing import Any


def reader(read: Callable[[str], Any], allowed: str) -> Callable[[str], Any]:
    """A type for argparse. `read` raises ValueError or KeyError for what is not `allowed`, which ends a sentence."""

    def parse(text: str) -> Any:
        try:
            return read(text)
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"it is {text!r} and must be {allowed}.") from None

    return parse


whole_number = reader(int, "a whole number")
number = reader(float, "a number")
