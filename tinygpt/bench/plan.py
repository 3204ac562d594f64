"""A whole bench: what it will measure, checked before any work, and the work."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from tqdm import tqdm

from tinygpt.backend import MAX_STEP_TOKENS, load_backend, resolve_dtype
from tinygpt.bench.build import Build
from tinygpt.bench.limits import measure_limits
from tinygpt.bench.records import Record, Setup, record_of
from tinygpt.bench.sweep import Case, cases_of, run_case
from tinygpt.config import GPT2Config
from tinygpt.errors import RequestError
from tinygpt.llm import LLM
from tinygpt.machine import cpu_name
from tinygpt.threads import thread_count
from tinygpt.weights.packed import open_checkpoint


@dataclass(frozen=True)
class Plan:
    """Every case with each dtype and each number of threads."""

    model: str
    dtypes: tuple[str, ...]
    threads: tuple[int, ...]
    cases: tuple[Case, ...]
    repetitions: int

    def __len__(self) -> int:
        return len(self.dtypes) * len(self.threads) * len(self.cases)

    @property
    def max_batch_size(self) -> int:
        return max(case.batch_size for case in self.cases)

    @property
    def step_tokens(self) -> int:
        """New tokens in a step, at most: LLM's own choice."""
        return max(MAX_STEP_TOKENS["cpu"], self.max_batch_size)

    @property
    def max_length(self) -> int:
        return max(case.length for case in self.cases)


def make_plan(
    model: str,
    dtypes: Sequence[str],
    threads: Sequence[int | None],
    batch_sizes: Sequence[int],
    prompt_lengths: Sequence[int],
    new_tokens: Sequence[int],
    repetitions: int,
) -> Plan:
    """Raises RequestError for what is impossible, and CheckpointError if the model cannot be found."""
    _check_numbers("a batch size", batch_sizes, 1)
    _check_numbers("a prompt length", prompt_lengths, 1)
    _check_numbers("the number of repetitions", [repetitions], 1)
    for count in set(new_tokens) - {0}:  # the first new token comes with the prompt: no pass of its own to be timed
        _check_numbers("the number of new tokens", [count], 2, " or 0, which is no generation")
    counts = tuple(dict.fromkeys(map(thread_count, threads)))
    for dtype in dtypes:
        load_backend("cpu", dtype)
    checkpoint = open_checkpoint(model)
    resolved = tuple(dict.fromkeys(resolve_dtype(dtype, "cpu", checkpoint) for dtype in dtypes))
    cases = cases_of(batch_sizes, prompt_lengths, new_tokens)
    _check_length(model, checkpoint.config, max(cases, key=lambda case: case.length))
    return Plan(model, resolved, counts, cases, repetitions)


def run_plan(plan: Plan, show_progress: bool = False) -> Iterator[Record]:
    """A record of each case. Those of one dtype and number of threads come together, when all are measured."""
    # disable=None: no bar where stderr is no terminal.
    with tqdm(total=len(plan), unit="case", disable=None if show_progress else True) as bar:
        for dtype in plan.dtypes:
            for threads in plan.threads:
                yield from _run_together(plan, dtype, threads, bar)


def _run_together(plan: Plan, dtype: str, threads: int, bar: tqdm) -> Iterator[Record]:
    """The cases of one loaded model. The machine's limits are measured before and after: it has better moments."""
    results, name = [], f"{dtype}, threads {threads}"
    bar.set_description_str(f"loading {name}")
    limits = measure_limits(dtype, threads)
    with LLM(
        plan.model,
        dtype,
        threads=threads,
        max_num_seqs=plan.max_batch_size,
        max_model_len=plan.max_length,
        max_num_batched_tokens=plan.step_tokens,
        prefix_cache_seqs=0,
    ) as llm:
        config = llm.config
        for case in plan.cases:
            bar.set_description_str(f"{name}, {case}")
            results.append((run_case(llm, case, plan.repetitions), case.new_tokens > 0, datetime.now(timezone.utc)))
            bar.update()
    limits = limits.best(measure_limits(dtype, threads))
    setup = Setup(Build.find(), cpu_name(), plan.model, config, dtype, threads, plan.step_tokens, limits)
    for result in results:
        yield record_of(setup, *result)


def _check_numbers(what: str, numbers: Sequence[int], least: int, also: str = "") -> None:
    for number in numbers:
        if number < least:
            raise RequestError(f"{what} is {number} and must be {least} or more{also}.")


def _check_length(model: str, config: GPT2Config, longest: Case) -> None:
    if longest.length > config.n_positions:
        raise RequestError(
            f"a prompt of {longest.prompt_length} tokens and {max(longest.new_tokens, 1)} after it take "
            f"{longest.length} positions and {model} has {config.n_positions}: take a shorter prompt, or fewer new "
            "tokens."
        )
