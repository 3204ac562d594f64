"""Draw tokens/s against batch size, tinygpt beside its peers, from a file that bench_peers.py --json has written.

python scripts/bench_peers.py --dtypes float32 int8 --batch-sizes 1 2 4 8 16 32 --json peers.json
python scripts/plot_peers.py peers.json scripts/tokens_per_second.svg
"""

import argparse
import json
from pathlib import Path
from typing import Any

from tinygpt.bench.picture import Line, Panel, Picture, Point
from tinygpt.bench.plot import save
from tinygpt.bench.report import parameters_text, points_text, threads_text
from tinygpt.bench.work import num_parameters
from tinygpt.weights.families.hugging_face.gpt2 import model_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what bench_peers.py has written")
    parser.add_argument("picture", type=Path, help="a file to write, named .svg or .png")
    arguments = parser.parse_args()
    save(picture_of(json.loads(arguments.results.read_text(encoding="utf-8"))), arguments.picture)


def picture_of(results: dict[str, Any]) -> Picture:
    """A panel for each dtype, from the rows that decode."""
    rows = [row for row in results["rows"] if not row["is_prefill"]]
    dtypes = dict.fromkeys(row["dtype"] for row in rows)
    panels = tuple(_panel(dtype, [row for row in rows if row["dtype"] == dtype]) for dtype in dtypes)
    size = parameters_text(num_parameters(model_config(results["config"])))
    repeats = len(rows[0]["ms"]["tinygpt"])
    note = f"{results['cpu']}, {threads_text(results['threads'])}. {points_text(repeats)}"
    return Picture(f"Generating with GPT-2 {size}", panels, note)


def _panel(dtype: str, rows: list[dict[str, Any]]) -> Panel:
    engines = dict.fromkeys(engine for row in rows for engine, ms in row["ms"].items() if ms)
    lines = [
        Line(engine, tuple(_point(row, row["ms"][engine]) for row in rows if row["ms"].get(engine)))
        for engine in engines
    ]
    limits = tuple(_point(row, [row["floor_ms"]]) for row in rows if row["floor_ms"])
    if limits:
        lines.append(Line("limit of the machine", limits, is_published=True))
    return Panel(dtype, "batch size (sequences)", "tokens/s", tuple(lines))


def _point(row: dict[str, Any], ms: list[float]) -> Point:
    return Point.of(row["batch"], [1e3 * row["batch"] / milliseconds for milliseconds in ms])


if __name__ == "__main__":
    main()
