"""Tables of tests as text: what a file of JSON would hold is written as JSON."""

import json
from typing import Any


def rows(table: str) -> list[tuple[Any, ...]]:
    """Return the cells of each line, which " | " sets apart: JSON, or else text. Indented lines continue one."""
    lines = table.strip().replace("\n  ", " ").splitlines()
    return [tuple(map(cell, line.split(" | "))) for line in lines]


def column(table: str) -> list[Any]:
    """Return the cells of a table with one of them in a line."""
    return [value for (value,) in rows(table)]


def fields(table: str, **names: Any) -> dict[str, dict[str, Any]]:
    """Return the keyword arguments of each line, by its name: "greedy: temperature=0, n=3"."""
    lines = (line.partition(":") for line in table.strip().splitlines())
    return {name: eval(f"dict({given})", names) for name, _, given in lines}


def cell(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        if text.lstrip().startswith(("{", "[", '"')):
            raise
        return text.strip()
