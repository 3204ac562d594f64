"""measure: a batch of prompts through LLM.generate, again and again, and where the time went."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tinygpt.bench.meter import HostMeter, Meter
from tinygpt.engine.scheduler import Scheduler
from tinygpt.execution.batch import Batch
from tinygpt.execution.model_runner import ModelRunner
from tinygpt.kernels.compiling import CompileClock
from tinygpt.llm import LLM
from tinygpt.sampling_params import SamplingParams

# What a span of time went to.
PROMPT, GENERATION, TOGETHER, CHOICE = "prompt", "generation", "together", "choice"
SAMPLING = frozenset({"process_logits", "sample", "filter_logits", "top_logprobs"})


@dataclass(frozen=True)
class Run:
    """One repetition. Times are in seconds, without those in which kernels were compiled.

    A pass in which any sequence is still in its prompt reads prompts, and others may decode beside it; all the other
    passes decode. In some of these, sequences are missing: those that wait, or have ended. What is left of `total`
    goes to scheduling, to bookkeeping and to making text. On a GPU, passes that are queued together choose tokens, too.
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
    peak_memory: int  # bytes of the largest resident set of the process meanwhile, or of the GPU; 0 where none is known


def measure(
    llm: LLM,
    prompts: list[list[int]],
    new_tokens: int,
    repetitions: int,
    warmups: int | None = None,
    params: Any = None,
    meter: Meter | None = None,
) -> Measurement:
    """Continue all prompts, given as token ids, with `new_tokens` each, `repetitions` times after some warm-ups.

    warmups: None is as many as the meter wants. meter: of the LLM's device; None is the host's.
    params: what `generate` takes; None is greedy, whatever token comes out. Give an LLM with prefix_cache_seqs=0, and
    prompts that begin differently: what is known already is not computed again.
    Raises RequestError, before any work, if the prompts cannot be served as asked.
    """
    if params is None:
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    meter = HostMeter() if meter is None else meter
    for _ in range(meter.warmups if warmups is None else warmups):
        llm.generate(prompts, params, use_tqdm=False)
    meter.forget_peak()
    runs = tuple(_run(llm, prompts, params, meter) for _ in range(repetitions))
    return Measurement(runs, len(prompts), max(map(len, prompts), default=0), new_tokens, meter.peak_memory())


def _run(llm: LLM, prompts: list[list[int]], params: Any, meter: Meter) -> Run:
    clock = llm.engine.compile_clock
    wrap = partial(TimedRunner, scheduler=llm.engine.scheduler, batch_size=len(prompts), clock=clock, meter=meter)
    with llm.engine.wrapped(wrap) as timed:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        total = clock.since(start)
    stamps = [output.metrics.first_token for output in outputs if output.metrics.first_token is not None]
    first_tokens = [stamp - start - clock.seconds(start, stamp) for stamp in stamps]
    times = *map(timed.seconds, (PROMPT, GENERATION, CHOICE)), max(first_tokens, default=0.0), total
    return Run(*times, timed.num_steps, timed.num_prompt_steps, timed.seconds(TOGETHER), timed.num_together)


@dataclass(frozen=True)
class Span:
    """Something that was done between two marks of a meter; `waited` seconds of it went to compiling."""

    kinds: tuple[str, ...]
    first: Any
    last: Any
    waited: float


class TimedRunner:
    """A runner that is another one, with a meter for a batch of `batch_size`, which stands still while a kernel is
    compiled. Marks are read at the end: to read one may be to wait for a GPU."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, batch_size: int, clock: CompileClock, meter: Meter):
        self._runner, self._scheduler, self._batch_size = runner, scheduler, batch_size
        self._clock, self._meter, self._spans = clock, meter, []
        self.num_steps = self.num_prompt_steps = self.num_together = 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._runner, name)
        return partial(self._timed, (CHOICE,), function) if name in SAMPLING else function

    def steps_at_once(self, num_sequences: int, num_in_time: int) -> int:
        return self._runner.steps_at_once(num_sequences, num_in_time) if self._meter.has_multi_step else 1

    def seconds(self, kind: str) -> float:
        """Of all spans of a kind."""
        spans = (span for span in self._spans if kind in span.kinds)
        return sum(self._meter.seconds(span.first, span.last) - span.waited for span in spans)

    def forward(self, batch: Batch) -> Any:
        self.num_steps += 1
        if any(s.num_cached < len(s.prompt_token_ids) for s in self._scheduler.running):
            self.num_prompt_steps += 1
            return self._timed((PROMPT,), self._runner.forward, batch)
        return self._timed(self._decoding(batch, 1), self._runner.forward, batch)

    def multi_step(self, batch: Batch, warpers: Any, seeds: Any, indices: Any, steps: int, ends: Any) -> Any:
        self.num_steps += steps
        kinds = self._decoding(batch, steps)
        return self._timed(kinds, self._runner.multi_step, batch, warpers, seeds, indices, steps, ends)

    def _decoding(self, batch: Batch, steps: int) -> tuple[str, ...]:
        if batch.token_ids.size != self._batch_size:
            return (GENERATION,)
        self.num_together += steps
        return GENERATION, TOGETHER

    def _timed(self, kinds: tuple[str, ...], function: Callable[..., Any], *arguments: Any) -> Any:
        began, first = time.perf_counter(), self._meter.mark()
        try:
            return function(*arguments)
        finally:
            last = self._meter.mark()
            waited = self._clock.seconds(began, time.perf_counter())
            self._spans.append(Span(kinds, first, last, waited))
