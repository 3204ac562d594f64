"""What all presets do: open the model, make its prompts, leave out what has no place, measure."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from tinygpt.bench.cores import crowd_note
from tinygpt.bench.measure import Measurement
from tinygpt.bench.picture import model_name
from tinygpt.bench.presets.options import PresetOptions
from tinygpt.bench.presets.report import ABSENT, Record, Study
from tinygpt.bench.words import parameters_text, threads_text
from tinygpt.bench.work import num_parameters
from tinygpt.config import ModelConfig
from tinygpt.errors import RequestError
from tinygpt.execution.backend import load_backend, resolve_dtype
from tinygpt.hardware.machine import cpu_name
from tinygpt.hardware.threads import thread_count
from tinygpt.llm import LLM
from tinygpt.weights.open import open_checkpoint

RANDOM_PROMPTS = (
    "Ours: prompts of the study's lengths, of random tokens that begin differently, so that nothing is known before "
    "it is read; tokenisation and warm-up are not timed."
)
SAME_SIZE = 0.1  # by how much two numbers of parameters may differ, of one size
Case = TypeVar("Case")


@dataclass(frozen=True)
class Result:
    """A measured case: `batch_size` sequences at once, in the precision `dtype`."""

    dtype: str
    batch_size: int
    measurement: Measurement

    @property
    def seconds(self) -> list[float]:
        """Of the whole generate, by repetition."""
        return [run.total for run in self.measurement.runs]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def first_tokens(self) -> list[float]:
        """Seconds to the first token, by repetition."""
        return [run.first_token for run in self.measurement.runs]


@contextmanager
def opened(options: PresetOptions, dtype: str, max_num_seqs: int, max_model_len: int | None = None) -> Iterator[LLM]:
    """The model, without a prefix cache: a repetition reads its prompts again."""
    sizes = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "prefix_cache_seqs": 0}
    try:
        llm = LLM(options.model, dtype, threads=options.threads, **sizes)
    except RequestError as error:
        raise RequestError(
            f"{error} Of a preset, max_num_seqs and the positions are its own: give another --dtype or model, or "
            "--small, which has fewer sizes."
        ) from None
    with llm:
        yield llm


def random_prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Token ids, the same at every call. No two prompts begin alike, as far as the vocabulary goes."""
    generator = np.random.default_rng(0)
    first = generator.permutation(vocab_size)
    rest = [generator.integers(0, vocab_size, length - 1).tolist() for length in lengths]
    return [[int(first[i % vocab_size]), *token_ids] for i, token_ids in enumerate(rest)]


def prepared(options: PresetOptions) -> tuple[PresetOptions, ModelConfig]:
    """The options with the precisions that they come to, each once, and the model's config.

    Raises RequestError for what is impossible, and CheckpointError if the model cannot be found.
    """
    thread_count(options.threads)
    for dtype in options.dtypes:
        load_backend("cpu", dtype)
    checkpoint = open_checkpoint(options.model)
    dtypes = dict.fromkeys(resolve_dtype(dtype, "cpu", checkpoint) for dtype in options.dtypes)
    return replace(options, dtypes=tuple(dtypes)), checkpoint.config


def fitting(
    options: PresetOptions, config: ModelConfig, cases: Iterable[tuple[int, int]]
) -> tuple[list[tuple[int, int]], list[str]]:
    """The cases (prompt length, new tokens) that the model has positions for, and notes that name the others.

    RequestError if none is left.
    """
    n_positions = config.n_positions
    fits, others = [], []
    for prompt, new in cases:
        (fits if prompt + new <= n_positions else others).append((prompt, new))
    named = ", ".join(f"{prompt} + {new}" for prompt, new in others)
    left_out = f"prompt + new tokens of {named} do not fit the {n_positions} positions of {options.model}"
    if not fits:
        raise RequestError(f"{left_out}: give a model with more positions.")
    return fits, [f"Left out ({ABSENT}): {left_out}."] if others else []


def progress(cases: Sequence[Case]) -> Iterable[Case]:
    """A bar on stderr where that is a terminal."""
    return tqdm(cases, unit="case", disable=None)


def here(study: Study, options: PresetOptions, config: ModelConfig) -> str:
    """What ours is measured on, and how that differs from the study's. Without a stop at its end."""
    threads, small = thread_count(options.threads), ", with fewer sizes and runs than the study has" * options.small
    parts = [f"{of_model(options, config)}, {threads_text(threads)} of {cpu_name()}{small}"]
    if crowd_note(threads):
        parts.append(f"{crowd_note(threads)}, and wait for one another")
    if abs(num_parameters(config) / study.num_parameters - 1) > SAME_SIZE:
        parts.append(f"This is another size than the study's {study.model}, so the figures are not of the same work")
    return ". ".join(parts)


def of_model(options: PresetOptions, config: ModelConfig) -> str:
    return f"{model_name(options.model)}, {parameters_text(num_parameters(config))} parameters"


def repetitions_of(options: PresetOptions, own: int) -> int:
    return own if options.repetitions is None else options.repetitions


def keep(study: Study, options: PresetOptions, result: Result, records: list[Record], **more: Any) -> Result:
    """Append the record of a result that was measured, with `more` in it, so that it outlasts an interruption."""
    records.append(record(study, options, result) | more)
    return result


def record(study: Study, options: PresetOptions, result: Result) -> Record:
    """A measured case. Times are of the whole generate, peak_memory is in bytes, null where the system does not say."""
    found, samples = result.measurement, [round(1e9 * seconds) for seconds in result.seconds]
    return {
        "preset": study.name,
        "model_filename": options.model,
        "dtype": result.dtype,
        "n_threads": thread_count(options.threads),
        "batch_size": result.batch_size,
        "num_prompts": found.batch_size,
        "n_prompt": found.prompt_length,
        "n_gen": found.new_tokens,
        "avg_ns": round(statistics.mean(samples)),
        "stddev_ns": round(statistics.stdev(samples)) if len(samples) > 1 else 0,
        "samples_ns": samples,
        "first_token_ns": [round(1e9 * seconds) for seconds in result.first_tokens],
        "num_steps": found.runs[-1].num_steps,
        "peak_memory": found.peak_memory or None,
    }
