"""tinygpt, through LLM.generate: scheduling, sampling and all."""

import time
from pathlib import Path

from tinygpt import LLM, SamplingParams

from .engine import milliseconds


class StampedLLM(LLM):
    """Remembers when each step began."""

    def step(self) -> None:
        self.step_starts.append(time.perf_counter())
        super().step()


class Engine:
    def __init__(self, folder: Path, dtype: str, threads: int):
        # The same prompts again and again: none may be found in the prefix cache.
        self.llm = StampedLLM(str(folder), dtype=dtype, threads=threads, prefix_cache_seqs=0)

    def prefill_ms(self, ids: list[list[int]]) -> float:
        return milliseconds(lambda: self._generate(ids, 1))

    def step_ms(self, ids: list[list[int]], new: int) -> float:
        """Of the steps in which every sequence decodes: long prompts are read over several steps, others decoding."""
        metrics = [output.metrics for output in self._generate(ids, new)]
        start, stop = max(m.first_token for m in metrics), min(m.finished for m in metrics)
        return 1e3 * (stop - start) / sum(start <= t < stop for t in self.llm.step_starts)

    def last_logits(self, ids: list[int]) -> list[float]:
        return self.llm.logits(ids)[-1].tolist()

    def _generate(self, ids: list[list[int]], new: int) -> list:
        self.llm.step_starts = []
        return self.llm.generate(ids, SamplingParams(max_tokens=new, ignore_eos=True), use_tqdm=False)
