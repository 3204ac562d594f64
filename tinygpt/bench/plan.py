"""The cases of `tinygpt bench`, each with each dtype and number of threads, checked before any work."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from ..engine.model_runner import load_backend
from ..engine.scheduler import WORTH_WAITING
from ..errors import RequestError
from ..hardware import thread_count
from ..llm_args import LLMArgs
from ..ranks.lead import open_sources
from ..weights.config import ModelConfig
from .roofline import Case


@dataclass(frozen=True)
class Grid:
    """What is combined. A number of threads may be None, LLM's own."""

    dtypes: tuple[str, ...]
    threads: tuple[int | None, ...]
    batch_sizes: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    new_tokens: tuple[int, ...]
    repetitions: int

    def __post_init__(self):
        _check_numbers("--batch-sizes", self.batch_sizes, 1)
        _check_numbers("--prompt-lengths", self.prompt_lengths, 1)
        _check_numbers("--repetitions", [self.repetitions], 1)
        _check_numbers("--new-tokens", set(self.new_tokens) - {0}, 2, ", or 0 for no generation")

    @property
    def cases(self) -> tuple[Case, ...]:
        """The cases, from small to large; each prompt is read, too."""
        return tuple(
            Case(batch_size, (prompt_length,) * batch_size, count, is_at_depth=count > 0)
            for batch_size in sorted(set(self.batch_sizes))
            for prompt_length in sorted(set(self.prompt_lengths))
            for count in sorted({0, *self.new_tokens})
        )


def _check_numbers(flag: str, numbers: Collection[int], least: int, also: str = "") -> None:
    for number in numbers:
        if number < least:
            raise RequestError(f"{flag} gives {number} and must give {least} or more{also}.")


@dataclass(frozen=True)
class Plan:
    """Every case with each dtype and each number of threads."""

    args: LLMArgs
    caches: dict[str, str]  # dtype of the weights -> dtype of the KV cache
    threads: tuple[int, ...]
    cases: tuple[Case, ...]
    repetitions: int
    config: ModelConfig
    sampling: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.caches) * len(self.threads) * len(self.cases)

    @property
    def max_batch_size(self) -> int:
        return max(case.batch_size for case in self.cases)

    @property
    def step_tokens(self) -> int:
        """New tokens in a step. A batch of short prompts is read in one, or its first sequence would end too early."""
        short = [case for case in self.cases if case.is_at_depth and case.prompt_length <= WORTH_WAITING]
        at_once = max((case.batch_size * case.prompt_length for case in short), default=0)
        return max(load_backend(self.args.device, "auto").MAX_STEP_TOKENS, self.max_batch_size, at_once)

    @property
    def sizes(self) -> dict[str, int]:
        """Return arguments of an LLM, which has no prefix cache."""
        return {
            "max_num_seqs": self.max_batch_size,
            "max_num_batched_tokens": self.step_tokens,
            "max_model_len": max(case.length for case in self.cases),
            "prefix_cache_seqs": 0,
        }


def make_plan(args: LLMArgs, grid: Grid) -> Plan:
    """Return the cases of a model. Raise RequestError or CheckpointError if one cannot be measured."""
    counts = tuple(dict.fromkeys(map(thread_count, grid.threads)))
    sources = open_sources(args, grid.dtypes)
    caches = {source.dtype: source.kv_cache_dtype for source in sources}
    config = sources[0].config
    longest = max(grid.cases, key=lambda case: case.length)
    if longest.length > config.n_positions:
        sizes = f"a prompt of {longest.prompt_length} tokens and {max(longest.new_tokens, 1)} after it"
        raise RequestError(
            f"{sizes} take {longest.length} positions and {args.model} has {config.n_positions}."
        )
    return Plan(args, caches, counts, grid.cases, grid.repetitions, config)
