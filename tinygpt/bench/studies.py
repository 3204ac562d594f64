"""Published studies of GPT-2's speed as rows of data: `bench --preset NAME` repeats one on this machine.

A row of STUDIES holds a study's cases, the columns of its table, and the published figures with their source.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

from ..hardware import cpu_name, thread_count
from .report import Lines, Panel, Record, cells_of, draw, parameters_text, runs_text, table, threads_text
from .roofline import Case, num_parameters

NOT_PUBLISHED, ABSENT = "not published", "-"
NUM_CHARACTERS = 10_000  # of a text for perplexity, as 10 passages of up to 1000
SAME_SIZE = 0.1  # relative difference of models of one size
NUM_CALLERS = 64  # connections to the model in another process


@dataclass(frozen=True)
class Study:
    """A published study. --small runs the first `small` cases."""

    name: str
    summary: str
    source: str
    hardware: str
    cases: tuple[Case, ...]
    small: tuple[Case, ...]
    repetitions: tuple[int, int]  # of the study, and of --small
    columns: dict[str, str]  # title -> format of a record with the fields of `derived`
    x: tuple[str, str]  # axis label and field
    y: tuple[str, str]  # axis label and field of samples
    published_columns: tuple[str, ...] = ()
    # By the case's sizes.
    published: dict[tuple[int, int, int], tuple[Any, ...]] = field(default_factory=dict)
    published_rows: tuple[tuple[str, ...], ...] = ()  # of other implementations, below ours
    published_lines: dict[str, list[tuple[Any, float]]] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    notes: tuple[str, ...] = ()
    model: str = "GPT-2 124M"
    num_parameters: float = 124e6


def _cases(
    sizes: Iterable[int], lengths: tuple[int, ...], new: int, count: int | None = None
) -> tuple[Case, ...]:
    """Return a case for each batch size, of `count` prompts (None: the batch size) whose lengths go in turns."""
    return tuple(Case(size, tuple(islice(cycle(lengths), count or size)), new) for size in sizes)


def _grid(prompts: Iterable[int], new_tokens: Iterable[int]) -> tuple[Case, ...]:
    return tuple(Case(1, (prompt,), new) for prompt, new in product(prompts, new_tokens))


QUERY_LENGTHS = (3, 9, 27, 10, 10, 9, 12, 9, 14, 4)  # of batch-inference's ten texts in GPT-2's tokens
TEXT_LENGTHS = (7, 5, 4)  # of batching-notebook's three texts
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
# (input, output) -> latency in ms and memory in GB of batch size 1, 2, 4 ... 64
FT_LATENCY = {
    (128, 8): (25.43, 26.42, 28.00, 32.56, 42.87, 62.61, 104.51),
    (512, 32): (92.01, 97.87, 110.7, 136.45, 189.91, 296.15, 529.18),
}
FT_MEMORY = {
    (128, 8): (3.43, 3.46, 3.51, 3.61, 3.78, 4.13, 4.81),
    (512, 32): (3.57, 3.65, 3.78, 4.12, 4.8, 6.09, 8.67),
}
# Batch size -> duration in ms, tokens/ms, latency in ms.
NOTEBOOK = {1: (59.8, 0.2, 6.0), 2: (59.9, 0.3, 6.0), 4: (59.3, 0.7, 5.9), 8: (61.6, 1.3, 6.2)}
NOTEBOOK |= {16: (64.4, 2.5, 6.4), 32: (67.2, 4.8, 6.7), 64: (75.6, 8.5, 7.6), 128: (93.0, 13.8, 9.3)}
ONNX_LOG = {1: (0.0348, 0.0639), 10: (0.2157, 0.6021), 100: (2.1581, 6.6107), 1000: (26.4266, 291.9332)}

STUDIES = {
    study.name: study
    for study in (
        Study(  # docs of commit ca20ab04 (RTX 2080 Ti) and 5823a2d8 (V100)
            name="batch-inference",
            summary="100 queries of 64 new tokens, batch 8 against batch 1 (microsoft/batch-inference)",
            source='microsoft/batch-inference, docs/examples/gpt_completion.rst, "GPT Completion"',
            hardware="by Hugging Face in PyTorch on the GPU that is named",
            cases=_cases((1, 8), QUERY_LENGTHS, 64, 100),
            small=_cases((1, 8), QUERY_LENGTHS, 64, 20),
            repetitions=(3, 1),
            columns={
                "Method": "{name}, batch {batch_size}",
                "Query Count": "{num_prompts}",
                "Execution Time": "{median_seconds:.2f}s",
                "Throughput comparing to Baseline": "{speedup:.2g}x",
                "Max Batch Size": "{batch_size}",
                "Avg Batch Size": "{tokens_per_step:.3g}",
                "Generated Token Count": "{num_tokens}",
                "Inference Count": "{num_steps:d}",
            },
            published_rows=(
                ("Baseline, RTX 2080 Ti", "100", "63.05s", "1x", "1", "1", "6400", "6400"),
                ("With batch-inference, RTX 2080 Ti", "100", "12.07s", "5x", "8", "7.69", "6400", "832"),
                ("Baseline, V100", "100", "78.04s", "1x", "1", "1", "6400", "6400"),
                ("With batch-inference, V100", "100", "4.86s", "16x", "32", "25", "6400", "256"),
            ),
            published_lines={
                "RTX 2080 Ti": [(1, 6400 / 63.05), (8, 6400 / 12.07)],
                "V100": [(1, 6400 / 78.04), (32, 6400 / 4.86)],
            },
            x=("largest batch (sequences)", "batch_size"),
            y=("generated tokens/s", "tokens_per_s"),
            notes=(
                "Avg Batch Size: generated tokens / forward passes. The study does not say how often it ran.",
                f"remote (--remote): the model is behind `tinygpt serve`, which {NUM_CALLERS} connections of one "
                f"RemoteLLM ask; its number of passes is unknown ({ABSENT}).",
            ),
        ),
        Study(  # the notebook's output in commit b767e768
            name="batching-notebook",
            summary="batch 1 to 128: duration, throughput and latency (pkuwangh/mlsys, P02 - Batching)",
            source='pkuwangh/mlsys, p02-batching.ipynb, "Throughput vs Latency"',
            hardware="by Hugging Face in PyTorch on a GPU that is not named",
            cases=_cases(SIZES, TEXT_LENGTHS, 10),
            small=_cases(SIZES[:4], TEXT_LENGTHS, 10),
            repetitions=(5, 3),
            columns={
                "implementation": "{name}",
                "bs": "{batch_size}",
                "duration (ms)": "{median_milliseconds:.1f}",
                "throughput (tokens/ms)": "{median_tokens_per_ms:.2f}",
                "avg latency (ms)": "{ms_per_token:.2f}",
            },
            published_columns=("duration (ms)", "throughput (tokens/ms)", "avg latency (ms)"),
            published={(size, 7, 10): figures for size, figures in NOTEBOOK.items()},
            published_lines={
                "a GPU that is not named": [
                    (ms, 10 * size / total) for size, (total, _, ms) in NOTEBOOK.items()
                ]
            },
            x=("latency (ms/token)", "ms_per_token"),
            y=("throughput (tokens/ms)", "tokens_per_ms"),
            notes=(
                "The notebook's single run times tokenization and making text too.",
                "avg latency is duration / 10 new tokens.",
            ),
        ),
        Study(  # README.md of commit 46802a35
            name="cpu-study",
            summary="a 13-token prompt, 100 new tokens, top-k 40, ten runs, by dtype (bloomen/gpt-2-hf)",
            source='bloomen/gpt-2-hf, README.md, "GPT-2 Performance Considerations"',
            hardware="on the CPU, not named, of a Linux workstation",
            cases=_cases((1,), (13,), 100),
            small=_cases((1,), (13,), 100),
            repetitions=(10, 3),
            sampling={"temperature": 1.0, "top_k": 40, "seed": 42},
            columns={
                "implementation": "{name}",
                "new tokens": "{n_gen}",
                "minimum inference time (s)": "{fastest_s:.3f}",
                "median (s)": "{median_seconds:.3f}",
                "time to first token (ms)": "{first_token_ms:.1f}",
                "time per output token (ms)": "{later_token_ms:.3f}",
                "tokens/s": "{median_tokens_per_s:.1f}",
            },
            published_rows=(
                ("OpenAI's script, TensorFlow 1.15", "100", "3.4", *[NOT_PUBLISHED] * 4),
                ("Hugging Face, PyTorch", "up to 87", "1.7", *[NOT_PUBLISHED] * 4),
                ("Hugging Face, PyTorch, float16 quantisation", "up to 87", "1.5", *[NOT_PUBLISHED] * 4),
            ),
            published_lines={
                "minimum of 10": [("TensorFlow", 3.4), ("Hugging Face", 1.7), ("HF, float16", 1.5)]
            },
            x=("implementation", "dtype"),
            y=("inference time (s)", "seconds"),
            notes=(
                "Time per output token: of the tokens after the first.",
                "The study's rows of Hugging Face's have max_length=100, which counts the prompt: at most 87 tokens "
                "are new. They include making text; TensorFlow's is of the inference step.",
            ),
        ),
        Study(  # commit 1c53a109; the log is in README.md of f27c8445
            name="onnx-study",
            summary="prompt x generation length, with perplexity by dtype (jdvin/whistle-stop)",
            source="jdvin/whistle-stop, README.md and test_lab.ipynb",
            hardware="on the CPU, not named, of a Mac",
            cases=_grid((100, 200, 300), (1, 100, 200, 400, 500)) + _grid((10,), ONNX_LOG),
            small=_grid((100, 200), (1, 100, 200)) + _grid((10,), (1, 10, 100)),
            repetitions=(5, 5),
            columns={
                "model": "{name}",
                "prompt length": "{n_prompt}",
                "generated tokens": "{n_gen}",
                "time (s)": "{mean_and_error}",
                "perplexity": "{perplexity:.4f}",
            },
            published_columns=("hf base (s)", "nanoGPT (s)"),
            published={(1, 10, new): seconds for new, seconds in ONNX_LOG.items()},
            published_lines={
                name: [(new, seconds[i]) for new, seconds in ONNX_LOG.items()]
                for i, name in enumerate(("hf base", "nanoGPT"))
            },
            x=("generation length (tokens)", "n_gen"),
            y=("inference time (s)", "seconds"),
            notes=(
                "Ours: mean ± standard error of the mean, as the study's error bars.",
                "Published: a log that does not state its prompt; the notebook then had one of 10 tokens. The grid was "
                "published as a graph without numbers.",
                f"perplexity: per token, of the first {NUM_CHARACTERS} characters of --text FILE. The study's is a "
                "graph of 10 passages of WikiText-2.",
            ),
        ),
        Study(  # docs/gpt_guide.md of commit 07fdd2fc: the model nearest to GPT-2 355M
            name="fastertransformer",
            summary="batch x input x output length: latency and memory (NVIDIA/FasterTransformer)",
            source='NVIDIA/FasterTransformer, docs/gpt_guide.md, "Performance of GPT-350M"',
            hardware="24 layers, 1024 wide, FP16, on one A100-80GB",
            model="GPT-350M",
            num_parameters=355e6,
            cases=tuple(case for prompt, new in FT_LATENCY for case in _cases(SIZES[:7], (prompt,), new)),
            small=tuple(case for prompt, new in FT_LATENCY for case in _cases(SIZES[:3], (prompt,), new)),
            repetitions=(5, 2),
            sampling={"temperature": 1.0, "top_p": 0.9, "seed": 0},
            columns={
                "implementation": "{name}",
                "Batch_size": "{batch_size}",
                "Input Seqlen": "{n_prompt}",
                "Output Seqlen": "{n_gen}",
                "Latency (ms)": "{median_milliseconds:.2f}",
                "Memory Usage (GB)": "{memory_gb:.2f}",
            },
            published_columns=("FT Latency (ms)", "Memory Usage (GB)"),
            published={
                (size, *lengths): figures
                for lengths, row in FT_LATENCY.items()
                for size, figures in zip(SIZES, zip(row, FT_MEMORY[lengths], strict=True), strict=False)
            },
            published_lines={
                f"A100, {a} + {b}": [*zip(SIZES, row, strict=False)] for (a, b), row in FT_LATENCY.items()
            },
            x=("batch size (sequences)", "batch_size"),
            y=("latency (ms)", "milliseconds"),
            notes=(
                "Memory of ours: the peak of the process, Python and kernels included; published: the GPU's.",
            ),
        ),
    )
}


@dataclass(frozen=True)
class Options:
    """Choices of the user. repetitions: None is the study's number. text: for perplexity."""

    model: str
    dtypes: tuple[str, ...] = ("auto",)
    threads: int | None = None
    repetitions: int | None = None
    small: bool = False
    text: str | None = None
    remote: bool = False
    device: str = "cpu"


