"""A report on stdout: sections with aligned lines, or the same as JSON."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tinygpt.cli.output.messages import put

INDENT = "  "


def print_json(report: Mapping[str, Any]) -> None:
    put(json.dumps(report, ensure_ascii=False, indent=2))


def print_fields(title: str, values: Mapping[str, Any]) -> None:
    """A section with a line for each value: None is "none", and lists are joined by commas."""
    print_table(title, [(name, _shown(value)) for name, value in values.items()])


def print_table(title: str, rows: Iterable[Sequence[Any]]) -> None:
    """A section with a line for each row, its columns aligned."""
    cells = [[str(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    put(title)
    for row in cells:
        line = INDENT.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        put(f"{INDENT}{line}".rstrip())


def once(error: Any, refused: Sequence[str]) -> Any:
    """What a text says of an error that it says among what is refused, too."""
    return 'see "refused"' if error in refused else error


def table_format() -> str:
    """How a table goes to stdout: "text", aligned by spaces, on a terminal, and "md" anywhere else."""
    return "text" if sys.stdout.isatty() else "md"


def size_text(size: int | None) -> str:
    """A number of bytes with a decimal unit: 13.9 MB. None is unknown."""
    if size is None:
        return "unknown"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value)) or "none"
    return str(value)
