"""How many examples and cases a test has: all with --slow, fewer of them every day."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings

ALL, SOME = "all examples", "a third of them"

# A first example may wait for a kernel to compile, so no deadline.
settings.register_profile(ALL, deadline=None, print_blob=True, max_examples=100)
settings.register_profile(SOME, settings.get_profile(ALL), max_examples=34)


def choose(is_slow: bool) -> None:
    settings.load_profile(ALL if is_slow else SOME)


def are_all() -> bool:
    return settings.default.max_examples == settings.get_profile(ALL).max_examples


def examples(count: int) -> int:
    """For a property that is not tried with as many as others."""
    return count if are_all() else -(-count // 3)


def daily(cases: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """Return a test's parameters, of which those that are not chosen run with --slow."""
    return [case if case in chosen else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
