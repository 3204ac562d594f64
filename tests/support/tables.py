"""Tables of tests as text: what a file of JSON would hold is written as JSON."""

import json
from typing import Any


def rows(table: str) -> list[tuple[Any, ...]]:
    """Return the cells of each line, which " | " sets apart: JSON, or else text."""
    return [tuple(map(cell, line.split(" | "))) for line in table.strip().splitlines()]


def cell(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()
