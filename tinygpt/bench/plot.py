"""Pictures as PNG or SVG files. matplotlib draws them, and is imported for nothing else."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygpt.bench.formats import points_text, threads_text
from tinygpt.bench.picture import WIDE, Line, Panel, Picture, Point, model_name
from tinygpt.bench.work import CACHES
from tinygpt.errors import RequestError, how_to_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
INCHES, DOTS_PER_INCH = (9, 6), 100  # 900 x 600 pixels
# Okabe and Ito's colours, which colour-blind readers can tell apart; without yellow, which is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX<>phd*8"
MAX_LINES = 12  # of ours in a panel: more cannot be told apart
STYLES = ("-", "--", ":", "-.")
PUBLISHED_COLOURS = ("#6E6E6E", "#9A9A9A")
PUBLISHED_STYLES = ("--", ":", "-.")
LEGEND_PIXELS, HANDLE_PIXELS, CHARACTER_PIXELS = 880, 55, 6.5  # of a line below the panels, and of what stands there
NOTE_SIZE, NOTE_COLOUR, GRID_COLOUR = 8.5, "#444444", "#DDDDDD"
PANELS_IN_ROW = 2
BAR_HEIGHT = 0.6
LOG_SCALE = ", log scale"
STEPS_OF_DECADE = (1, 2, 5)
# What may set tests apart: the one with most values becomes the x axis, and the others are named beside the dtype.
X_LABELS = {
    "batch_size": "batch size (sequences)",
    "length": "{} length (tokens)",
    "n_depth": "tokens in the cache before",
    "n_threads": "threads",
}
PARTS = {
    "batch_size": "batch {}".format,
    "length": "{} tokens".format,
    "n_depth": "after {}".format,
    "n_threads": threads_text,
}


def plot(records: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Draw records of bench: tokens a second of reading prompts, and of generating. Raises as `check` does."""
    save(picture_of(records), path)


def check(path: str | Path) -> None:
    """RequestError, before any work, if pictures cannot be drawn, or not in this format."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise RequestError(f"a picture was asked for as {path}: its name must end in {' or '.join(SUFFIXES)}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RequestError(
            f"a picture was asked for and matplotlib, which draws it, is not installed: {how_to_install('plot')}."
        ) from None


def check_lines(records: Sequence[dict[str, Any]]) -> None:
    """RequestError, before any work, if a picture of these records would have too many lines to be read."""
    count = max(len(panel.lines) for panel in picture_of(records).panels)
    if count > MAX_LINES:
        raise RequestError(
            f"--plot would draw {count} lines into one picture and more than {MAX_LINES} cannot be told apart: give "
            "fewer values of --dtype, --threads, --batch-sizes, --prompt-lengths or --new-tokens, or omit --plot."
        )


def save(picture: Picture, path: str | Path) -> None:
    """Write a PNG of 900 x 600 pixels, or an SVG. Raises as `check` does."""
    check(path)
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):  # text as text: a third of the size of outlines, and searchable
        draw(picture).savefig(path, dpi=DOTS_PER_INCH)


def draw(picture: Picture) -> "Figure":
    """The figure, which belongs to no window and not to pyplot."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.06)
    figure.suptitle(picture.title, x=0.012, ha="left", fontsize=13, fontweight="bold")
    styles = _styles(picture)
    for axes, panel in zip(_grid(figure, picture), picture.panels, strict=True):
        if panel.names:
            _draw_bars(axes, panel, styles)
        else:
            _draw_lines(axes, panel, styles, picture.has_log_x(panel), picture.has_log_y(panel))
        axes.set_title(panel.title, loc="left", fontsize=11)
        if picture.has_shared_y and not axes.get_subplotspec().is_first_col():
            axes.set_ylabel("")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    _add_legend(figure, picture.note)
    return figure


def picture_of(records: Sequence[dict[str, Any]]) -> Picture:
    """A panel for prompts and one for generation, as far as there are records of them."""
    panels = []
    for title, noun, field in (("Reading prompts", "prompt", "n_prompt"), ("Generating", "generation", "n_gen")):
        of_kind = [{**record, "length": record[field]} for record in records if record[field]]
        if of_kind:
            panels.append(_panel_of(of_kind, title, noun))
    title = f"Speed of {model_name(records[0]['model_filename'])}"
    notes = [f"{records[0].get('gpu_info') or records[0]['cpu_info']}.", points_text(len(records[0]["samples_ts"]))]
    return Picture(title, tuple(panels), " ".join([*notes, *_unusual_caches(records)]))


