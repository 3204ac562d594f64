"""A study repeated on this machine: what all presets do around their own cases, tables and pictures."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from tinygpt.bench.formats import Record, crowd_note, parameters_text, threads_text
from tinygpt.bench.measure import Measurement, measure
from tinygpt.bench.meter import HostMeter, Meter, meter_of
from tinygpt.bench.picture import Picture, model_name
from tinygpt.bench.presets.options import PresetOptions
from tinygpt.bench.presets.report import ABSENT, PresetReport, Study
from tinygpt.bench.work import num_parameters
from tinygpt.errors import RequestError
from tinygpt.execution.model_source import ModelSource
from tinygpt.hardware.cpu import cpu_name
from tinygpt.hardware.threads import thread_count
from tinygpt.llm import LLM
from tinygpt.sampling_params import SamplingParams
from tinygpt.weights.config import ModelConfig

RANDOM_PROMPTS = (
    "Ours: prompts of the study's lengths, made of random tokens that begin differently, so that none of them is "
    "cached; tokenisation and warm-up are not timed."
)
SAME_SIZE = 0.1  # models whose numbers of parameters differ by less are of one size
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


@dataclass(frozen=True)
class Rerun:
    """A study, the user's options with each dtype resolved, the model's config, and the records measured so far."""

    study: Study
    options: PresetOptions
    config: ModelConfig
    records: list[Record]
    meter: Meter = field(default_factory=HostMeter)

    @classmethod
    def prepare(cls, study: Study, options: PresetOptions, records: list[Record]) -> "Rerun":
        """Raises RequestError for what is impossible, and CheckpointError if the model cannot be found."""
        thread_count(options.threads)
        sources = ModelSource.open_all(options.model, options.dtypes, options.device)
        dtypes = dict.fromkeys(source.dtype for source in sources)
        options = replace(options, dtypes=tuple(dtypes))
        return cls(study, options, sources[0].config, records, meter_of(options.device))

    @property
    def model(self) -> str:
        """What titles call the model."""
        return f"{model_name(self.options.model)}, {parameters_text(num_parameters(self.config))} parameters"

    @property
    def here(self) -> str:
        """What ours is measured on, and how that differs from the study's; sentences without the last full stop."""
        threads = thread_count(self.options.threads)
        gpu = self.meter.gpu
        machine = gpu or f"{threads_text(threads)} of {cpu_name()}"
        small = ", with fewer sizes and runs than the study has" * self.options.small
        parts = [f"{self.model}, {machine}{small}", "" if gpu else crowd_note(threads)]
        if abs(num_parameters(self.config) / self.study.num_parameters - 1) > SAME_SIZE:
            parts.append(
                f"This is another size than the study's {self.study.model}, so the figures are not of the same work"
            )
        return ". ".join(filter(None, parts))

    def fitting(self, cases: Iterable[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[str]]:
        """The cases (prompt length, new tokens) that the model has positions for, and a note that names the others.

        RequestError if none is left.
        """
        cases, n_positions = list(cases), self.config.n_positions
        fits = [case for case in cases if sum(case) <= n_positions]
        named = ", ".join(f"{prompt} + {new}" for prompt, new in cases if prompt + new > n_positions)
        left_out = f"prompt + new tokens of {named} do not fit the {n_positions} positions of {self.options.model}"
        if not fits:
            raise RequestError(f"{left_out}: give a model with more positions.")
        return fits, [f"Left out ({ABSENT}): {left_out}."] if named else []

    @contextmanager
    def opened(self, dtype: str, max_num_seqs: int, max_model_len: int | None = None) -> Iterator[LLM]:
        """The model, without a prefix cache: each repetition reads its prompts again."""
        sizes = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "prefix_cache_seqs": 0}
        try:
            llm = LLM(self.options.model, dtype, threads=self.options.threads, device=self.options.device, **sizes)
        except RequestError as error:
            raise RequestError(
                f"{error} A preset chooses max_num_seqs and the positions itself: give another --dtype or model, or "
                "--small, which has fewer sizes."
            ) from None
        with llm:
            yield llm

    def measure(
        self,
        llm: LLM,
        batch_size: int,
        prompt_lengths: Sequence[int],
        new_tokens: int,
        repetitions: int,
        params: SamplingParams | None = None,
        warmups: int | None = None,
        **more: Any,
    ) -> Result:
        """Measure a case, with the user's number of repetitions if given, and keep its record, with `more` in it."""
        prompts = random_prompts(prompt_lengths, llm.config.vocab_size)
        repetitions = repetitions if self.options.repetitions is None else self.options.repetitions
        found = measure(llm, prompts, new_tokens, repetitions, warmups, params, self.meter)
        return self.keep(Result(llm.dtype, batch_size, found), **more)

    def keep(self, result: Result, **more: Any) -> Result:
        """Keep its record, with `more` in it."""
        self.records.append(self._record(result) | more)
        return result

    def report(self, tables: Iterable[str], notes: Iterable[str], picture: Picture) -> PresetReport:
        """The study's page of markdown with its records and picture."""
        study = self.study
        parts = [
            f"## {study.name}: {study.title}",
            f"Published: {study.source}; {study.model}, {study.hardware}.",
            f"Here: {self.here}.",
            *tables,
            "\n".join(f"- {note}" for note in (RANDOM_PROMPTS, *notes)),
        ]
        return PresetReport("\n\n".join(parts), self.records, picture)

    def _record(self, result: Result) -> Record:
        """Times are of the whole generate; peak_memory is in bytes, null where the system does not say."""
        found, samples = result.measurement, [round(1e9 * seconds) for seconds in result.seconds]
        return {
            "preset": self.study.name,
            "model_filename": self.options.model,
            "dtype": result.dtype,
            "gpu_info": self.meter.gpu,
            "n_threads": thread_count(self.options.threads),
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


def random_prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Token ids, the same at every call. No two prompts begin alike, as far as the vocabulary goes."""
    generator = np.random.default_rng(0)
    first = generator.permutation(vocab_size)
    rest = [generator.integers(0, vocab_size, length - 1).tolist() for length in lengths]
    return [[int(first[i % vocab_size]), *token_ids] for i, token_ids in enumerate(rest)]


def progress(cases: Sequence[Case]) -> Iterable[Case]:
    """A bar on stderr where that is a terminal."""
    return tqdm(cases, unit="case", disable=None)
