"""How messages name what files hold, of which there may be any number and any size."""

from collections.abc import Sequence
from typing import Any

MAX_NAMED, MAX_SHOWN = 8, 200  # names, characters


def listed(names: Sequence[str], most: int = MAX_NAMED) -> str:
    """The first few of many names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def shown(value: Any) -> str:
    """`value` as Python writes it, or its beginning: never with what a terminal would obey."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