def _unusual_caches(records: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence on KV caches of another dtype than the one that goes with the weights."""
    found = {(record["dtype"], record["kv_cache_dtype"]) for record in records if "kv_cache_dtype" in record}
    return [f"KV cache of {dtype} in {cache}." for dtype, cache in sorted(found) if cache != CACHES[dtype]]


def _panel_of(records: list[dict[str, Any]], title: str, noun: str) -> Panel:
    counts = {field: len({record[field] for record in records}) for field in X_LABELS}
    x = max(counts, key=counts.__getitem__)
    if counts[x] == 1:
        return _by_dtype(records, title)
    others = [field for field, count in counts.items() if count > 1 and field != x]
    lines: dict[str, Line] = {}
    for record in sorted(records, key=lambda record: record[x]):
        label = ", ".join([record["dtype"], *(PARTS[field](record[field]) for field in others)])
        before = lines[label].points if label in lines else ()
        lines[label] = Line(label, (*before, Point.of(record[x], record["samples_ts"])), record["dtype"])
    return Panel(title, X_LABELS[x].format(noun), "tokens/s", tuple(lines.values()))


def _by_dtype(records: list[dict[str, Any]], title: str) -> Panel:
    names = tuple(dict.fromkeys(record["dtype"] for record in records))
    points = [Point.of(names.index(record["dtype"]), record["samples_ts"]) for record in records]
    named = tuple(replace(point, name=f"{point.y:.0f}") for point in points)
    return Panel(title, "dtype", "tokens/s", (Line("median", named),), names)


def _grid(figure: "Figure", picture: Picture) -> list["Axes"]:
    """Axes for every panel, two in a row."""
    count = len(picture.panels)
    columns = min(count, PANELS_IN_ROW)
    grid = figure.subplots(math.ceil(count / columns), columns, squeeze=False, sharey=picture.has_shared_y)
    axes = list(grid.flat)
    for spare in axes[count:]:
        spare.remove()
    return axes[:count]


def _styles(picture: Picture) -> dict[str, dict[str, Any]]:
    """How each line looks, by its label: the same in every panel. Groups have colours, and lines have markers."""
    lines = {line.label: line for panel in picture.panels for line in panel.lines}
    published = [label for label, line in lines.items() if line.is_published]
    styles = {label: {"marker": marker} for label, marker in _markers(picture).items()}
    for i, label in enumerate(published):
        styles[label] |= _published_style(i)
    for i, labels in enumerate(_groups([line for line in lines.values() if not line.is_published])):
        for j, label in enumerate(labels):
            look = {"linestyle": STYLES[j % len(STYLES)], "markersize": 6, "linewidth": 1.8, "zorder": 3}
            styles[label] |= {"color": COLOURS[i % len(COLOURS)], **look}
    return {label: styles[label] for label in lines}


def _markers(picture: Picture) -> dict[str, str]:
    """A marker for each line, by its label: no two in a panel have the same, as far as there are enough."""
    found: dict[str, str] = {}
    for panel in picture.panels:
        used = {found[line.label] for line in panel.lines if line.label in found}
        free = itertools.chain((marker for marker in MARKERS if marker not in used), itertools.cycle(MARKERS))
        found |= {line.label: next(free) for line in panel.lines if line.label not in found}
    return found


def _groups(lines: list[Line]) -> list[list[str]]:
    """Labels of lines of one colour. Where all lines would have one, each has its own: it would tell nothing."""
    groups: dict[str, list[str]] = {}
    for line in lines:
        groups.setdefault(line.group or line.label, []).append(line.label)
    return list(groups.values()) if len(groups) > 1 else [[line.label] for line in lines]


def _published_style(number: int) -> dict[str, Any]:
    return {
        "color": PUBLISHED_COLOURS[number % len(PUBLISHED_COLOURS)],
        "linestyle": PUBLISHED_STYLES[number % len(PUBLISHED_STYLES)],
        "markerfacecolor": "white",
        "markersize": 5,
        "linewidth": 1.3,
        "zorder": 2,
    }


def _draw_lines(axes: "Axes", panel: Panel, styles: dict[str, dict[str, Any]], is_log_x: bool, is_log_y: bool) -> None:
    axes.set(xlabel=panel.x_label + LOG_SCALE * is_log_x, ylabel=panel.y_label + LOG_SCALE * is_log_y)
    axes.set(xscale="log" if is_log_x else "linear", yscale="log" if is_log_y else "linear")
    axes.grid(color=GRID_COLOUR, linewidth=0.8)
    for line in panel.lines:
        _draw_line(axes, line, styles[line.label])
    axes.margins(x=0.09)
    if not panel.has_free_x:
        axes.set_xticks(panel.xs, [f"{x:g}" for x in panel.xs])
        axes.set_xticks([], minor=True)
    elif is_log_x:
        _set_plain_ticks(axes.xaxis)
    if is_log_y:
        _set_plain_ticks(axes.yaxis)
        _widen(axes)
    else:
        axes.set_ylim(bottom=0)


def _draw_line(axes: "Axes", line: Line, style: dict[str, Any]) -> None:
    from matplotlib.patheffects import withStroke

    xs, ys = [point.x for point in line.points], [point.y for point in line.points]
    axes.errorbar(xs, ys, yerr=_bars(line), capsize=3, elinewidth=1, label=line.label, **style)
    aside = {"xytext": (-7, 0), "ha": "right"} if line.is_published else {"xytext": (5, -10), "ha": "left"}
    for point in filter(attrgetter("name"), line.points):
        place = {"textcoords": "offset points", "va": "center", **aside}
        text = axes.annotate(point.name, (point.x, point.y), fontsize=8.5, **place)
        text.set(color=style["color"], path_effects=[withStroke(linewidth=2.5, foreground="white")], zorder=4)


def _draw_bars(axes: "Axes", panel: Panel, styles: dict[str, dict[str, Any]]) -> None:
    """A bar to the right for each name, the first at the top. Bars begin at 0, so their axis is never logarithmic."""
    axes.set(xlabel=panel.y_label, ylabel=panel.x_label)
    axes.grid(axis="x", color=GRID_COLOUR, linewidth=0.8)
    for line in panel.lines:
        places, lengths = [point.x for point in line.points], [point.y for point in line.points]
        colour = styles[line.label]["color"]
        axes.barh(places, lengths, BAR_HEIGHT, color=colour, label=line.label)
        if bars := _bars(line):
            axes.errorbar(lengths, places, xerr=bars, fmt="none", ecolor="black", elinewidth=1, capsize=3)
        for point in line.points:
            place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(point.name, (point.high, point.x), fontsize=9, **place)
    axes.set_yticks(range(len(panel.names)), panel.names)
    axes.set_ylim(len(panel.names) - 0.4, -0.6)
    axes.margins(x=0.12)


def _bars(line: Line) -> tuple[list[float], list[float]] | None:
    """How far the error bars reach below and above the points, if any does."""
    below, above = [point.y - point.low for point in line.points], [point.high - point.y for point in line.points]
    return (below, above) if any(below) or any(above) else None


def _set_plain_ticks(axis: "Axis") -> None:
    """1, 2, 5, 10 and so on, written out: powers of ten are for larger ranges than these."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=STEPS_OF_DECADE))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _widen(axes: "Axes") -> None:
    """Make the range of a logarithmic axis so large that several ticks are in it."""
    low, high = axes.get_ylim()
    if (factor := (WIDE * low / high) ** 0.5) > 1:
        axes.set_ylim(low / factor, high * factor)


def _add_legend(figure: "Figure", note: str) -> None:
    """Below the panels: the note, and the lines where there are several, in as many columns as have room."""
    found = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    if len(found) == 1:
        figure.supxlabel(note, x=0.012, ha="left", fontsize=NOTE_SIZE, color=NOTE_COLOUR)
        return
    width = HANDLE_PIXELS + CHARACTER_PIXELS * max(map(len, found))
    num_rows = math.ceil(len(found) / max(1, LEGEND_PIXELS // width))
    columns = math.ceil(len(found) / num_rows)
    place = {"loc": "outside lower left", "ncols": columns, "frameon": False, "fontsize": 9, "alignment": "left"}
    legend = figure.legend(found.values(), found, title=note, title_fontsize=NOTE_SIZE, **place)
    legend.get_title().set_color(NOTE_COLOUR)
