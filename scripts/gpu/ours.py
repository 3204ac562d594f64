"""tinygpt through its public API: scheduling, sampling and all."""

from functools import partial

import numpy as np

from tinygpt import LLM, SamplingParams

from .cases import PREFILL_TOKENS, Case, Job
from .check import CHECK_PROMPT, GREEDY_TOKENS, Evidence, check_ids
from .engine import milliseconds, repeated

# Prompts of a large batch are read in few steps, so that all sequences decode before the first timed step.
STEP_TOKENS = 2048


class Ours:
    """One LLM for all cases of a job: its largest batch is the largest that they have."""

    def __init__(self, job: Job):
        self.steps, self.repeats = job.steps, job.repeats
        largest = max((case.batch for _, case in job.runs), default=1)
        self.llm = LLM(
            job.name,
            dtype=job.dtype,
            device=job.device,
            max_num_seqs=largest,
            max_num_batched_tokens=STEP_TOKENS,
            prefix_cache_seqs=0,
        )

    def measure(self, engine: str, case: Case) -> list[float]:
        time_once = self._prefill_ms if case.is_prefill else self._step_ms
        return repeated(partial(time_once, case), self.repeats)

    def _prefill_ms(self, case: Case, repeat: int) -> float:
        token_ids = case.prompts(PREFILL_TOKENS, self.llm.config.vocab_size, seed=repeat)
        return milliseconds(lambda: self._generate(token_ids, 1))

    def _step_ms(self, case: Case, repeat: int) -> float:
        """By the difference of two lengths: prompts, start and end are in both, and fall out.

        The prompts of a batch may be read in several steps, in which the first of them decode already. The shorter
        length is more than those steps, so that what is left is self.steps steps of the whole batch.
        """
        first = 16 if case.batch == 1 else 16 + case.batch * case.context // STEP_TOKENS
        token_ids = case.prompts(case.context - self.steps // 2 - first, self.llm.config.vocab_size, seed=repeat)
        short = milliseconds(lambda: self._generate(token_ids, first))
        long = milliseconds(lambda: self._generate(token_ids, first + self.steps))
        return (long - short) / self.steps

    def evidence(self) -> Evidence:
        token_ids = check_ids(self.llm.config.vocab_size)
        (output,) = self._generate([token_ids[:CHECK_PROMPT]], GREEDY_TOKENS)
        logits = np.asarray(self.llm.logits(token_ids), np.float32)
        return Evidence(logits, np.array(output.outputs[0].token_ids))

    def _generate(self, token_ids: list[list[int]], new: int) -> list:
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        return self.llm.generate(token_ids, params, use_tqdm=False)
