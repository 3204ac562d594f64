"""cpu-study: a 13-token prompt, 100 new tokens, temperature 1, top-k 40, ten runs, by dtype.

The study is bloomen/gpt-2-hf, README.md "GPT-2 Performance Considerations", of commit 46802a35: from OpenAI's own
script on TensorFlow to Hugging Face's model, and to that with float16 quantisation. It gives the shortest of ten runs,
and asks in its outlook for the time to the first token, the time per output token, and throughput.
"""

import statistics
from dataclasses import dataclass, replace

from tinygpt.bench.measure import Run, measure
from tinygpt.bench.picture import Line, Panel, Picture, Point
from tinygpt.bench.presets.options import PresetOptions
from tinygpt.bench.presets.report import NOT_PUBLISHED, PresetReport, Record, Study, markdown, page
from tinygpt.bench.presets.running import (
    RANDOM_PROMPTS,
    Result,
    fitting,
    here,
    keep,
    of_model,
    opened,
    prepared,
    progress,
    random_prompts,
    repetitions_of,
)
from tinygpt.bench.words import runs_text
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
    options, config = prepared(options)
    protocol = SMALL if options.small else FULL
    fitting(options, config, [(protocol.prompt_length, protocol.new_tokens)])
    results = [keep(STUDY, options, _measure(options, protocol, dtype), records) for dtype in progress(options.dtypes)]
    notes = [
        RANDOM_PROMPTS,
        f"Ours: {runs_text(len(results[0].seconds))}, and the minimum of them. Time per output token: of those after "
        "the first.",
        "The study's two rows of Hugging Face's have max_length=100, which counts the prompt: at most 87 tokens are "
        "new, and fewer where the text ends. The times of these two include turning tokens into text; that of the row "
        "of TensorFlow is of the model's inference step.",
    ]
    table = markdown(COLUMNS, [*(_row(result) for result in results), *map(_published_row, PUBLISHED)])
    return PresetReport(
        page(STUDY, here(STUDY, options, config), [table], notes),
        records,
        _picture(of_model(options, config), protocol, results),
    )


def _measure(options: PresetOptions, protocol: Protocol, dtype: str) -> Result:
    with opened(options, dtype, 1) as llm:
        prompts = random_prompts([protocol.prompt_length], llm.config.vocab_size)
        sampling = {"temperature": 1.0, "top_k": protocol.top_k, "seed": 42, "ignore_eos": True}
        params = SamplingParams(max_tokens=protocol.new_tokens, **sampling)
        repetitions = repetitions_of(options, protocol.repetitions)
        return Result(dtype, 1, measure(llm, prompts, protocol.new_tokens, repetitions, params=params))


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
    return Picture(title, (panel,), f"Error bars reach over all runs.\nPublished: {STUDY.source}.")
