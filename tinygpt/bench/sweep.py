"""The cases of a bench: each batch size with each prompt length, and with each number of new tokens after it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tinygpt.bench.measure import Measurement, measure
from tinygpt.bench.meter import Meter
from tinygpt.llm import LLM
from tinygpt.sampling_params import SamplingParams


@dataclass(frozen=True)
class Case:
    """Reading `batch_size` prompts, where new_tokens is 0; otherwise generating so many tokens after each of them."""

    batch_size: int
    prompt_length: int
    new_tokens: int = 0

    @property
    def length(self) -> int:
        """Positions that a sequence takes: reading a prompt is followed by its first new token."""
        return self.prompt_length + max(self.new_tokens, 1)

    def __str__(self) -> str:
        return f"{self.batch_size} x {self.prompt_length}" + f" + {self.new_tokens}" * bool(self.new_tokens)


def cases_of(batch_sizes: Sequence[int], prompt_lengths: Sequence[int], new_tokens: Sequence[int]) -> tuple[Case, ...]:
    """From small to large, so that the peak of the memory is that of the case; 0 new tokens are no generation."""
    return tuple(
        Case(batch_size, prompt_length, count)
        for batch_size in sorted(set(batch_sizes))
        for prompt_length in sorted(set(prompt_lengths))
        for count in (0, *sorted(set(new_tokens) - {0}))
    )


def run_case(llm: LLM, case: Case, repetitions: int, meter: Meter | None = None) -> Measurement:
    """Measure a case with an LLM that has prefix_cache_seqs=0, and slots for the whole batch. meter: as `measure`'s."""
    if case.new_tokens:
        prompts = prompts_to_continue(llm.config.vocab_size, case)
        params = [_params(case.length - len(prompt)) for prompt in prompts]
        return measure(llm, prompts, case.new_tokens, repetitions, params=params, meter=meter)
    return measure(llm, prompts_to_read(llm.config.vocab_size, case), 1, repetitions, meter=meter)


def prompts_to_read(vocab_size: int, case: Case) -> list[list[int]]:
    """Random tokens, and no two prompts that begin alike, as far as the vocabulary goes: all must be computed."""
    ids = np.random.default_rng(0).integers(vocab_size, size=(case.batch_size, case.prompt_length))
    ids[:, 0] = np.arange(case.batch_size) % vocab_size
    return ids.tolist()


def prompts_to_continue(vocab_size: int, case: Case) -> list[list[int]]:
    """Prompts that differ in their last token alone: what they share is computed once and copied. Each still has its
    own keys and values, as with any other prompts.

    The first of several lacks its last token. It is read first and decodes while the others read their last token: from
    then on all are equally long, and decode together to the end.
    """
    beginning = np.random.default_rng(0).integers(vocab_size, size=case.prompt_length - 1).tolist()
    prompts = [[*beginning, i % vocab_size] for i in range(case.batch_size)]
    return [beginning, *prompts[1:]] if beginning and len(prompts) > 1 else prompts


def _params(new_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
