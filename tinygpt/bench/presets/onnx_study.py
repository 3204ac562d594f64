"""onnx-study: the time of a generation by prompt length and generation length, with a perplexity for each dtype.

The study is jdvin/whistle-stop, of commit 1c53a109 and README.md of f27c8445: Hugging Face's gpt2 against ONNX exports
of it on a CPU. The lengths are those of the last cell of test_lab.ipynb. Its results are graphs, with the standard
error of the mean as error bars; numbers stand in README.md's log alone, for Hugging Face's model and nanoGPT.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tinygpt.bench.formats import Record, table
from tinygpt.bench.picture import Line, Panel, Picture, Point
from tinygpt.bench.presets.options import PresetOptions
from tinygpt.bench.presets.report import ABSENT, PresetReport, Study
from tinygpt.bench.presets.rerun import Rerun, Result, progress
from tinygpt.errors import CheckpointError, RequestError
from tinygpt.evaluation.perplexity import NUM_TOGETHER, perplexity
from tinygpt.evaluation.texts import read_text
from tinygpt.execution.model_source import load_tokenizer
from tinygpt.llm import LLM
from tinygpt.weights.open import open_checkpoint

SOURCE = "jdvin/whistle-stop"
STUDY = Study(
    "onnx-study",
    "prompt length x generation length",
    f"{SOURCE}, README.md and test_lab.ipynb",
    "on the CPU, not named, of a Mac",
)
NO_TEXT, NO_TOKENIZER = "no text given", "no tokenizer"


@dataclass(frozen=True)
class Protocol:
    """The grid, and the generation lengths of the log. The log does not state its prompt: the notebook then had 10."""

    prompt_lengths: tuple[int, ...] = (100, 200, 300)
    generation_lengths: tuple[int, ...] = (1, 100, 200, 400, 500)
    log_prompt_length: int = 10
    log_lengths: tuple[int, ...] = (1, 10, 100, 1000)
    repetitions: int = 5
    num_characters: int = 10_000  # of a text for perplexity: the study has 10 passages of up to 1000

    @property
    def grid(self) -> list[tuple[int, int]]:
        return [(prompt, new) for prompt in self.prompt_lengths for new in self.generation_lengths]

    @property
    def log(self) -> list[tuple[int, int]]:
        return [(self.log_prompt_length, new) for new in self.log_lengths]


FULL = Protocol()
SMALL = replace(FULL, prompt_lengths=(100, 200), generation_lengths=(1, 100, 200), log_lengths=(1, 10, 100))


@dataclass(frozen=True)
class Published:
    """Seconds, of README.md's log, which gives more digits."""

    new_tokens: int
    hf_base: float
    nano_gpt: float


PUBLISHED = (
    Published(1, 0.0348, 0.0639),
    Published(10, 0.2157, 0.6021),
    Published(100, 2.1581, 6.6107),
    Published(1000, 26.4266, 291.9332),
)


@dataclass(frozen=True)
class OfDtype:
    """All that is measured in one precision: results by (prompt length, new tokens)."""

    dtype: str
    results: dict[tuple[int, int], Result]
    perplexity: float | None
    has_tokenizer: bool

    @property
    def perplexity_cell(self) -> str:
        if self.perplexity is not None:
            return f"{self.perplexity:.4f}"
        return NO_TEXT if self.has_tokenizer else NO_TOKENIZER


def run(options: PresetOptions, records: list[Record]) -> PresetReport:
    """Measure, and make the graph's table, and the log's with the published seconds."""
    protocol = SMALL if options.small else FULL
    text = None if options.text is None else read_text("--text", options.text)[: protocol.num_characters]
    rerun = Rerun.prepare(STUDY, options, records)
    if text is not None:
        _check_tokenizer(options.model)
    cases, left_out = rerun.fitting([*protocol.grid, *protocol.log])
    found = [_measure(rerun, protocol, dtype, cases, text) for dtype in rerun.options.dtypes]
    tables = [_grid_table(protocol, found), _log_table(protocol, found)]
    return rerun.report(tables, [*left_out, *_notes(options, protocol)], _picture(rerun.model, protocol, found))


def _measure(rerun: Rerun, protocol: Protocol, dtype: str, cases: list[tuple[int, int]], text: str | None) -> OfDtype:
    results: dict[tuple[int, int], Result] = {}
    with rerun.opened(dtype, NUM_TOGETHER) as llm:
        has_tokenizer = _has_tokenizer(llm)
        # First, as it may refuse the text.
        quality = None if text is None else perplexity(llm, text).token_perplexity
        for prompt, new in progress(cases):
            more = {"warmups": int(not results), "perplexity": quality}  # what is warm stays warm
            results[prompt, new] = rerun.measure(llm, 1, [prompt], new, protocol.repetitions, **more)
        return OfDtype(dtype, results, quality, has_tokenizer)


def _has_tokenizer(llm: LLM) -> bool:
    try:
        return llm.tokenizer is not None
    except CheckpointError:
        return False