def derived(records: list[Record]) -> list[Record]:
    """Return records with the fields that columns and axes of studies show.

    speedup: over the first record of the dtype, here or remote.
    """
    rows, baselines = [], {}
    for record in records:
        n_gen = record["n_gen"]
        num_steps = record["num_steps"]
        is_remote = record.get("remote", False)
        seconds, first_tokens = (
            [ns / 1e9 for ns in record[name]] for name in ("samples_ns", "first_token_ns")
        )
        rest = [total - first for total, first in zip(seconds, first_tokens, strict=True)]
        num_tokens = record["num_prompts"] * n_gen
        median = statistics.median(seconds)
        error = f" ± {statistics.stdev(seconds) / len(seconds) ** 0.5:.4f}" if len(seconds) > 1 else ""
        samples = {
            "seconds": seconds,
            "milliseconds": [1e3 * total for total in seconds],
            "tokens_per_s": [num_tokens / total for total in seconds],
            "tokens_per_ms": [num_tokens / (1e3 * total) for total in seconds],
        }
        more = {
            "name": f"tinygpt, {record['dtype']}" + ", remote" * is_remote,
            "num_tokens": num_tokens,
            "mean_and_error": f"{statistics.mean(seconds):.4f}{error}",
            "fastest_s": min(seconds),
            "speedup": baselines.setdefault((record["dtype"], is_remote), median) / median,
            "tokens_per_step": num_steps and num_tokens / num_steps,
            "ms_per_token": 1e3 * median / n_gen,
            "first_token_ms": 1e3 * statistics.median(first_tokens),
            "later_token_ms": 1e3 * statistics.median(rest) / max(n_gen - 1, 1),
            "memory_gb": record["peak_memory"] and record["peak_memory"] / 1e9,
        }
        medians = {f"median_{name}": statistics.median(values) for name, values in samples.items()}
        rows.append({**record, **samples, **medians, **more})
    return rows


