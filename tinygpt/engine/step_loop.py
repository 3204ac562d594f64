"""StepLoop: schedule, run, sample, record. The engine's thread alone calls it."""

import time
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import Any, Protocol

import numpy as np

from ..kernels.backend import Batch
from ..kernels.numbers import Warpers
from ..llm_args import EngineConfig
from ..outputs import Throughput
from .model_runner import ModelRunner
from .sampler import Sampler, draws_of, gather_warpers, sampled
from .scheduler import Scheduler, SlotTable
from .sequence import Sequence
from .step import Chunk, Step, num_after_first

# Seconds of decode steps in one call: of the backend if a caller streams, and of the engine between two commands.
STREAM_SECONDS, CALL_SECONDS = 0.05, 0.1


class StepTimer:
    """An estimate of how many decode steps fit into a time, from the last ones."""

    def __init__(self):
        self._seconds = inf  # of a step

    def note(self, seconds: float, num_steps: int) -> None:
        self._seconds = seconds / num_steps

    def num_steps(self, seconds: float) -> int:
        return max(1, int(seconds / self._seconds)) if self._seconds else 1


class Closable(Protocol):
    def close(self) -> None: ...


class StepLoop:
    def __init__(self, runner: ModelRunner, engine_config: EngineConfig, to_close: Iterable[Closable] = ()):
        """to_close: what the sequences' parts need, closed with the loop."""
        slots = SlotTable(engine_config.max_num_seqs, engine_config.prefix_cache_seqs)
        max_num_tokens = engine_config.max_num_batched_tokens
        self.scheduler = Scheduler(slots, max_num_tokens, runner.copy_positions, self._prepare_slot)
        self.throughput = Throughput()
        self.runner = runner
        self.sampler = Sampler(runner.backend)
        self._max_model_len = engine_config.max_model_len
        self._to_close = to_close
        self._timed: set[Sequence] = set()  # the sequences that have a deadline
        self._timer = StepTimer()

    def use(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.sampler.backend = runner.backend

    def add(self, sequences: list[Sequence]) -> None:
        self._timed.update(sequence for sequence in sequences if sequence.sample.deadline is not None)
        self.scheduler.add(*sequences)

    def remove(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.on_end = None
            self._end(sequence)
            if not sequence.is_finished:
                sequence.error = "it was cancelled."

    def close(self) -> None:
        self.runner.close()
        self.sampler.close()
        for closable in self._to_close:
            closable.close()

    def step(self, seconds: float = 0.0) -> None:
        """Run a forward pass, or as many as fit into `seconds` if no sequence needs a look in between."""
        self._expire()
        if chunks := self.scheduler.schedule():
            started = time.perf_counter()
            num_read = sum(chunk.count for chunk in chunks if chunk.reads_prompt)
            num_steps = self._choose_num_steps(chunks, seconds)
            if num_steps > 1:
                num_steps, num_new = self._run_several(chunks, num_steps)
            else:
                num_new = self._run_one(chunks)
            took = time.perf_counter() - started
            self._timer.note(took, num_steps)
            share = num_read / ((num_read + num_new) or 1)
            self.throughput += Throughput(num_read, share * took, num_new, (1 - share) * took)
        for sequence in self.scheduler.finished:
            self._end(sequence)

    def _run_one(self, chunks: list[Chunk]) -> int:
        """Run a step. Return its new tokens after the first of each text."""
        step = Step(chunks, self.runner, self.sampler)
        parts_by_class = step.parts_by_class()
        for part_class, parts in parts_by_class:
            part_class.before(step, parts)
        self.sampler.compute_masks(step.due())
        logits = self._forward(step)  # (R, V)
        for chunk in chunks:
            chunk.sequence.num_cached += chunk.count
        for part_class, parts in reversed(parts_by_class):
            part_class.after(step, parts, logits)
        self._draw(step, logits)
        for chunk in chunks:
            if chunk.reaches_end and not chunk.sequence.wants_token:
                chunk.sequence.end_with_prompt()
        return step.num_new

    def _forward(self, step: Step) -> Any:
        batch = replace(step.batch, drawn_by=lambda: self._drawn_by(step))
        return self.runner.forward(batch) if step.look is None else self.runner.forward(batch, step.look)

    def _drawn_by(self, step: Step) -> Warpers | None:
        """Return what all rows are drawn by, or None if their logits are wanted for more."""
        drawn = step.drawn()
        if len(drawn) < step.batch.logit_rows.size or any(step.chunks[i].num_part_logits for i in drawn):
            return None
        return self.sampler.drawn_by([step.chunks[i].sequence for i in drawn])

    def _draw(self, step: Step, logits: Any) -> None:
        """Draw the next tokens that no part chooses."""
        if drawn := step.drawn():
            rows, sequences = step.logits_of(logits, drawn)
            num_before = num_after_first(sequences)
            for sequence, token in zip(sequences, self.sampler.sample(rows, sequences), strict=True):
                sequence.append(token)
            step.num_new += num_after_first(sequences) - num_before

    # Several decode steps in one call, if the backend chooses the tokens. On a GPU, later steps run while Python reads
    # the tokens of earlier ones; on a CPU, Python costs a tenth of a step.

    def _choose_num_steps(self, chunks: list[Chunk], seconds: float) -> int:
        budgets = [seconds, *(_seconds_for(chunk.sequence) for chunk in chunks)]
        if self._timed:
            deadline = min(sequence.sample.deadline for sequence in self._timed)
            budgets.append(deadline - time.perf_counter())
        num_in_time = self._timer.num_steps(min(budgets))
        num_steps = self.runner.choose_num_steps(len(chunks), num_in_time)
        if num_steps == 1 or any(self._needs_one_step(chunk) for chunk in chunks):
            return 1
        rooms = [self._room_of(chunk.sequence) for chunk in chunks]
        return min([num_steps, *rooms])

    def _needs_one_step(self, chunk: Chunk) -> bool:
        is_alone = chunk.is_decode and self.sampler.is_drawn_alone(chunk.sequence)
        return not is_alone or chunk.sequence.needs_python

    def _room_of(self, sequence: Sequence) -> int:
        """Return the most tokens that the sequence may get."""
        positions = self._max_model_len - sequence.num_cached
        return min(positions, sequence.params.max_tokens - len(sequence.new_token_ids))

    def _run_several(self, chunks: list[Chunk], steps: int) -> tuple[int, int]:
        """Run up to so many decode steps. Return how many ran, and their new tokens."""
        sequences = [chunk.sequence for chunk in chunks]
        num_before = num_after_first(sequences)
        starts = [s.num_cached for s in sequences]
        slots = [s.slot for s in sequences]
        batch = Batch.of([s.next_token_ids(1) for s in sequences], starts, slots)
        warpers = gather_warpers([s.sampling_state for s in sequences])
        every_end = frozenset().union(*(sequence.sample.end_token_ids for sequence in sequences))
        vocab_size = self.runner.config.vocab_size
        ends = np.array([token_id for token_id in every_end if token_id < vocab_size], np.int32)  # (E,)
        taken = 0
        for token_ids in self.runner.multi_step(batch, warpers, *draws_of(sequences), steps, ends):  # (S,)
            taken += 1
            for sequence, token_id in zip(sequences, token_ids.tolist(), strict=True):
                if sequence.is_finished:
                    continue
                sequence.append(sampled(token_id, sequence))
                if token_id >= 0:
                    sequence.num_cached += 1
                if sequence.is_finished:
                    self.runner.stop_early(True)  # another sequence may have the slot
        return taken, num_after_first(sequences) - num_before

    def _expire(self) -> None:
        now = time.perf_counter()
        for sequence in [sequence for sequence in self._timed if sequence.sample.deadline <= now]:
            if not sequence.is_finished:
                sequence.expire()
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        self._timed.discard(sequence)
        self.scheduler.remove(sequence)
        sequence.sampling_state = None
        on_end, sequence.on_end = sequence.on_end, None
        if on_end is not None:
            on_end()

    def _prepare_slot(self, sequence: Sequence) -> None:
        if (of_slot := self.runner.adapter_of_slot) is not None:
            of_slot[sequence.slot] = sequence.sample.adapter
        virtual = sequence.sample.soft_prompt
        if virtual is not None and virtual.prompt.kind == "prefix" and not sequence.num_cached:
            self.runner.write_positions(sequence.slot, 0, virtual.prompt.keys, virtual.prompt.values)
            sequence.reuse(len(virtual))


def _seconds_for(sequence: Sequence) -> float:
    """Return how long the sequence's steps may take together; 0 is one step without a queue."""
    params = sequence.params
    is_first = not sequence.new_token_ids  # whose time is reported
    may_end_by_text = params.stop or params.repetition_detection is not None
    if is_first or may_end_by_text:
        return 0.0
    return inf if sequence.sample.on_chunk is None else STREAM_SECONDS
