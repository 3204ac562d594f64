"""Pictures of measurements, as PNG or SVG. Only this module imports matplotlib."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from ..errors import RequestError, how_to_install
from .report import Record, runs_text

SUFFIXES = (".png", ".svg")
INCHES, DOTS_PER_INCH = (9, 6), 100  # 900 x 600 pixels
# Okabe and Ito's colours, which color-blind readers can tell apart, without yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX<>phd*8"
WIDE = 8  # axes whose values span this factor are logarithmic
# Fields that tell tests of one dtype apart, with their axis labels.
X_LABELS = {
    "batch_size": "batch size (sequences)",
    "length": "length (tokens)",
    "n_depth": "tokens in the cache before",
    "n_threads": "threads",
}


# Points (x, samples) from left to right by label; an x may be a name.
Lines = dict[str, list[tuple[Any, Sequence[float]]]]


@dataclass(frozen=True)
class Panel:
    """Axes with lines in colors, and others in gray, such as published figures."""

    title: str
    x_label: str
    y_label: str
    lines: Lines
    gray_lines: Lines


def check(path: Path) -> None:
    """Raise RequestError if pictures cannot be drawn, or not in this format."""
    if path.suffix.lower() not in SUFFIXES:
        raise RequestError(f"the picture {path} must end in {' or '.join(SUFFIXES)}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RequestError(f"a picture needs matplotlib: {how_to_install('plot')}.") from None


def draw(path: Path, title: str, panels: Sequence[Panel], note: str = "") -> None:
    """Write panels side by side: medians with the range of all samples as error bars. Raise as `check` does."""
    check(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, layout="constrained")
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
    figure.supxlabel(note, x=0.012, ha="left", fontsize=8.5, color="#444444")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
        _draw_panel(axes, panel)
    with rc_context({"svg.fonttype": "none"}):  # text stays text, which is smaller and searchable
        figure.savefig(path, dpi=DOTS_PER_INCH)


def _draw_panel(axes: Any, panel: Panel) -> None:
    drawn = {**panel.lines, **panel.gray_lines}
    colors = cycle(COLORS)
    markers = cycle(MARKERS)
    for label, points in drawn.items():
        xs, samples = zip(*points, strict=True)
        medians = [statistics.median(values) for values in samples]
        spread = [
            [median - min(values), max(values) - median]
            for median, values in zip(medians, samples, strict=True)
        ]
        color, style = ("#6E6E6E", "--") if label in panel.gray_lines else (next(colors), "-")
        look = {"color": color, "marker": next(markers), "linestyle": "" if isinstance(xs[0], str) else style}
        axes.errorbar(xs, medians, yerr=[*zip(*spread, strict=True)], capsize=3, label=label, **look)
    xs = sorted({x for points in drawn.values() for x, _ in points}, key=str)
    ys = [value for points in drawn.values() for _, samples in points for value in samples]
    if all(not isinstance(x, str) and float(x).is_integer() for x in xs):
        if len(xs) > 1 and min(xs) > 0 and max(xs) >= WIDE * min(xs):
            axes.set_xscale("log")
        axes.set_xticks(xs, [f"{x:g}" for x in xs])
        axes.set_xticks([], minor=True)
    if min(ys) > 0 and max(ys) >= WIDE * min(ys):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(panel.title, loc="left", fontsize=11)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axes.grid(color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=8)


def draw_records(records: Sequence[Record], path: Path) -> None:
    """Draw tokens a second of reading prompts and of generating, along the field with most values."""
    panels = []
    for title, name in (("Reading prompts", "n_prompt"), ("Generating", "n_gen")):
        found = [{**record, "length": record[name]} for record in records if record[name]]
        if found:
            panels.append(_panel_of(found, title))
    first = records[0]
    note = f"{first['gpu_info'] or first['cpu_info']}. Points are {runs_text(len(first['samples_ts']))}."
    draw(path, f"Speed of {Path(first['model_filename']).name}", panels, note)


def _panel_of(records: list[Record], title: str) -> Panel:
    counts = {name: len({record[name] for record in records}) for name in X_LABELS}
    x = max(counts, key=counts.__getitem__)
    others = [name for name, count in counts.items() if count > 1 and name != x]
    lines: Lines = {}
    for record in sorted(records, key=lambda record: record[x]):
        label = ", ".join([record["dtype"], *(f"{name} {record[name]}" for name in others)])
        lines.setdefault(label, []).append((record[x], record["samples_ts"]))
    return Panel(title, X_LABELS[x], "tokens/s", lines, {})
