"""batching-notebook: 10 new tokens for 1, 2, 4 ... 128 prompts at once; throughput against latency.

The study is a notebook, pkuwangh/mlsys, mlsys/inference/tutorial/p02-batching.ipynb, section "Throughput vs Latency";
the figures are its output, of commit b767e768.
"""

from dataclasses import dataclass, replace

from tinygpt.bench.formats import Record, points_text, runs_text, table
from tinygpt.bench.picture import Line, Panel, Picture, Point
from tinygpt.bench.presets.options import PresetOptions
from tinygpt.bench.presets.report import PresetReport, Study
from tinygpt.bench.presets.rerun import Rerun, Result, progress

STUDY = Study(
    "batching-notebook",
    "10 new tokens at batch 1 to 128",
    'pkuwangh/mlsys, p02-batching.ipynb, "Throughput vs Latency"',
    "by Hugging Face in PyTorch on a GPU that is not named",
)
COLUMNS = ("bs", "duration (ms)", "throughput (tokens/ms)", "avg latency (ms)")


@dataclass(frozen=True)
class Protocol:
    """Prompt i has the length i % 3: those of the study's three texts in GPT-2's tokens."""

    prompt_lengths: tuple[int, ...] = (7, 5, 4)
    new_tokens: int = 10
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    repetitions: int = 5


FULL = Protocol()
SMALL = replace(FULL, batch_sizes=(1, 2, 4, 8), repetitions=3)


@dataclass(frozen=True)
class Published:
    """One line of the notebook's output, with the digits it prints."""

    batch_size: int
    duration_ms: float
    throughput: float  # tokens/ms
    latency_ms: float


PUBLISHED = (
    Published(1, 59.8, 0.2, 6.0),
    Published(2, 59.9, 0.3, 6.0),
    Published(4, 59.3, 0.7, 5.9),
    Published(8, 61.6, 1.3, 6.2),
    Published(16, 64.4, 2.5, 6.4),
    Published(32, 67.2, 4.8, 6.7),
    Published(64, 75.6, 8.5, 7.6),
    Published(128, 93.0, 13.8, 9.3),
)


def run(options: PresetOptions, records: list[Record]) -> PresetReport:
    """Measure, and make a table for each dtype, with the notebook's columns twice: ours and published."""
    rerun, protocol = Rerun.prepare(STUDY, options, records), SMALL if options.small else FULL
    rerun.fitting([(max(protocol.prompt_lengths), protocol.new_tokens)])
    of_dtype = {dtype: _measure(rerun, protocol, dtype) for dtype in rerun.options.dtypes}
    tables = [_table(protocol, dtype, results) for dtype, results in of_dtype.items()]
    count = len(rerun.records[0]["samples_ns"])
    notes = [
        "The notebook's single run times tokenisation and making text too.",
        f"Ours: {runs_text(count)}. avg latency is duration / {protocol.new_tokens} new tokens.",
    ]
    panels = tuple(_panel(protocol, dtype, results) for dtype, results in of_dtype.items())
    title = f"Throughput against latency by batch size, {rerun.model}"
    note = f"{points_text(count)} Numbers are batch sizes.\nPublished: {STUDY.source}."
    return rerun.report(tables, notes, Picture(title, panels, note, has_shared_y=True))


def _measure(rerun: Rerun, protocol: Protocol, dtype: str) -> list[Result]:
    longest, found = max(protocol.prompt_lengths) + protocol.new_tokens, []
    with rerun.opened(dtype, max(protocol.batch_sizes), longest) as llm:
        for size in progress(protocol.batch_sizes):
            lengths = [protocol.prompt_lengths[i % len(protocol.prompt_lengths)] for i in range(size)]
            found.append(rerun.measure(llm, size, lengths, protocol.new_tokens, protocol.repetitions))
    return found


def _table(protocol: Protocol, dtype: str, results: list[Result]) -> str:
    header = [COLUMNS[0], *(f"tinygpt, {dtype}: {name}" for name in COLUMNS[1:])]
    header += [f"published: {name}" for name in COLUMNS[1:]]
    published = {row.batch_size: row for row in PUBLISHED}
    rows = []
    for result in results:
        ms, theirs = 1e3 * result.median, published[result.batch_size]
        tokens = result.batch_size * protocol.new_tokens
        ours = f"{ms:.1f}", f"{tokens / ms:.2f}", f"{ms / protocol.new_tokens:.2f}"
        figures = theirs.duration_ms, theirs.throughput, theirs.latency_ms
        rows.append([str(result.batch_size), *ours, *map(str, figures)])
    return table(header, rows, header[1:])


def _panel(protocol: Protocol, dtype: str, results: list[Result]) -> Panel:
    ours, theirs = [], []
    for result in results:
        rates = [result.batch_size * protocol.new_tokens / (1e3 * seconds) for seconds in result.seconds]
        ours.append(Point.of(1e3 * result.median / protocol.new_tokens, rates, str(result.batch_size)))
    for row in PUBLISHED:
        rate = row.batch_size * protocol.new_tokens / row.duration_ms
        name = str(row.batch_size) if row in (PUBLISHED[0], PUBLISHED[-1]) else ""  # the others would be in the way
        theirs.append(Point.exact(row.latency_ms, rate, name))
    published = Line(f"published: {STUDY.model}, a GPU that is not named", tuple(theirs), is_published=True)
    lines = Line("tinygpt", tuple(ours)), published
    title, x_label = f"tinygpt, {dtype}", "latency (ms/token)"
    return Panel(title, x_label, "throughput (tokens/ms)", lines, has_free_x=True)
