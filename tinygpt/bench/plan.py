"""A whole bench: what it will measure, checked before any work, and the work."""

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial

from tqdm import tqdm

from tinygpt.bench.build import Build
from tinygpt.bench.formats import where_text
from tinygpt.bench.machine_limits import MachineLimits, measure_device_limits, measure_limits
from tinygpt.bench.measure import Measurement
from tinygpt.bench.meter import meter_of
from tinygpt.bench.records import Record, Setup, counts_of, record_of
from tinygpt.bench.sweep import Case, cases_of, run_case
from tinygpt.engine.prefix_sharing import WORTH_WAITING
from tinygpt.errors import RequestError
from tinygpt.execution.backend import load_backend
from tinygpt.hardware.cpu import cpu_name
from tinygpt.hardware.threads import thread_count
from tinygpt.llm import LLM
from tinygpt.parallel.sources import open_sources
from tinygpt.weights.config import ModelConfig

NOT_ONE = (
    ", or 0, which is no generation: the first new token comes with the reading of the prompt, so that one alone "
    "leaves nothing to measure"
)


@dataclass(frozen=True)
class Plan:
    """Every case with each dtype and each number of threads."""

    model: str
    caches: dict[str, str]  # each dtype of the weights, and that of the KV cache beside it
    threads: tuple[int, ...]
    cases: tuple[Case, ...]
    repetitions: int
    config: ModelConfig
    ranks: tuple[int, int] = (1, 1)  # tensor_parallel_size and pipeline_parallel_size
    device: str = "cpu"

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(self.caches)

    def __len__(self) -> int:
        return len(self.dtypes) * len(self.threads) * len(self.cases)

    @property
    def outline(self) -> list[Record]:
        """The records to come, as far as they are known before any work: enough for a picture's lines."""
        return [
            {"model_filename": self.model, "cpu_info": "", "dtype": dtype, "n_threads": threads, "samples_ts": [1.0]}
            | {"batch_size": case.batch_size, **counts_of(case.prompt_length, case.new_tokens)}
            for dtype in self.dtypes
            for threads in self.threads
            for case in self.cases
        ]

    @property
    def max_batch_size(self) -> int:
        return max(case.batch_size for case in self.cases)

    @property
    def step_tokens(self) -> int:
        """The largest number of new tokens in a step: LLM's default, or enough to read a batch of short prompts in one
        step, as otherwise the first sequence would end before the last begins to decode."""
        short = [case for case in self.cases if case.new_tokens and case.prompt_length <= WORTH_WAITING]
        at_once = max((case.batch_size * case.prompt_length for case in short), default=0)
        return max(load_backend(self.device, "auto").MAX_STEP_TOKENS, self.max_batch_size, at_once)

    @property
    def max_length(self) -> int:
        return max(case.length for case in self.cases)


@dataclass(frozen=True)
class Measured:
    """A case that was measured; `ended` is when."""

    dtype: str
    threads: int
    case: Case
    measurement: Measurement
    ended: datetime


@dataclass(frozen=True)
class Findings:
    """All that a run has measured so far. `limits` are the best seen with each number of threads."""

    tests: list[Measured] = field(default_factory=list)
    limits: dict[int, MachineLimits] = field(default_factory=dict)

    def add_limits(self, dtype: str, threads: int, device: str) -> None:
        """Measure them once more: the machine has better moments."""
        now = measure_device_limits(dtype) if device == "cuda" else measure_limits(dtype, threads)
        self.limits[threads] = now.best(self.limits.get(threads, now))


def make_plan(
    model: str,
    dtypes: Sequence[str],
    threads: Sequence[int | None],
    batch_sizes: Sequence[int],
    prompt_lengths: Sequence[int],
    new_tokens: Sequence[int],
    repetitions: int,
    ranks: tuple[int, int] = (1, 1),
    device: str = "cpu",
    kv_cache_dtype: str = "auto",
) -> Plan:
    """threads: on a GPU, None alone: those of the host count for little there.

    Raises RequestError for what is impossible, and CheckpointError if the model cannot be found."""
    _check_numbers("--batch-sizes", batch_sizes, 1)
    _check_numbers("--prompt-lengths", prompt_lengths, 1)
    _check_numbers("--repetitions", [repetitions], 1)
    _check_numbers("--new-tokens", set(new_tokens) - {0}, 2, NOT_ONE)
    counts = tuple(dict.fromkeys(map(thread_count, threads)))
    sources = open_sources(model, dtypes, ranks, device, kv_cache_dtype)
    caches, config = {source.dtype: source.kv_cache_dtype for source in sources}, sources[0].config
    cases = cases_of(batch_sizes, prompt_lengths, new_tokens)
    _check_length(model, config, max(cases, key=lambda case: case.length))
    return Plan(model, caches, counts, cases, repetitions, config, ranks, device)


