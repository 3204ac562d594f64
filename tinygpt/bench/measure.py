"""measure: a batch of prompts through LLM.generate, again and again, and where the time went."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tinygpt.engine.scheduler import Scheduler
from tinygpt.execution.batch import Batch
from tinygpt.execution.model_runner import ModelRunner
from tinygpt.hardware.memory import forget_peak, peak_memory
from tinygpt.kernels.compiling import CompileClock
from tinygpt.llm import LLM
from tinygpt.sampling_params import SamplingParams

SAMPLING = frozenset({"process_logits", "sample", "filter_logits", "top_logprobs"})


@dataclass(frozen=True)
class Run:
    """One repetition. Times are in seconds, without those in which kernels were compiled.

    A pass in which any sequence is still in its prompt reads prompts, and others may decode beside it; all the other
    passes decode. In some of these, sequences are missing: those that wait, or have ended. What is left of `total`
    goes to scheduling, to bookkeeping and to making text.
    """

    prompt: float  # forward passes that read prompts
    generation: float  # forward passes that decode
    sampling: float  # choosing tokens
    first_token: float  # from the call of generate to the first token of the last prompt to get one
    total: float  # the whole LLM.generate
    num_steps: int  # forward passes in all
    num_prompt_steps: int = 0  # those that read prompts
    together: float = 0.0  # passes in which all sequences decode, and each of them one token
    num_together: int = 0  # how many these are


@dataclass(frozen=True)
class Measurement:
    """All repetitions of one test."""

    runs: tuple[Run, ...]
    batch_size: int
    prompt_length: int  # tokens of the longest prompt
    new_tokens: int
    peak_memory: int  # bytes of the largest resident set of the process meanwhile; 0 where the system does not say


def measure(
    llm: LLM, prompts: list[list[int]], new_tokens: int, repetitions: int, warmups: int = 1, params: Any = None
) -> Measurement:
    """Continue all prompts, given as token ids, with `new_tokens` each, `repetitions` times after some warm-ups.

    params: what `generate` takes; None is greedy, whatever token comes out. Give an LLM with prefix_cache_seqs=0, and
    prompts that begin differently: what is known already is not computed again.
    Raises RequestError, before any work, if the prompts cannot be served as asked.
    """
    if params is None:
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    for _ in range(warmups):
        llm.generate(prompts, params, use_tqdm=False)
    forget_peak()
    runs = tuple(_run(llm, prompts, params) for _ in range(repetitions))
    return Measurement(runs, len(prompts), max(map(len, prompts), default=0), new_tokens, peak_memory())


def _run(llm: LLM, prompts: list[list[int]], params: Any) -> Run:
    clock = llm.engine.compile_clock
    wrap = partial(TimedRunner, scheduler=llm.engine.scheduler, batch_size=len(prompts), clock=clock)
    with llm.engine.wrapped(wrap) as timed:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        total = clock.since(start)
    stamps = [output.metrics.first_token for output in outputs if output.metrics.first_token is not None]
    first_tokens = [stamp - start - clock.seconds(start, stamp) for stamp in stamps]
    times = timed.prompt, timed.generation, timed.sampling, max(first_tokens, default=0.0), total
    return Run(*times, timed.num_steps, timed.num_prompt_steps, timed.together, timed.num_together)


class TimedRunner:
    """A runner that is another one, with a stopwatch for a batch of `batch_size`, which stands still while a kernel
    is compiled."""

    has_multi_step = False  # it would take several steps with no pass to be seen

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, batch_size: int, clock: CompileClock):
        self._runner, self._scheduler, self._batch_size, self._clock = runner, scheduler, batch_size, clock
        self.prompt = self.generation = self.sampling = self.together = 0.0  # seconds
        self.num_steps = self.num_prompt_steps = self.num_together = 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._runner, name)
        return self._timed_sampling(function) if name in SAMPLING else function

    def forward(self, batch: Batch) -> Any:
        is_reading = any(s.num_cached < len(s.prompt_token_ids) for s in self._scheduler.running)
        start = time.perf_counter()
        logits = self._runner.forward(batch)
        seconds = self._clock.since(start)
        self.num_steps += 1
        if is_reading:
            self.prompt += seconds
            self.num_prompt_steps += 1
        else:
            self.generation += seconds
            if batch.token_ids.size == self._batch_size:
                self.together += seconds
                self.num_together += 1
        return logits

    def _timed_sampling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.sampling += self._clock.since(start)

        return timed
