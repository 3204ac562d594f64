"""How messages name what files hold, of which there may be any number and any size."""

from collections.abc import Sequence

MAX_NAMED = 8


def listed(names: Sequence[str], most: int = MAX_NAMED) -> str:
    """The first few of many names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