def _check_tokenizer(model: str) -> None:
    try:
        load_tokenizer(open_checkpoint(model))
    except CheckpointError:
        raise RequestError(
            f"--text needs a tokenizer and {model} has none that can be used: omit it, or give a model with one."
        ) from None


def _grid_table(protocol: Protocol, found: list[OfDtype]) -> str:
    lengths = protocol.generation_lengths
    header = ["model - prompt length", *(f"{new} generated (s)" for new in lengths), "perplexity"]
    rows = []
    for of_dtype in found:
        for prompt in protocol.prompt_lengths:
            cells = [_mean_and_error(of_dtype.results.get((prompt, new))) for new in lengths]
            rows.append([f"tinygpt, {of_dtype.dtype} - {prompt}", *cells, of_dtype.perplexity_cell])
    return table(header, rows, header[1:])


def _log_table(protocol: Protocol, found: list[OfDtype]) -> str:
    ours = [f"tinygpt, {of_dtype.dtype} (s)" for of_dtype in found]
    rows = []
    for row in PUBLISHED:
        case = protocol.log_prompt_length, row.new_tokens
        cells = [_mean_and_error(of_dtype.results.get(case)) for of_dtype in found]
        rows.append([str(row.new_tokens), *cells, str(row.hf_base), str(row.nano_gpt)])
    header = ["generated tokens", *ours, "published: hf base (s)", "published: nanoGPT (s)"]
    return table(header, rows, header[1:])


def _mean_and_error(result: Result | None) -> str:
    if result is None:
        return ABSENT
    error = f" ± {_standard_error(result.seconds):.4f}" if len(result.seconds) > 1 else ""
    return f"{statistics.mean(result.seconds):.4f}{error}"


def _standard_error(samples: list[float]) -> float:
    return statistics.stdev(samples) / len(samples) ** 0.5 if len(samples) > 1 else 0.0


def _notes(options: PresetOptions, protocol: Protocol) -> list[str]:
    where = "there was none: give --text FILE" if options.text is None else str(options.text)
    missing = [str(row.new_tokens) for row in PUBLISHED if row.new_tokens not in protocol.log_lengths]
    left_out = f"Left out ({ABSENT}) by --small: {', '.join(missing)} generated tokens of the log."
    return [
        *[left_out] * bool(missing),
        "Ours: mean ± standard error of the mean, as the study's error bars.",
        "Published for the grid: a graph without numbers, of Hugging Face's model and of ONNX, optimised and "
        "quantised. For a 50-token prompt and 100 generated tokens, the latter is more than 4 times faster.",
        f"The log does not state its prompt: ours has {protocol.log_prompt_length} tokens, as its notebook then had.",
        f"perplexity: per token, of the first {protocol.num_characters} characters of a text ({where}). The study's, "
        "a graph, is of 10 passages of WikiText-2, and its author doubts its absolute values.",
    ]


def _picture(model: str, protocol: Protocol, found: list[OfDtype]) -> Picture:
    """The grid, which was published without numbers; and the log's lengths, ours beside the published."""
    of_grid = [line for of_dtype in found for line in _lines(of_dtype, protocol.prompt_lengths)]
    of_log = _lines_of_log(protocol, found)
    label, unit = "generation length (tokens)", "inference time (s)"
    panels = [Panel("Ours, by prompt length", label, unit, tuple(of_grid), has_free_x=True)] if of_grid else []
    if of_log:
        panels.append(Panel(f"A prompt of {protocol.log_prompt_length} tokens", label, unit, of_log))
    note = (
        "Points are means, error bars standard errors of the mean.\n"
        f"Published: the log in README.md of {SOURCE}, which does not state its prompt."
    )
    return Picture(f"Inference time by generation length, {model}", tuple(panels), note, has_shared_y=True)


def _lines(found: OfDtype, prompt_lengths: Iterable[int]) -> list[Line]:
    """A line for each prompt length that was measured."""
    lines = []
    for length in prompt_lengths:
        points = [_point(new, of.seconds) for (prompt, new), of in found.results.items() if prompt == length]
        if points:
            lines.append(Line(f"tinygpt, {found.dtype}, prompt of {length}", tuple(points), found.dtype))
    return lines


def _lines_of_log(protocol: Protocol, found: list[OfDtype]) -> tuple[Line, ...]:
    """Ours, and the published ones as far as ours go; none if there is no place for any of ours."""
    ours = [line for of_dtype in found for line in _lines(of_dtype, [protocol.log_prompt_length])]
    rows = [row for row in PUBLISHED if any(row.new_tokens == point.x for line in ours for point in line.points)]
    theirs = {
        "hf base": [Point.exact(row.new_tokens, row.hf_base) for row in rows],
        "nanoGPT": [Point.exact(row.new_tokens, row.nano_gpt) for row in rows],
    }
    published = [
        Line(f"published: {name}, {STUDY.model}", tuple(points), is_published=True) for name, points in theirs.items()
    ]
    return (*ours, *published) if ours else ()


def _point(new_tokens: int, samples: list[float]) -> Point:
    mean, error = statistics.mean(samples), _standard_error(samples)
    return Point(new_tokens, mean, mean - error, mean + error)
