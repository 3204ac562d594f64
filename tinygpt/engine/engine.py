"""Engine: the step loop: schedule, run, sample, record."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tinygpt.engine import multi_step
from tinygpt.engine.after_fork import call_after_fork
from tinygpt.engine.beams import Prediction, predict
from tinygpt.engine.deadlines import Deadlines
from tinygpt.engine.draft_model import DraftModel
from tinygpt.engine.kv_slots import SlotTable
from tinygpt.engine.probe import Probe
from tinygpt.engine.scheduler import Chunk, Scheduler
from tinygpt.engine.spec_decode import Drafter, confirm_drafts
from tinygpt.engine.step_input import StepInput, rows_of
from tinygpt.engine.step_lock import StepLock
from tinygpt.engine.throughput import Meter, Throughput
from tinygpt.engine_config import EngineConfig
from tinygpt.errors import RequestError
from tinygpt.execution.model_runner import ModelRunner
from tinygpt.kernels.compiling import CompileClock
from tinygpt.request.sequence import SampledToken, Sequence
from tinygpt.sampling.sampler import Sampler

CLOSED = "this LLM has been closed: make a new one."


class Engine:
    """Runs sequences, any number of which may be added and removed between steps, by any Python thread.

    Whoever wants a sequence to go on calls `step`. One thread takes a step at a time, for all sequences.
    runner: the model; `wrapped` puts another in its place for a while.
    """

    def __init__(self, runner: ModelRunner, engine_config: EngineConfig, draft_model: DraftModel | None = None):
        """engine_config: as its `for_model` gives it, and as the runner was made with."""
        self.engine_config = engine_config
        self.runner = runner
        self._drafter = Drafter(engine_config.max_num_batched_tokens, engine_config.max_num_logits, draft_model)
        self.compile_clock = CompileClock()  # what steps waited for kernels
        self._meter, self._pace = Meter(self.compile_clock), multi_step.Pace()
        self._is_closed = False
        self.begin_anew()
        call_after_fork(self)

    @property
    def throughput(self) -> Throughput:
        """Of all steps so far."""
        return self._meter.total

    def begin_anew(self) -> None:
        """Know no sequence, whatever the KV cache holds: at first, and in a forked process."""
        slots = SlotTable(self.engine_config.max_num_seqs, self.engine_config.prefix_cache_seqs)
        max_num_tokens = self.engine_config.max_num_batched_tokens
        self.scheduler = Scheduler(slots, max_num_tokens, self.runner.copy_positions, self._write_prefix)
        self.probe = Probe(self.runner, slots, self.engine_config, self._hold_steps)
        self._deadlines = Deadlines()
        self._sampler = Sampler(self.runner)  # its thread stays behind in a fork
        self._removed: deque[Sequence] = deque()  # not yet forgotten by the scheduler
        self._step_lock = StepLock(self._forget_removed)

    def add(self, sequences: list[Sequence]) -> None:
        """Have sequences run from the next step on, or as soon as there are slots for them."""
        for sequence in sequences:
            self._deadlines.add(sequence)
        self.scheduler.add(*sequences)
        self.runner.stop_early(True)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Forget sequences, whether or not they have ended; their slots are free at once, or after the step."""
        self._removed.extend(sequences)
        self.runner.stop_early(True)
        self._step_lock.tidy()

    def step(self, seconds: float = 0.0) -> None:
        """Advance every running sequence: one forward pass, one new token for each that is not still in its prompt.

        Where nobody has to look in between, as many passes as fit into `seconds`; or more, if they are a GPU's.
        If another thread is at it, wait for the end of its step instead. RequestError if the engine is closed.
        """
        self._step_lock.refuse_owner()
        try:
            if self._step_lock.acquire_or_wait():
                self._check_loaded()
                with self.compile_clock.watching():
                    self._step(seconds)
        finally:
            self._step_lock.release()

    def refuse_within_step(self) -> None:
        """RequestError in a function that a step calls."""
        self._step_lock.refuse_owner()

    def check_open(self) -> None:
        """RequestError once `refuse_calls` or `close` was called."""
        if self._is_closed:
            raise RequestError(CLOSED)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def refuse_calls(self) -> None:
        """Have `check_open` raise from now on. Steps go on until `close`: who waits is told why by whoever closes."""
        self._is_closed = True

    def close(self) -> None:
        """Give the memory back when the running step has ended. Any later call raises RequestError."""
        self.refuse_calls()
        with self._step_lock.held():
            self.runner.close()
            self._drafter.close()
            self._sampler.close()

    @contextmanager
    def wrapped(self, wrap: Callable[[ModelRunner], Any]) -> Iterator[Any]:
        """In the block, steps go through wrap(runner): for those who want to watch them, as benchmarks do."""
        plain = self.runner
        wrapper = wrap(plain)
        self._run_with(wrapper)
        try:
            yield wrapper
        finally:
            self._run_with(plain)

    def _run_with(self, runner: Any) -> None:
        with self._step_lock.held():
            self.runner = self._sampler.runner = runner

    def _step(self, seconds: float) -> None:
        """Schedule, run, sample, record.

        Nothing changes before a step is recorded: one that is interrupted, as by Ctrl-C, is simply taken again.
        """
        self._allow_several_steps()
        self._end_finished()  # of a step that was interrupted
        self._expire(self._deadlines.pop_expired(time.perf_counter()))
        chunks = self.scheduler.schedule()
        with self._meter.measured(chunks):
            self._run(chunks, seconds)
            self._advance_beams()
        self._end_finished()

    def _allow_several_steps(self) -> None:
        """Whoever is added or removed from here on waits for one pass, however many a step would take."""
        self.runner.stop_early(False)
        if self._removed:  # while that was written
            self.runner.stop_early(True)

    def _run(self, chunks: list[Chunk], seconds: float) -> None:
        if not chunks:  # another thread's step has finished everything
            return
        started, num_steps = time.perf_counter(), self._num_steps(chunks, seconds)
        if num_steps > 1:
            num_steps = multi_step.run_steps(self.runner, chunks, num_steps)
        else:
            self._run_one(chunks)
        self._pace.note(time.perf_counter() - started, num_steps)

    def _num_steps(self, chunks: list[Chunk], seconds: float) -> int:
        num_in_time = self._pace.num_steps(self._seconds_at_once(chunks, seconds))
        return multi_step.num_steps(self.runner, self._sampler, chunks, self.engine_config.max_model_len, num_in_time)

    def _seconds_at_once(self, chunks: list[Chunk], seconds: float) -> float:
        """For how long steps may be taken in one call; 0: one by one, as somebody has to look at each token."""
        for chunk in chunks:
            sequence = chunk.sequence
            is_first = not sequence.new_token_ids  # whose time is told
            if is_first or sequence.may_end_by_its_text or self._drafter.num_wanted(chunk):
                return 0.0
        if any(chunk.sequence.on_chunk for chunk in chunks):
            seconds = min(seconds, multi_step.STREAM_SECONDS)
        return min(seconds, self._deadlines.seconds_left(time.perf_counter()))

    def _run_one(self, chunks: list[Chunk]) -> None:
        step = StepInput.of(chunks, self._drafter.propose(chunks))
        self._sampler.compute_masks([sequence for _, sequence in step.ends()])
        logits = self.runner.forward(step.batch)  # (R, V)
        prompt_logprobs = self._read_prompt_logprobs(logits, step)
        tokens, predictions = self._sample(logits, step)
        self._record(step, prompt_logprobs, iter(tokens), iter(predictions))
        confirm_drafts(self._sampler, logits, step)

    def _read_prompt_logprobs(self, logits: Any, step: StepInput) -> dict[int, list[dict[int, float]]]:
        """What the step finds out about prompts, by the index of the chunk."""
        return {
            i: chunk.sequence.prompt_logprobs.read(self.runner, chunk.sequence.num_cached, logits[step.prompt_rows(i)])
            for i, chunk in enumerate(step.chunks)
            if chunk.num_prompt_logits
        }

    def _sample(self, logits: Any, step: StepInput) -> tuple[list[SampledToken], list[Prediction]]:
        """The tokens of the sequences whose last token is in the step, and of those in a beam search, predictions."""
        sampled, searched = [], []
        for row, sequence in step.ends():
            (sampled if sequence.beams is None else searched).append((row, sequence))
        tokens = predictions = []
        if searched:  # first: the sampler may write over the logits
            rows, sequences = zip(*searched, strict=True)
            predictions = predict(self._sampler, logits[list(rows)], sequences)
        if sampled:
            rows, sequences = zip(*sampled, strict=True)
            tokens = self._sampler.sample(rows_of(logits, list(rows)), sequences)
        return tokens, predictions

    def _record(
        self,
        step: StepInput,
        prompt_logprobs: dict[int, list[dict[int, float]]],
        tokens: Iterator[SampledToken],
        predictions: Iterator[Prediction],
    ) -> None:
        """Give each sequence what was found for it.

        `advance` comes last: to compute the same positions again gives the same bits, so that an interrupt may come
        between any two sequences.
        """
        for i, chunk in enumerate(step.chunks):
            sequence = chunk.sequence
            if i in prompt_logprobs:
                sequence.prompt_logprobs.note(sequence.num_cached, prompt_logprobs[i])
            if chunk.is_sampled and sequence.beams is not None:
                sequence.beams.take(sequence, next(predictions))
            elif chunk.is_sampled:
                sequence.take(next(tokens))
            sequence.advance(chunk.count)

    def _advance_beams(self) -> None:
        for beams in dict.fromkeys(sequence.beams for sequence in self.scheduler.running):
            if beams is not None:
                beams.advance(self.runner.copy_positions)

    def _expire(self, sequences: list[Sequence]) -> None:
        for i, sequence in enumerate(sequences):
            try:
                (sequence.beams or sequence).expire()
            except BaseException:  # Ctrl-C in on_chunk: the others expire in the next step
                for other in sequences[i + 1 :]:
                    self._deadlines.add(other)
                raise
            finally:
                self._end(sequence)

    def _end_finished(self) -> None:
        for sequence in self.scheduler.finished:
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that has ended, and tell."""
        try:
            self.scheduler.remove(sequence)
        finally:
            sequence.tell_ended()

    def _write_prefix(self, sequence: Sequence) -> None:
        prompt = sequence.soft_prompt.prompt
        if prompt.kind == "prefix":
            self.runner.write_positions(sequence.slot, 0, prompt.keys, prompt.values)
            sequence.reuse(len(prompt))

    def _forget_removed(self) -> None:
        while self._removed:
            sequence = self._removed[0]
            sequence.when_ended(None)
            self.scheduler.remove(sequence)
            if not sequence.is_finished:
                sequence.fail("it was cancelled.")
            self._removed.popleft()  # not before: if this is interrupted, the next end of a step does it

    @contextmanager
    def _hold_steps(self) -> Iterator[None]:
        with self._step_lock.held(), self.compile_clock.watching():
            self._check_loaded()
            yield

    def _check_loaded(self) -> None:
        if self.runner.is_closed:
            raise RequestError(CLOSED)
