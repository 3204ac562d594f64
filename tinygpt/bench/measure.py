"""Time a batch of prompts through LLM.generate, pass by pass."""

import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..hardware import forget_peak, peak_memory
from ..llm import LLM
from ..sampling_params import SamplingParams
from .roofline import Case, Run

PROMPT = "prompt"
GENERATION = "generation"
TOGETHER = "together"
CHOICE = "choice"
NUM_WARMUP_PROMPTS = 10  # at least
SAMPLING = ("process_logits", "sample", "filter_logits", "top_logprobs")


class HostMeter:
    has_multi_step = False  # several steps in one call would be one pass to the clock
    warmups = 1
    gpu = ""

    mark = staticmethod(time.perf_counter)
    forget_peak = staticmethod(forget_peak)
    peak_memory = staticmethod(peak_memory)

    def seconds(self, first: float, last: float) -> float:
        return last - first


class DeviceMeter:
    """Events on the stream of the GPU, and its memory since this was created."""

    has_multi_step = True
    warmups = 2  # the first run compiles kernels, the second captures a graph

    def __init__(self):
        from ..kernels.cuda.device import the_device

        self._device = the_device()
        self.gpu, self._free = self._device.name, self._device.free_bytes()
        self.mark = self._device.mark
        self.seconds = self._device.seconds  # a mark does not wait for the GPU

    def forget_peak(self) -> None:
        """Do nothing: buffers never grow."""

    def peak_memory(self) -> int:
        return max(self._free - self._device.free_bytes(), 0)


Meter = HostMeter | DeviceMeter


def meter_of(device: str) -> Meter:
    return DeviceMeter() if device == "cuda" else HostMeter()


class TimedRunner:
    """A model runner whose calls are timed. Marks are read at the end: reading one may wait for the GPU."""

    def __init__(self, runner: Any, scheduler: Any, batch_size: int, meter: Meter):
        self._runner = runner
        self._scheduler = scheduler
        self._batch_size = batch_size
        self._meter = meter
        self._spans: list[tuple[tuple[str, ...], Any, Any]] = []
        self.num_steps = self.num_prompt_steps = self.num_together = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    @cached_property
    def backend(self) -> SimpleNamespace:
        of_backend = {name: getattr(self._runner.backend, name) for name in SAMPLING}
        return SimpleNamespace(**{n: partial(self._timed, (CHOICE,), f) for n, f in of_backend.items()})

    def choose_num_steps(self, num_sequences: int, num_in_time: int) -> int:
        return self._runner.choose_num_steps(num_sequences, num_in_time) if self._meter.has_multi_step else 1

    def seconds(self, kind: str) -> float:
        return sum(self._meter.seconds(first, last) for kinds, first, last in self._spans if kind in kinds)

    def forward(self, batch: Any, *look: Any) -> Any:
        self.num_steps += 1
        if any(s.num_cached < len(s.prompt_token_ids) for s in self._scheduler.running):
            self.num_prompt_steps += 1
            return self._timed((PROMPT,), self._runner.forward, batch, *look)
        return self._timed(self._decoding(batch, 1), self._runner.forward, batch, *look)

    def multi_step(self, batch: Any, warpers: Any, seeds: Any, indices: Any, steps: int, ends: Any) -> Any:
        self.num_steps += steps
        kinds = self._decoding(batch, steps)
        return self._timed(kinds, self._runner.multi_step, batch, warpers, seeds, indices, steps, ends)

    def _decoding(self, batch: Any, steps: int) -> tuple[str, ...]:
        if batch.token_ids.size != self._batch_size:
            return (GENERATION,)
        self.num_together += steps
        return GENERATION, TOGETHER

    def _timed(self, kinds: tuple[str, ...], function: Callable[..., Any], *arguments: Any) -> Any:
        first = self._meter.mark()
        answer = function(*arguments)
        self._spans.append((kinds, first, self._meter.mark()))
        return answer


def measure(
    llm: LLM, case: Case, repetitions: int, meter: Meter | None = None, **sampling: Any
) -> tuple[Run, ...]:
    """Measure a case after a warm-up, with prefix_cache_seqs=0 and slots for the batch.

    sampling: fields of SamplingParams (default: greedy).
    """
    meter = meter or HostMeter()
    if case.is_at_depth:
        prompts = prompts_to_continue(llm.config.vocab_size, case)
    else:
        prompts = random_prompts(case.prompt_lengths, llm.config.vocab_size)
    params = params_of(case, prompts, **sampling)
    num_warm = max(case.batch_size, NUM_WARMUP_PROMPTS)
    for _ in range(meter.warmups):
        llm.generate(prompts[:num_warm], params[:num_warm], use_tqdm=False)
    meter.forget_peak()
    return tuple(_run(llm, prompts, params, meter) for _ in range(repetitions))


def params_of(case: Case, prompts: list[list[int]], **sampling: Any) -> list[SamplingParams]:
    """Return params of each prompt, which make a sequence of a prompt that is cut short as long as the others."""
    how = {"temperature": 0.0, "ignore_eos": True, **sampling}
    new = max(case.new_tokens, 1)
    counts = [new + n - len(prompt) for prompt, n in zip(prompts, case.prompt_lengths, strict=True)]
    return [SamplingParams(max_tokens=count, **how) for count in counts]


def _run(llm: LLM, prompts: list[list[int]], params: Any, meter: Meter) -> Run:
    wrap = partial(TimedRunner, scheduler=llm.engine.scheduler, batch_size=len(prompts), meter=meter)
    with llm.engine.wrapped(wrap) as timed:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        total = time.perf_counter() - start
    stamps = [output.metrics.first_token for output in outputs if output.metrics.first_token is not None]
    times = *map(timed.seconds, (PROMPT, GENERATION, CHOICE)), max(stamps, default=start) - start, total
    return Run(*times, timed.num_steps, timed.num_prompt_steps, timed.seconds(TOGETHER), timed.num_together)


def prompts_to_continue(vocab_size: int, case: Case) -> list[list[int]]:
    """Return prompts that differ in their last token alone, which the first lacks: it is read before the others."""
    beginning = np.random.default_rng(0).integers(vocab_size, size=case.prompt_length - 1).tolist()
    prompts = [[*beginning, i % vocab_size] for i in range(case.batch_size)]
    return [beginning, *prompts[1:]] if beginning and len(prompts) > 1 else prompts


def random_prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Return fixed token ids; no two prompts begin alike, as far as the vocabulary goes."""
    generator = np.random.default_rng(0)
    first = generator.permutation(vocab_size)
    rest = [generator.integers(0, vocab_size, length - 1).tolist() for length in lengths]
    return [[int(first[i % vocab_size]), *token_ids] for i, token_ids in enumerate(rest)]
