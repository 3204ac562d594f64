"""StepLoop: schedule, run, sample, record. The engine's thread alone calls it."""

import time
from collections.abc import Iterator
from math import inf
from typing import Any

import numpy as np

from tinygpt.engine.beam_search import Prediction, predict
from tinygpt.engine.model_runner import ModelRunner
from tinygpt.engine.model_source import EngineConfig
from tinygpt.engine.sampler import Sampler, draws_of, gather_warpers, sampled
from tinygpt.engine.scheduler import Chunk, Scheduler, SlotTable, StepInput, rows_of
from tinygpt.engine.sequence import SampledToken, Sequence
from tinygpt.engine.spec_decode import Drafter, DraftModel, confirm_drafts
from tinygpt.kernels.batch import Batch
from tinygpt.outputs import Throughput

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
    """The sequences that run or wait, and the steps that advance them.

    runner: the model; a benchmark may put a wrapper in its place. draft_model: for speculative decoding.
    """

    def __init__(self, runner: ModelRunner, engine_config: EngineConfig, draft_model: DraftModel | None):
        slots = SlotTable(engine_config.max_num_seqs, engine_config.prefix_cache_seqs)
        max_num_tokens = engine_config.max_num_batched_tokens
        self.scheduler = Scheduler(slots, max_num_tokens, runner.copy_positions, self._write_prefix)
        self.throughput = Throughput()
        self._runner = runner
        self._max_model_len = engine_config.max_model_len
        self._sampler = Sampler(runner)
        self._drafter = Drafter(engine_config, draft_model)
        self._timed: set[Sequence] = set()  # the sequences that have a deadline
        self._next_deadline = inf  # no later than the earliest of theirs
        self._timer = StepTimer()

    @property
    def runner(self) -> ModelRunner:
        return self._runner

    @runner.setter
    def runner(self, runner: Any) -> None:
        self._runner = self._sampler.runner = runner

    def add(self, sequences: list[Sequence]) -> None:
        timed = [sequence for sequence in sequences if sequence.deadline is not None]
        self._timed.update(timed)
        self._next_deadline = min([self._next_deadline, *(sequence.deadline for sequence in timed)])
        self.scheduler.add(*sequences)

    def remove(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.on_end = None
            self._timed.discard(sequence)
            self.scheduler.remove(sequence)
            if not sequence.is_finished:
                sequence.error = "it was cancelled."

    def close(self) -> None:
        self._runner.close()
        self._drafter.close()
        self._sampler.close()

    def step(self, seconds: float = 0.0) -> None:
        """Run one forward pass: one new token for each sequence that is past its prompt.

        If no sequence needs a look in between, run as many passes as fit into `seconds`, or more on a GPU.
        """
        if self._next_deadline <= time.perf_counter():
            self._expire()
        if chunks := self.scheduler.schedule():
            started, num_read = time.perf_counter(), _num_read(chunks)
            texts = [chunk.sequence for chunk in chunks if chunk.sequence.beams is None]
            searches = {chunk.sequence.beams for chunk in chunks if chunk.sequence.new_token_ids} - {None}
            num_before = _num_after_first(texts)
            self._run(chunks, seconds)
            num_new = len(searches) + _num_after_first(texts) - num_before
            share, took = num_read / ((num_read + num_new) or 1), time.perf_counter() - started
            self.throughput += Throughput(num_read, share * took, num_new, (1 - share) * took)
        for sequence in self.scheduler.finished:
            self._end(sequence)

    def _run(self, chunks: list[Chunk], seconds: float) -> None:
        started, num_steps = time.perf_counter(), self._choose_num_steps(chunks, seconds)
        if num_steps > 1:
            num_steps = self._run_several(chunks, num_steps)
        else:
            self._run_one(chunks)
        self._timer.note(time.perf_counter() - started, num_steps)
        for beams in dict.fromkeys(sequence.beams for sequence in self.scheduler.running):
            if beams is not None:
                beams.advance(self._runner.copy_positions)

    def _run_one(self, chunks: list[Chunk]) -> None:
        step = StepInput.of(chunks, self._drafter.propose(chunks))
        self._sampler.compute_masks([sequence for _, sequence in step.ends()])
        logits = self._runner.forward(step.batch)  # (R, V)
        for i, chunk in enumerate(chunks):  # before sampling, which may write over the logits
            if chunk.num_prompt_logits:
                chunk.sequence.prompt_logprobs.read(self._runner, logits[step.prompt_rows(i)])
        tokens, predictions = self._sample(logits, step)
        for chunk in chunks:
            sequence = chunk.sequence
            if chunk.is_sampled and sequence.beams is not None:
                sequence.beams.take(sequence, next(predictions))
            elif chunk.is_sampled:
                sequence.take(next(tokens))
            sequence.advance(chunk.count)
        confirm_drafts(self._sampler, logits, step)

    def _sample(self, logits: Any, step: StepInput) -> tuple[Iterator[SampledToken], Iterator[Prediction]]:
        drawn = [(row, sequence) for row, sequence in step.ends() if sequence.beams is None]
        searched = [(row, sequence) for row, sequence in step.ends() if sequence.beams is not None]
        tokens = predictions = ()
        if searched:  # first: the sampler may write over the logits
            rows, sequences = zip(*searched, strict=True)
            predictions = predict(self._sampler, logits[list(rows)], sequences)
        if drawn:
            rows, sequences = zip(*drawn, strict=True)
            tokens = self._sampler.sample(rows_of(logits, list(rows)), sequences)
        return iter(tokens), iter(predictions)

    # Several decode steps in one call, if the backend chooses the tokens and no sequence needs a look in between. On a
    # GPU, later steps run while Python reads the tokens of earlier ones; on a CPU, Python costs a tenth of a step.

    def _choose_num_steps(self, chunks: list[Chunk], seconds: float) -> int:
        for chunk in chunks:
            sequence = chunk.sequence
            is_first = not sequence.new_token_ids  # its time is reported
            if is_first or sequence.may_end_by_its_text or self._drafter.num_wanted(chunk):
                seconds = 0.0
        if any(chunk.sequence.on_chunk for chunk in chunks):
            seconds = min(seconds, STREAM_SECONDS)
        seconds = min(seconds, self._next_deadline - time.perf_counter())
        steps = self._runner.choose_num_steps(len(chunks), self._timer.num_steps(seconds))
        if steps == 1:
            return 1
        for chunk in chunks:
            sequence = chunk.sequence
            if not chunk.is_sampled or chunk.count > 1 or chunk.num_prompt_logits or sequence.beams is not None:
                return 1
            if sequence.window is not None or not self._sampler.is_drawn_alone(sequence):
                return 1
            room = self._max_model_len - sequence.num_cached
            steps = min(steps, room, sequence.params.max_tokens - len(sequence.new_token_ids))
        return steps

    def _run_several(self, chunks: list[Chunk], steps: int) -> int:
        sequences = [chunk.sequence for chunk in chunks]
        starts, slots = [s.num_cached for s in sequences], [s.slot for s in sequences]
        batch = Batch.of([s.next_token_ids(1) for s in sequences], starts, slots)
        warpers = gather_warpers([s.sampling_state for s in sequences])
        ends = frozenset().union(*(sequence.end_token_ids for sequence in sequences))
        ends = np.array([token_id for token_id in ends if token_id < self._runner.config.vocab_size], np.int32)  # (E,)
        taken = 0
        for token_ids in self._runner.multi_step(batch, warpers, *draws_of(sequences), steps, ends):  # (S,)
            taken += 1
            for sequence, token_id in zip(sequences, token_ids.tolist(), strict=True):
                if sequence.is_finished:
                    continue
                sequence.take(sampled(token_id, sequence))
                if token_id >= 0:
                    sequence.advance(1)
                if sequence.is_finished:
                    self._runner.stop_early(True)  # another sequence may have the slot
        return taken

    def _expire(self) -> None:
        now = time.perf_counter()
        for sequence in [sequence for sequence in self._timed if sequence.deadline <= now]:
            if not sequence.is_finished:
                (sequence.beams or sequence).expire()
            self._end(sequence)
        self._next_deadline = min((sequence.deadline for sequence in self._timed), default=inf)

    def _end(self, sequence: Sequence) -> None:
        self._timed.discard(sequence)
        self.scheduler.remove(sequence)
        on_end, sequence.on_end = sequence.on_end, None
        if on_end is not None:
            on_end()

    def _write_prefix(self, sequence: Sequence) -> None:
        prompt = sequence.soft_prompt.prompt
        if prompt.kind == "prefix":
            self._runner.write_positions(sequence.slot, 0, prompt.keys, prompt.values)
            sequence.reuse(len(prompt))


def _num_read(chunks: list[Chunk]) -> int:
    """Return the prompt tokens in the chunks; a beam search counts once."""
    firsts = (c for c in chunks if c.sequence.beams is None or c.sequence is c.sequence.beams.first)
    return sum(chunk.count for chunk in firsts if not chunk.sequence.new_token_ids)


def _num_after_first(sequences: list[Sequence]) -> int:
    return sum(max(len(sequence.new_token_ids) - 1, 0) for sequence in sequences)
