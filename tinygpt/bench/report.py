"""Records of cases, with llama-bench's keys; records as text and as pictures, by matplotlib.

The markdown tables of all commands and scripts are made here.

Reading prompts is llama-bench's "pp" test and generating its "tg" test, which begins after `n_depth` tokens. n_prompt,
n_gen and n_depth are of one sequence; tokens a second are of all `batch_size` together. Fields of tinygpt's own:

    median_ts, low_ts, high_ts          tokens a second: median, slowest and fastest run
    ms_per_token                        tg: from one token of a sequence to its next
    first_token_ms                      pp: from the call of generate to the first token of the last prompt
    read_gbs, bandwidth_share           weights and KV cache read a second; share of bandwidth_gbs, which is measured
    gflops, peak_share                  10**9 operations a second; share of block_peak_gflops and head_peak_gflops
    outside_share, sampling_share       share of generate's time outside forward passes; in choosing tokens
    peak_memory                         bytes of the process, or of the GPU; null if unknown
"""

import csv
import io
import json
import math
import statistics
import string
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

from ..cli.streams import in_columns
from ..errors import RequestError, how_to_install

Record = dict[str, Any]

# Title of a column -> its format for a record; `:4` is 4 significant digits.
COLUMNS = {
    "model": "{model_filename}",
    "dtype": "{dtype}",
    "KV cache": "{kv_cache_dtype}",
    "threads": "{n_threads}",
    "batch": "{batch_size}",
    "test": "{test}",
    "tokens/s": "{median_ts:4} ({low_ts:4} to {high_ts:4})",
    "ms/token": "{ms_per_token:4}",
    "first token, ms": "{first_token_ms:4}",
    "GB/s read": "{read_gbs:4} ({bandwidth_share:.0%})",
    "GFLOP/s": "{gflops:4} ({peak_share:.0%})",
    "outside the model": "{outside_share:.1%}",
    "peak MB": "{peak_megabytes:.0f}",
}
NUMBERS = tuple(COLUMNS)[6:]  # columns aligned to the right
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


def deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def to_markdown(records: Sequence[Record]) -> str:
    shown = [
        record | {"peak_megabytes": record["peak_memory"] and record["peak_memory"] / 1e6}
        for record in records
    ]
    return f"{records_table(shown, COLUMNS, NUMBERS)}\n\n{_notes(records)}"


def to_csv(records: Sequence[Record]) -> str:
    """Return a header and a line for each record, all quoted, as llama-bench does; lists are left out."""
    fields = dict.fromkeys(
        name for record in records for name in record if not isinstance(record[name], list)
    )
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, extrasaction="ignore", quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: int(v) if isinstance(v, bool) else v for name, v in record.items()} for record in records
    )
    return text.getvalue().rstrip("\n")


FORMATS = {
    "text": lambda records: aligned(to_markdown(records)),
    "md": to_markdown,
    "csv": to_csv,
    "json": lambda records: json.dumps(list(records), indent=2, ensure_ascii=False),
    "jsonl": lambda records: "\n".join(json.dumps(record, ensure_ascii=False) for record in records),
}


def records_table(records: Iterable[Record], columns: Mapping[str, str], numbers: Collection[str]) -> str:
    return table(columns, (cells_of(record, columns.values()) for record in records), numbers)


def table(header: Iterable[str], rows: Iterable[Iterable[str]], numbers: Collection[str] = ()) -> str:
    """Align columns with titles in `numbers` to the right."""
    rule = ["---:" if title in numbers else "---" for title in header]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, rule, *rows])


def aligned(markdown: str) -> str:
    """Return the same text with the columns of its tables aligned by spaces, for a terminal."""
    lines = []
    for is_table, group in groupby(markdown.split("\n"), lambda line: line.startswith("| ")):
        if not is_table:
            lines += group
            continue
        header, rule, *rows = [line[2:-2].split(" | ") for line in group]
        lines += in_columns([header, *rows], {i for i, side in enumerate(rule) if side.endswith(":")})
    return "\n".join(lines)


def significant(number: float) -> str:
    """Format a number with four significant digits and no exponent: 0.01234, 12.34, 123456."""
    if not math.isfinite(number) or number == 0:
        return f"{number:g}"
    return f"{number:.{max(3 - math.floor(math.log10(abs(number))), 0)}f}"


def runs_text(count: int, spread: str = "") -> str:
    return "single runs" if count == 1 else f"medians of {count} runs{spread}"


def threads_text(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def parameters_text(count: float) -> str:
    return f"{count / 1e6:.0f}M" if count < 1e9 else f"{count / 1e9:.2f}B"


class _Cells(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return significant(value) if format_spec == "4" else super().format_field(value, format_spec)


def cells_of(record: Record, forms: Iterable[str], absent: str = "") -> list[str]:
    """Return the record's fields in these formats; `absent` stands for null."""
    cells = []
    for form in forms:
        try:
            cells.append(_Cells().vformat(form, (), record))
        except TypeError:  # the value is None
            cells.append(absent)
    return cells


def _notes(records: Sequence[Record]) -> str:
    first = records[0]
    gpu = records[0].get("gpu_info")
    bandwidths, peaks = {}, {}
    for record in records:
        place = "on the GPU" if gpu else f"with {threads_text(record['n_threads'])}"
        in_blocks = f"{record['block_peak_gflops']:.0f}"
        in_head = f"{record['head_peak_gflops']:.0f}"
        rates = in_blocks if in_blocks == in_head else f"{in_blocks} in the blocks and {in_head} in the head"
        bandwidths[place] = f"{record['bandwidth_gbs']:.1f} GB/s {place}"
        peaks[f"in {record['dtype']} {place}"] = f"{rates} in {record['dtype']} {place}"
    runs = runs_text(len(first["samples_ns"]), ", with the slowest and the fastest in brackets")
    clock = (
        " by the GPU's clock, sampling of queued steps included"
        if gpu
        else ", without tokenization and sampling"
    )
    memory = "of the GPU, all buffers" if gpu else "of the process, with what earlier rows touched"
    return f"""\
- {gpu or first["cpu_info"]}, build {first["build_commit"]}; {runs}.
- tokens/s and ms/token: of the forward passes{clock}. pp reads a prompt; tg generates after so many cached tokens.
- first token: from the call to the first token of the last prompt; pp only.
- GB/s read: weights, with all of a head that is screened, for tg the KV cache too;
  share of the measured {", ".join(bandwidths.values())}.
- GFLOP/s: share of the tiles' measured peak, {", ".join(peaks.values())}.
- outside the model: share of the time outside forward passes. peak MB: {memory}."""


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


def check_picture(path: Path) -> None:
    """Raise RequestError without matplotlib, or for a format that it lacks."""
    if path.suffix.lower() not in SUFFIXES:
        raise RequestError(f"the picture {path} must end in {' or '.join(SUFFIXES)}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RequestError(f"a picture needs matplotlib: {how_to_install('plot')}.") from None


def draw(path: Path, title: str, panels: Sequence[Panel], note: str = "") -> None:
    """Write panels side by side: medians, with the range of all samples as error bars.

    Raise as `check_picture` does.
    """
    check_picture(path)
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
        with_length = [{**record, "length": record[name]} for record in records if record[name]]
        if with_length:
            panels.append(_panel_of(with_length, title))
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
