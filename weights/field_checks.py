"""What the fields of a JSON file may be, checked, because the file may come from anywhere."""

from collections.abc import Callable, Mapping
from typing import Any

from tinygpt.weights.messages import shown

# For each field, whether a value is possible, and in words what it must be.
Checks = Mapping[str, tuple[Callable[[Any], bool], str]]


def wrong_fields(values: Mapping[str, Any], checks: Checks) -> list[str]:
    """What is wrong with each of `values` that is not possible."""
    return [
        f"{name} is {shown(values[name])} and must be {wanted}"
        for name, (is_possible, wanted) in checks.items()
        if name in values and not is_possible(values[name])
    ]


def is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not is_bool(value)


def is_number(value: Any) -> bool:
    return is_whole(value) or isinstance(value, float)