def run_plan(plan: Plan, records: list[Record], tell: Callable[[str], None] | None = None) -> None:
    """Append a record of each case to `records`; an interruption leaves those already measured there.

    Records are made at the end, as their shares are of the best limits seen before, between and after the cases.
    tell: is told how fast each case was as soon as it is measured, beside a bar where stderr is a terminal.
    """
    found, build, cpu, where = Findings(), Build.find(), cpu_name(), partial(where_text, device=plan.device)

    def tell_last() -> None:
        if tell is not None:
            record = _record(plan, build, cpu, found.tests[-1], found)
            case = f"{record['dtype']}, {where(record['n_threads'])}, batch {record['batch_size']}"
            with tqdm.external_write_mode(file=sys.stderr):
                tell(f"{len(found.tests)} of {len(plan)}: {case}, {record['test']}: {record['median_ts']:.1f} tokens/s")

    try:
        # disable=None: no bar where stderr is no terminal.
        with tqdm(total=len(plan), unit="case", disable=True if tell is None else None) as bar:
            for dtype in plan.dtypes:
                for threads in plan.threads:
                    _run_together(plan, dtype, threads, bar, found, tell_last)
    finally:
        records.extend(_record(plan, build, cpu, test, found) for test in found.tests)


def _run_together(
    plan: Plan, dtype: str, threads: int, bar: tqdm, found: Findings, tell_last: Callable[[], None]
) -> None:
    """The cases of one loaded model."""
    name, meter = f"{dtype}, {where_text(threads, plan.device)}", meter_of(plan.device)
    bar.set_description_str(f"loading {name}")
    found.add_limits(dtype, threads, plan.device)
    with _opened(plan, dtype, threads) as llm:
        for case in plan.cases:
            bar.set_description_str(f"{name}, {case}")
            measurement = run_case(llm, case, plan.repetitions, meter)
            found.tests.append(Measured(dtype, threads, case, measurement, datetime.now(timezone.utc)))
            bar.update()
            tell_last()
    found.add_limits(dtype, threads, plan.device)


def _record(plan: Plan, build: Build, cpu: str, test: Measured, found: Findings) -> Record:
    limits, gpu = found.limits[test.threads], meter_of(plan.device).gpu
    about = plan.model, plan.config, test.dtype, plan.caches[test.dtype], test.threads, plan.step_tokens, limits
    setup = Setup(build, cpu, *about, plan.ranks, gpu)
    return record_of(setup, test.measurement, test.case.new_tokens > 0, test.ended)


def _opened(plan: Plan, dtype: str, threads: int) -> LLM:
    try:
        return LLM(
            plan.model,
            dtype,
            threads=threads,
            device=plan.device,
            kv_cache_dtype=plan.caches[dtype],
            max_num_seqs=plan.max_batch_size,
            max_model_len=plan.max_length,
            max_num_batched_tokens=plan.step_tokens,
            prefix_cache_seqs=0,
            tensor_parallel_size=plan.ranks[0],
            pipeline_parallel_size=plan.ranks[1],
        )
    except RequestError as error:
        raise RequestError(
            f"{error} In bench, max_num_seqs is the largest of --batch-sizes, {plan.max_batch_size}, and the positions "
            "are those of the longest of --prompt-lengths and of --new-tokens."
        ) from None


def _check_numbers(flag: str, numbers: Collection[int], least: int, also: str = "") -> None:
    for number in numbers:
        if number < least:
            raise RequestError(f"{flag} gives {number} and must give {least} or more{also}.")


def _check_length(model: str, config: ModelConfig, longest: Case) -> None:
    if longest.length <= config.n_positions:
        return
    if not longest.new_tokens:
        raise RequestError(
            f"--prompt-lengths gives {longest.prompt_length} and may give {config.n_positions - 1} at most: "
            f"{model} has {config.n_positions} positions, and reading a prompt ends with its first new token, which "
            "takes one."
        )
    raise RequestError(
        f"a prompt of {longest.prompt_length} tokens and {longest.new_tokens} after it take {longest.length} positions "
        f"and {model} has {config.n_positions}: give smaller --prompt-lengths or --new-tokens."
    )
