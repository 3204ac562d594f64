"""Tables of tests as text: what a file of JSON would hold is written as JSON."""

import json
from typing import Any


def rows(table: str) -> list[tuple[Any, ...]]:
    """Return the cells of each line, which " | " sets apart: JSON, or else text. Indented lines continue one."""
    lines = table.strip().replace("\n  ", " ").splitlines()
    return [tuple(map(cell, line.split(" | "))) for line in lines]


def cell(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()
