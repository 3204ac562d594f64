"""What a preset returns: the source's table with our figures in it, as text, as records and as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tinygpt.bench.formats import Record, records_table
from tinygpt.bench.picture import Picture

NOT_PUBLISHED = "not published"
ABSENT = "-"  # a note below the table gives the reason
# The table of an interrupted preset: a column's title -> how a record fills it.
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
    """A published study: where to read it, and which model and hardware its figures are of."""

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


def measured_table(records: Sequence[Record]) -> str:
    """What an interrupted preset has measured, which is too little for its study's own table."""
    shown = [record | {"mean_ms": record["avg_ns"] / 1e6} for record in records]
    return records_table(shown, MEASURED, tuple(MEASURED)[1:])
