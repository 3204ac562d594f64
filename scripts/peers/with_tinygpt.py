"""tinygpt, through LLM.generate: scheduling, sampling and all."""

import time
from pathlib import Path
from typing import Any

from tinygpt import LLM, SamplingParams
from tinygpt.execution.model_runner import ModelRunner

from .engine import milliseconds


class StampedRunner:
    """A runner that is another one, and remembers when each of its calls began, and of how many steps."""

    def __init__(self, runner: ModelRunner):
        self._runner = runner
        self.calls: list[tuple[float, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: Any) -> Any:
        self.calls.append((time.perf_counter(), 1))
        return self._runner.forward(batch)

    def multi_step(self, *arguments: Any) -> Any:
        *_, steps, _ = arguments  # no token ends a text here, so that these are all taken
        self.calls.append((time.perf_counter(), steps))
        return self._runner.multi_step(*arguments)


class Engine:
    def __init__(self, folder: Path, dtype: str, threads: int, kv_cache_dtype: str = "auto"):
        # The same prompts again and again: none may be found in the prefix cache.
        self.llm = LLM(str(folder), dtype=dtype, kv_cache_dtype=kv_cache_dtype, threads=threads, prefix_cache_seqs=0)

    def prefill_ms(self, ids: list[list[int]]) -> float:
        return milliseconds(lambda: self._generate(ids, 1))

    def step_ms(self, ids: list[list[int]], new: int) -> float:
        """Of the steps in which every sequence decodes: long prompts are read over several steps, others decoding."""
        with self.llm.engine.wrapped(StampedRunner) as runner:
            metrics = [output.metrics for output in self._generate(ids, new)]
        start, stop = max(m.first_token for m in metrics), min(m.finished for m in metrics)
        return 1e3 * (stop - start) / sum(steps for began, steps in runner.calls if start <= began < stop)

    def last_logits(self, ids: list[int]) -> list[float]:
        return self.llm.logits(ids)[-1].tolist()

    def _generate(self, ids: list[list[int]], new: int) -> list:
        return self.llm.generate(ids, SamplingParams(max_tokens=new, ignore_eos=True), use_tqdm=False)
