"""What a preset gives back: the source's table with our figures in it, as text, as records and as a picture."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinygpt.bench.picture import Picture

NOT_PUBLISHED = "not published"
ABSENT = "-"  # what a note below the table gives the reason for
Record = dict[str, Any]
# A column of the table of an unfinished preset -> how a record fills it.
MEASURED = {
    "dtype": "{dtype}",
    "batch": "{batch_size}",
    "prompts": "{num_prompts}",
    "prompt tokens": "{n_prompt}",
    "new tokens": "{n_gen}",
    "mean (ms)": "{mean_ms:.1f}",
}


@dataclass(frozen=True)
class Study:
    """A published study: where it is to be read, and what its figures are of and were measured on."""

    name: str
    title: str
    source: str
    hardware: str
    model: str = "GPT-2 124M"
    num_parameters: float = 124e6


@dataclass(frozen=True)
class PresetReport:
    """text: markdown. records: JSON's object for each measured case, with llama-bench's keys as far as they go."""

    text: str
    records: list[Record]
    picture: Picture

    def plot(self, path: str | Path) -> None:
        """Write the picture as PNG or SVG. Raises RequestError without matplotlib, or for another format."""
        from tinygpt.bench.plot import save

        save(self.picture, path)


def page(study: Study, here: str, tables: Sequence[str], notes: Iterable[str]) -> str:
    """The markdown of a report. `here` says what ours was measured on."""
    head = [
        f"## {study.name}: {study.title}",
        f"Published: {study.source}; {study.model}, {study.hardware}.\n\nHere: {here}.",
    ]
    return "\n\n".join([*head, *tables, "\n".join(f"- {note}" for note in notes)])


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns, but for the first, are numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def measured_table(records: Sequence[Record]) -> str:
    """What an unfinished preset has measured, of which its study's own table cannot be made."""
    rows = [[form.format(**r, mean_ms=r["avg_ns"] / 1e6) for form in MEASURED.values()] for r in records]
    return markdown(list(MEASURED), rows)
