"""batch-inference: 100 queries of 64 new tokens, eight at a time against one at a time.

The study is Microsoft's, of a library that batches the queries that wait. Its figures are on the page "GPT Completion"
of its documentation: on an RTX 2080 Ti in the version of commit ca20ab04, on a V100 in that of commit 5823a2d8.
"""

from dataclasses import dataclass, replace

from tinygpt.bench.formats import Record, points_text, runs_text, table
from tinygpt.bench.picture import Line, Panel, Picture, Point
from tinygpt.bench.presets.options import PresetOptions
from tinygpt.bench.presets.report import PresetReport, Study
from tinygpt.bench.presets.rerun import Rerun, Result, progress, random_prompts
from tinygpt.sampling_params import SamplingParams

STUDY = Study(
    "batch-inference",
    "queries of 64 new tokens, batch 8 against batch 1",
    'microsoft/batch-inference, docs/examples/gpt_completion.rst, "GPT Completion"',
    "by Hugging Face in PyTorch on the GPU that is named",
)
COLUMNS = (
    "Method",
    "Query Count",
    "Execution Time",
    "Throughput comparing to Baseline",
    "Max Batch Size",
    "Avg Batch Size",
    "Generated Token Count",
    "Inference Count",
)


@dataclass(frozen=True)
class Protocol:
    """Query i has the prompt length i % 10: those of the study's ten texts in GPT-2's tokens."""

    num_queries: int = 100
    prompt_lengths: tuple[int, ...] = (3, 9, 27, 10, 10, 9, 12, 9, 14, 4)
    new_tokens: int = 64
    batch_sizes: tuple[int, int] = (1, 8)
    num_warmup_queries: int = 10
    repetitions: int = 3

    @property
    def lengths(self) -> list[int]:
        return [self.prompt_lengths[i % len(self.prompt_lengths)] for i in range(self.num_queries)]


FULL = Protocol()
SMALL = replace(FULL, num_queries=20, repetitions=1)


@dataclass(frozen=True)
class Published:
    """A row of the study's table; the sizes of a batch are in queries."""

    hardware: str
    method: str
    seconds: float
    throughput: str
    max_batch_size: int
    avg_batch_size: str
    inference_count: int


PUBLISHED = (
    Published("RTX 2080 Ti", "Baseline", 63.05, "1x", 1, "1", 6400),
    Published("RTX 2080 Ti", "With batch-inference", 12.07, "5x", 8, "7.69", 832),
    Published("V100", "Baseline", 78.04, "1x", 1, "1", 6400),
    Published("V100", "With batch-inference", 4.86, "16x", 32, "25", 256),
)


def run(options: PresetOptions, records: list[Record]) -> PresetReport:
    """Measure, and put our rows before the study's."""
    rerun, protocol = Rerun.prepare(STUDY, options, records), SMALL if options.small else FULL
    rerun.fitting([(max(protocol.prompt_lengths), protocol.new_tokens)])
    cases = [(dtype, size) for dtype in rerun.options.dtypes for size in protocol.batch_sizes]
    results = [_measure(rerun, protocol, *case) for case in progress(cases)]
    notes = [
        "Avg Batch Size: generated tokens / forward passes, as sequences join and leave between any two passes.",
        f"Execution Time of ours: {runs_text(len(results[0].seconds))}; the study does not say how often it ran.",
    ]
    rows = [*_our_rows(protocol, results), *map(_published_row, PUBLISHED)]
    return rerun.report([table(COLUMNS, rows, COLUMNS[1:])], notes, _picture(rerun.model, protocol, results))


def _measure(rerun: Rerun, protocol: Protocol, dtype: str, batch_size: int) -> Result:
    longest = max(protocol.prompt_lengths) + protocol.new_tokens
    with rerun.opened(dtype, batch_size, longest) as llm:
        warmup = random_prompts(protocol.lengths, llm.config.vocab_size)[: protocol.num_warmup_queries]
        llm.generate(warmup, SamplingParams(max_tokens=protocol.new_tokens), use_tqdm=False)
        sizes = batch_size, protocol.lengths, protocol.new_tokens, protocol.repetitions
        return rerun.measure(llm, *sizes, warmups=0)


def _our_rows(protocol: Protocol, results: list[Result]) -> list[list[str]]:
    baselines = {result.dtype: result.median for result in results if result.batch_size == protocol.batch_sizes[0]}
    return [_our_row(protocol, result, baselines[result.dtype] / result.median) for result in results]


def _our_row(protocol: Protocol, result: Result, speed_up: float) -> list[str]:
    tokens, passes = protocol.num_queries * protocol.new_tokens, result.measurement.runs[-1].num_steps
    counts = str(result.batch_size), f"{tokens / passes:.3g}", str(tokens), str(passes)
    method = f"tinygpt, {result.dtype}, batch {result.batch_size}"
    return [method, str(protocol.num_queries), f"{result.median:.2f}s", f"{speed_up:.2g}x", *counts]


def _published_row(row: Published) -> list[str]:
    counts = str(row.max_batch_size), row.avg_batch_size, "6400", str(row.inference_count)
    return [f"{row.method}, {row.hardware}", "100", f"{row.seconds}s", row.throughput, *counts]


def _picture(model: str, protocol: Protocol, results: list[Result]) -> Picture:
    tokens = protocol.num_queries * protocol.new_tokens
    lines: dict[str, list[Point]] = {}
    for result in results:
        rates = [tokens / seconds for seconds in result.seconds]
        lines.setdefault(f"tinygpt, {result.dtype}", []).append(Point.of(result.batch_size, rates))
    drawn = [Line(label, tuple(points)) for label, points in lines.items()]
    for hardware in dict.fromkeys(row.hardware for row in PUBLISHED):
        rows = [row for row in PUBLISHED if row.hardware == hardware]
        points = tuple(Point.exact(row.max_batch_size, 6400 / row.seconds) for row in rows)
        drawn.append(Line(f"published: {STUDY.model}, {hardware}", points, is_published=True))
    panel = Panel("", "largest batch (sequences)", "generated tokens/s", tuple(drawn))
    title = f"{protocol.num_queries} queries of {protocol.new_tokens} new tokens, {model}"
    return Picture(title, (panel,), f"{points_text(len(results[0].seconds))}\nPublished: {STUDY.source}.")
