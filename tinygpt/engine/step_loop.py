"""StepLoop: schedule, run, sample, record. The engine's thread alone calls it."""

import time
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from ..kernels.backend import Batch
from ..kernels.numbers import Warpers
from ..llm_args import EngineConfig
from ..outputs import Throughput
from .model_runner import ModelRunner
from .sampler import Sampler, draws_of, gather_warpers, sampled
from .scheduler import Chunk, Scheduler, SlotTable, StepInput
from .sequence import Sequence
from .spec_decode import Drafter, DraftModel, confirm_drafts

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


class StepLoop:
    def __init__(self, runner: ModelRunner, engine_config: EngineConfig, draft_model: DraftModel | None):
        slots = SlotTable(engine_config.max_num_seqs, engine_config.prefix_cache_seqs)
        max_num_tokens = engine_config.max_num_batched_tokens
        self.scheduler = Scheduler(slots, max_num_tokens, runner.copy_positions, self._prepare_slot)
        self.throughput = Throughput()
        self.runner = runner
        self.sampler = Sampler(runner.backend)
        self._max_model_len = engine_config.max_model_len
        self._drafter = Drafter(engine_config, draft_model)
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
        self._drafter.close()
        self.sampler.close()

    def step(self, seconds: float = 0.0) -> None:
        """Run a forward pass, or as many as fit into `seconds` if no sequence needs a look in between."""
        self._expire()
        if chunks := self.scheduler.schedule():
            started = time.perf_counter()
            num_read = _num_read(chunks)
            texts = [chunk.sequence for chunk in chunks if chunk.sequence.beams is None]
            searches = {chunk.sequence.beams for chunk in chunks if chunk.sequence.new_token_ids} - {None}
            num_before = _num_after_first(texts)
            self._run(chunks, seconds)
            num_new = len(searches) + _num_after_first(texts) - num_before
            share = num_read / ((num_read + num_new) or 1)
            took = time.perf_counter() - started
            self.throughput += Throughput(num_read, share * took, num_new, (1 - share) * took)
        for sequence in self.scheduler.finished:
            self._end(sequence)

    def _run(self, chunks: list[Chunk], seconds: float) -> None:
        started = time.perf_counter()
        num_steps = self._choose_num_steps(chunks, seconds)
        if num_steps > 1:
            num_steps = self._run_several(chunks, num_steps)
        else:
            self._run_one(chunks)
        self._timer.note(time.perf_counter() - started, num_steps)
        for beams in dict.fromkeys(sequence.beams for sequence in self.scheduler.running):
            if beams is not None:
                beams.advance(self.runner.copy_positions)

    def _run_one(self, chunks: list[Chunk]) -> None:
        step = StepInput.of(chunks, self._drafter.propose(chunks))
        self.sampler.compute_masks([sequence for _, sequence in step.ends()])
        logits = self._forward(step)  # (R, V)
        for i, chunk in enumerate(chunks):  # before sampling, which may write over the logits
            if chunk.num_prompt_logits:
                chunk.sequence.prompt_logprobs.read(self.runner.backend, logits[step.prompt_rows(i)])
        self._choose_tokens(logits, step)
        for chunk in chunks:
            chunk.sequence.num_cached += chunk.count
        confirm_drafts(self.sampler, logits, step)

    def _forward(self, step: StepInput) -> Any:
        captures = {
            i: chunk.sequence.captures
            for i, chunk in enumerate(step.chunks)
            if chunk.sequence.captures is not None
        }
        if not captures:
            return self.runner.forward(replace(step.batch, drawn_by=lambda: self._drawn_by(step)))
        from ..look.captures import StepCaptures

        look = StepCaptures(step.batch, captures, step.chunks[0].first_layer)
        logits = self.runner.forward(step.batch, look)
        for i, error in look.failed.items():
            step.chunks[i].sequence.error = error
        return logits

    def _drawn_by(self, step: StepInput) -> Warpers | None:
        """Return what all rows are drawn by, or None if their logits are wanted for more."""
        sequences = [sequence for _, sequence in step.ends() if sequence.beams is None]
        has_others = len(sequences) < step.batch.logit_rows.size
        if has_others or any(chunk.num_prompt_logits for chunk in step.chunks):
            return None
        return self.sampler.drawn_by(sequences)

    def _choose_tokens(self, logits: Any, step: StepInput) -> None:
        ends = step.ends()
        if searched := [end for end in ends if end[1].beams is not None]:
            from .beam_search import predict

            own, sequences = _rows_of(logits, searched)  # first: the sampler may write over the logits
            predictions = predict(self.sampler, own, sequences)
            for sequence, prediction in zip(sequences, predictions, strict=True):
                sequence.beams.take(sequence, prediction)
        if drawn := [end for end in ends if end[1].beams is None]:
            own, sequences = _rows_of(logits, drawn)
            for sequence, token in zip(sequences, self.sampler.sample(own, sequences), strict=True):
                sequence.append(token)

    # Several decode steps in one call, if the backend chooses the tokens. On a GPU, later steps run while Python reads
    # the tokens of earlier ones; on a CPU, Python costs a tenth of a step.

    def _choose_num_steps(self, chunks: list[Chunk], seconds: float) -> int:
        for chunk in chunks:
            sequence = chunk.sequence
            params = sequence.params
            ends_by_text = params.stop or params.repetition_detection is not None
            if not sequence.new_token_ids or ends_by_text or self._drafter.num_wanted(chunk):
                seconds = 0.0  # the time of the first token is reported
            elif sequence.sample.on_chunk is not None:
                seconds = min(seconds, STREAM_SECONDS)
        if self._timed:
            seconds = min(
                seconds, min(sequence.sample.deadline for sequence in self._timed) - time.perf_counter()
            )
        steps = self.runner.choose_num_steps(len(chunks), self._timer.num_steps(seconds))
        if steps == 1:
            return 1
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence.needs_python or not (chunk.is_decode and self.sampler.is_drawn_alone(sequence)):
                return 1
            room = self._max_model_len - sequence.num_cached
            steps = min(steps, room, sequence.params.max_tokens - len(sequence.new_token_ids))
        return steps

    def _run_several(self, chunks: list[Chunk], steps: int) -> int:
        sequences = [chunk.sequence for chunk in chunks]
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
        return taken

    def _expire(self) -> None:
        now = time.perf_counter()
        for sequence in [sequence for sequence in self._timed if sequence.sample.deadline <= now]:
            if not sequence.is_finished:
                (sequence.beams or sequence).expire()
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


def _rows_of(logits: Any, ends: list[tuple[int, Sequence]]) -> tuple[Any, list[Sequence]]:
    """Return rows of the logits (R, V), without a copy if they are all, and their sequences."""
    rows = [row for row, _ in ends]
    return logits if len(rows) == len(logits) else logits[rows], [sequence for _, sequence in ends]


def _num_read(chunks: list[Chunk]) -> int:
    """Return the prompt tokens in the chunks; a beam search counts once."""
    firsts = (c for c in chunks if c.sequence.beams is None or c.sequence is c.sequence.beams.first)
    return sum(chunk.count for chunk in firsts if not chunk.sequence.new_token_ids)


def _num_after_first(sequences: list[Sequence]) -> int:
    return sum(max(len(sequence.new_token_ids) - 1, 0) for sequence in sequences)
