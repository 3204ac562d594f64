"""fastertransformer: latency and memory by batch size, input length and output length, sampling with top-p 0.9.

The study is NVIDIA/FasterTransformer, docs/gpt_guide.md, section "Performance of GPT-350M", of commit 07fdd2fc: the
table for the model that is nearest to GPT-2 355M.
"""

from dataclasses import dataclass, replace

from tinygpt.bench.formats import Record, points_text, runs_text, table
from tinygpt.bench.picture import Line, Panel, Picture, Point
from tinygpt.bench.presets.options import PresetOptions
from tinygpt.bench.presets.report import ABSENT, PresetReport, Study
from tinygpt.bench.presets.rerun import Rerun, Result, progress
from tinygpt.sampling_params import SamplingParams

STUDY = Study(
    "fastertransformer",
    "batch size x input length x output length",
    'NVIDIA/FasterTransformer, docs/gpt_guide.md, "Performance of GPT-350M"',
    "24 layers, 1024 wide, FP16, on one A100-80GB",
    "GPT-350M",
    355e6,
)
COLUMNS = ("Batch_size", "Input Seqlen", "Output Seqlen")


@dataclass(frozen=True)
class Protocol:
    lengths: tuple[tuple[int, int], ...] = ((128, 8), (512, 32))  # input, output
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    top_p: float = 0.9
    repetitions: int = 5


FULL = Protocol()
SMALL = replace(FULL, batch_sizes=(1, 2, 4), repetitions=2)


@dataclass(frozen=True)
class Published:
    """Two columns of the source's table: milliseconds and GB, for each of the batch sizes."""

    input_length: int
    output_length: int
    latencies: tuple[float, ...]
    memories: tuple[float, ...]

    @property
    def figures(self) -> dict[int, tuple[float, float]]:
        """Latency and memory by batch size."""
        return dict(zip(FULL.batch_sizes, zip(self.latencies, self.memories, strict=True), strict=True))


PUBLISHED = (
    Published(128, 8, (25.43, 26.42, 28.00, 32.56, 42.87, 62.61, 104.51), (3.43, 3.46, 3.51, 3.61, 3.78, 4.13, 4.81)),
    Published(
        512, 32, (92.01, 97.87, 110.7, 136.45, 189.91, 296.15, 529.18), (3.57, 3.65, 3.78, 4.12, 4.8, 6.09, 8.67)
    ),
)


def run(options: PresetOptions, records: list[Record]) -> PresetReport:
    """Measure, and make the study's table with two more columns for each dtype."""
    rerun, protocol = Rerun.prepare(STUDY, options, records), SMALL if options.small else FULL
    lengths, left_out = rerun.fitting(protocol.lengths)
    dtypes = rerun.options.dtypes
    cases = [(dtype, size, *pair) for dtype in dtypes for pair in lengths for size in protocol.batch_sizes]
    results = [_measure(rerun, protocol, *case) for case in progress(cases)]
    notes = [
        *left_out,
        f"Latency of ours, of a whole request: {runs_text(len(results[0].seconds))}.",
        "Memory of ours: all that the process holds at most while it runs the case, Python and compiled kernels "
        "included; the published one is the GPU's.",
    ]
    return rerun.report([_table(protocol, dtypes, results)], notes, _picture(rerun.model, protocol, results))


def _measure(rerun: Rerun, protocol: Protocol, dtype: str, batch_size: int, prompt: int, new: int) -> Result:
    """With an LLM for this case alone, so that the memory is this case's too."""
    with rerun.opened(dtype, batch_size, prompt + new) as llm:
        params = SamplingParams(max_tokens=new, temperature=1.0, top_p=protocol.top_p, seed=0, ignore_eos=True)
        return rerun.measure(llm, batch_size, [prompt] * batch_size, new, protocol.repetitions, params)


def _table(protocol: Protocol, dtypes: tuple[str, ...], results: list[Result]) -> str:
    header = [*COLUMNS]
    header += [f"tinygpt, {dtype}: {figure}" for dtype in dtypes for figure in ("Latency (ms)", "Memory Usage (GB)")]
    header += ["published: FT Latency (ms)", "published: Memory Usage (GB)"]
    ours = {_key(result): result for result in results}
    rows = []
    for published in PUBLISHED:
        for size in protocol.batch_sizes:
            lengths = published.input_length, published.output_length
            cells = [cell for dtype in dtypes for cell in _cells(ours.get((dtype, size, *lengths)))]
            theirs = [f"{figure:.2f}" for figure in published.figures[size]]
            rows.append([str(size), *map(str, lengths), *cells, *theirs])
    return table(header, rows, header[1:])


def _key(result: Result) -> tuple[str, int, int, int]:
    found = result.measurement
    return result.dtype, result.batch_size, found.prompt_length, found.new_tokens


def _cells(result: Result | None) -> tuple[str, str]:
    if result is None:
        return ABSENT, ABSENT
    peak = result.measurement.peak_memory
    return f"{1e3 * result.median:.2f}", f"{peak / 1e9:.2f}" if peak else "unknown"


def _picture(model: str, protocol: Protocol, results: list[Result]) -> Picture:
    panels = (
        Panel("Latency", "batch size (sequences)", "latency (ms)", _lines(protocol, results, is_memory=False)),
        Panel("Memory", "batch size (sequences)", "memory (GB)", _lines(protocol, results, is_memory=True)),
    )
    title = f"Latency and memory by input + output length, {model}"
    note = f"{points_text(len(results[0].seconds))}\nPublished: {STUDY.source}."
    return Picture(title, panels, note)


def _lines(protocol: Protocol, results: list[Result], is_memory: bool) -> tuple[Line, ...]:
    points: dict[tuple[str, int, int], list[Point]] = {}
    for result in results:
        dtype, size, *lengths = _key(result)
        if is_memory and not result.measurement.peak_memory:  # unknown, and not 0
            continue
        memory = [result.measurement.peak_memory / 1e9]
        samples = memory if is_memory else [1e3 * seconds for seconds in result.seconds]
        points.setdefault((dtype, *lengths), []).append(Point.of(size, samples))
    lines = [Line(f"tinygpt, {dtype}, {a} + {b}", tuple(of), group=dtype) for (dtype, a, b), of in points.items()]
    for row in PUBLISHED:
        theirs = tuple(Point.exact(size, row.figures[size][is_memory]) for size in protocol.batch_sizes)
        label = f"published: {STUDY.model}, A100, {row.input_length} + {row.output_length}"
        lines.append(Line(label, theirs, is_published=True))
    return tuple(lines)
