"""cpu-study: a 13-token prompt, 100 new tokens, temperature 1, top-k 40, ten runs, by dtype.

The study is bloomen/gpt-2-hf, README.md "GPT-2 Performance Considerations", of commit 46802a35: from OpenAI's own
script on TensorFlow to Hugging Face's model, and to that with float16 quantisation. It gives the shortest of ten runs,
and asks in its outlook for the time to the first token, the time per output token, and throughput.
"""

import statistics
from dataclasses import dataclass, replace

from tinygpt.bench.formats import Record, runs_text, table
from tinygpt.bench.measure import Run
from tinygpt.bench.picture import Line, Panel, Picture, Point
from tinygpt.bench.presets.options import PresetOptions
from tinygpt.bench.presets.report import NOT_PUBLISHED, PresetReport, Study
from tinygpt.bench.presets.rerun import Rerun, Result, progress
from tinygpt.sampling_params import SamplingParams

STUDY = Study(
    "cpu-study",
    "a 13-token prompt, 100 new tokens, top-k 40",
    'bloomen/gpt-2-hf, README.md, "GPT-2 Performance Considerations"',
    "on the CPU, not named, of a Linux workstation",
)
COLUMNS = (
    "implementation",
    "new tokens",
    "minimum inference time (s)",
    "median (s)",
    "time to first token (ms)",
    "time per output token (ms)",
    "tokens/s",
)


@dataclass(frozen=True)
class Protocol:
    prompt_length: int = 13
    new_tokens: int = 100
    top_k: int = 40
    repetitions: int = 10


FULL = Protocol()
SMALL = replace(FULL, repetitions=3)


@dataclass(frozen=True)
class Published:
    """`seconds` is the minimum of ten runs."""

    implementation: str
    new_tokens: str
    seconds: float


# Hugging Face's max_length=100 counts the prompt.
PUBLISHED = (
    Published("OpenAI's script, TensorFlow 1.15", "100", 3.4),
    Published("Hugging Face, PyTorch", "up to 87", 1.7),
    Published("Hugging Face, PyTorch, float16 quantisation", "up to 87", 1.5),
)


def run(options: PresetOptions, records: list[Record]) -> PresetReport:
    """Measure each dtype, and put our rows before the study's."""
    rerun, protocol = Rerun.prepare(STUDY, options, records), SMALL if options.small else FULL
    rerun.fitting([(protocol.prompt_length, protocol.new_tokens)])
    results = [_measure(rerun, protocol, dtype) for dtype in progress(rerun.options.dtypes)]
    notes = [
        f"Ours: {runs_text(len(results[0].seconds))}, and the minimum of them. Time per output token: of those after "
        "the first.",
        "The study's two rows of Hugging Face's have max_length=100, which counts the prompt: at most 87 tokens are "
        "new, and fewer where the text ends. Their times include turning tokens into text; that of TensorFlow's row is "
        "of the model's inference step.",
    ]
    rows = [*map(_row, results), *map(_published_row, PUBLISHED)]
    return rerun.report([table(COLUMNS, rows, COLUMNS[1:])], notes, _picture(rerun.model, protocol, results))


def _measure(rerun: Rerun, protocol: Protocol, dtype: str) -> Result:
    with rerun.opened(dtype, 1) as llm:
        sampling = {"temperature": 1.0, "top_k": protocol.top_k, "seed": 42, "ignore_eos": True}
        params = SamplingParams(max_tokens=protocol.new_tokens, **sampling)
        return rerun.measure(llm, 1, [protocol.prompt_length], protocol.new_tokens, protocol.repetitions, params)


def _row(result: Result) -> list[str]:
    new = result.measurement.new_tokens
    first = statistics.median(result.first_tokens)
    per_token = statistics.median(_per_token(run, new) for run in result.measurement.runs)
    totals = f"{min(result.seconds):.3f}", f"{result.median:.3f}"
    rates = f"{1e3 * first:.1f}", f"{1e3 * per_token:.3f}", f"{new / result.median:.1f}"
    return [f"tinygpt, {result.dtype}", str(new), *totals, *rates]


def _per_token(run: Run, new_tokens: int) -> float:
    return (run.total - run.first_token) / (new_tokens - 1)


def _published_row(row: Published) -> list[str]:
    return [row.implementation, row.new_tokens, str(row.seconds), *[NOT_PUBLISHED] * 4]


def _picture(model: str, protocol: Protocol, results: list[Result]) -> Picture:
    count = len(results[0].seconds)
    names = [f"tinygpt,\n{result.dtype}" for result in results]
    points = tuple(Point.of(i, result.seconds, f"{result.median:.3g} s") for i, result in enumerate(results))
    theirs = tuple(
        Point.exact(i, row.seconds, f"{row.seconds} s") for i, row in enumerate(PUBLISHED, start=len(results))
    )
    names += ["OpenAI,\nTensorFlow", "Hugging Face", "Hugging Face,\nfloat16"]
    lines = (
        Line(f"ours: {runs_text(count)}", points),
        Line(f"published: {STUDY.model}, minimum of 10", theirs, is_published=True),
    )
    sizes = f"{protocol.new_tokens} new tokens after {protocol.prompt_length}, top-k {protocol.top_k}"
    panel = Panel("", "implementation", "inference time (s)", lines, tuple(names))
    title = f"{sizes}, {model}"
    return Picture(title, (panel,), f"Error bars span all runs.\nPublished: {STUDY.source}.")