def study_text(study: Study, options: Options, records: list[Record], notes: list[str]) -> str:
    """Put our rows next to or above the published figures, and add notes."""
    header = [*study.columns, *(f"published: {title}" for title in study.published_columns)]
    absent = (ABSENT,) * len(study.published_columns)
    rows = []
    for record in derived(records):
        published = study.published.get((record["batch_size"], record["n_prompt"], record["n_gen"]), absent)
        rows.append([*cells_of(record, study.columns.values(), ABSENT), *map(str, published)])
    count = len(records[0]["samples_ns"])
    conditions = "random prompts of the study's lengths, none cached; tokenization and warm-up are not timed"
    lines = (f"Ours: {runs_text(count)}; {conditions}.", *notes, *study.notes)
    parts = (
        f"## {study.name}",
        f"Published: {study.source}; {study.model}, {study.hardware}.",
        f"Here: {_here(study, options, records[0]['gpu_info'])}.",
        table(header, [*rows, *map(list, study.published_rows)], header[1:]),
        "\n".join(f"- {line}" for line in lines),
    )
    return "\n\n".join(parts)


def _here(study: Study, options: Options, gpu: str) -> str:
    from ..weights.open import open_checkpoint

    size = num_parameters(open_checkpoint(options.model).config)
    machine = gpu or f"{threads_text(thread_count(options.threads))} of {cpu_name()}"
    small = ", with fewer sizes and runs than the study has" * options.small
    is_other = abs(size / study.num_parameters - 1) > SAME_SIZE
    other = (
        f". This is another size than the study's {study.model}, so the figures are not of the same work"
        * is_other
    )
    return f"{Path(options.model).name}, {parameters_text(size)} parameters, {machine}{small}{other}"


def draw_study(study: Study, options: Options, records: list[Record], path: Path) -> None:
    """Raise RequestError as `check_picture` does."""
    lines: Lines = {}
    has_lengths = len({(record["n_prompt"], record["n_gen"]) for record in records}) > 1
    for record in derived(records):
        lengths = f", prompt of {record['n_prompt']}" if has_lengths else ""
        lines.setdefault(record["name"] + lengths, []).append((record[study.x[1]], record[study.y[1]]))
    published: Lines = {
        f"published: {study.model}, {name}": [(x, [y]) for x, y in points]
        for name, points in study.published_lines.items()
    }
    panel = Panel("", study.x[0], study.y[0], lines, published)
    title = f"{study.name}, {Path(options.model).name}"
    draw(path, title, [panel], f"Published: {study.source}.")
