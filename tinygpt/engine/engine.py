"""Engine: the step loop, and what a step needs: parameters, KV cache, workspace, scheduler."""

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np

from tinygpt.config import ModelConfig
from tinygpt.engine.beams import predict
from tinygpt.engine.deadlines import Deadlines
from tinygpt.engine.draft_model import DraftModel
from tinygpt.engine.kv_slots import SlotTable
from tinygpt.engine.multi_step import draws_of, num_steps_ahead, take_tokens
from tinygpt.engine.scheduler import Chunk, Scheduler
from tinygpt.engine.spec_decode import Draft, Speculator
from tinygpt.engine.step_input import replace_virtual
from tinygpt.engine.step_lock import StepLock
from tinygpt.engine_config import LOGIT_ROWS, EngineConfig
from tinygpt.errors import RequestError
from tinygpt.execution.backend import new_workspace
from tinygpt.execution.batch import Batch
from tinygpt.execution.fingerprint import fingerprint
from tinygpt.request.sequence import Sequence
from tinygpt.sampling.sampler import choose


class Engine:
    """Runs sequences, any number of which may be added and removed between steps, by any Python thread.

    Whoever wants a sequence to go on calls `step`. One thread takes a step at a time, for all sequences.
    """

    def __init__(
        self,
        backend: ModuleType,
        params: Any,
        config: ModelConfig,
        limits: EngineConfig,
        dtype: str,
        kv_cache_dtype: str,
        threads: int,
        draft_model: DraftModel | None = None,
    ):
        self.limits = limits
        self._backend = backend
        self._about = {**asdict(config), "device": backend.__name__.rpartition(".")[2]}
        self._about |= {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
        self._head_size, self._vocab_size = config.head_size, config.vocab_size
        self._params = params
        self._cache = _new_cache(backend, config, limits, kv_cache_dtype)
        num_tokens = limits.max_num_batched_tokens
        self._workspace = new_workspace(backend, config, num_tokens, limits.max_num_logits, threads, dtype)
        self._speculator = Speculator(num_tokens, limits.max_num_logits, draft_model)
        slots = SlotTable(limits.max_num_seqs, limits.prefix_cache_seqs)
        self.scheduler = Scheduler(slots, limits.max_num_batched_tokens, self._copy_positions, self._write_prefix)
        self._deadlines = Deadlines()
        self._removed: deque[Sequence] = deque()  # not yet forgotten by the scheduler
        self._step_lock = StepLock(self._forget_removed)

    def add(self, sequences: list[Sequence]) -> None:
        """Have sequences run from the next step on, or as soon as there are slots for them."""
        for sequence in sequences:
            self._deadlines.add(sequence)
        self.scheduler.add(*sequences)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Forget sequences, whether or not they have ended; their slots are free at once, or after the step."""
        self._removed.extend(sequences)
        self._step_lock.tidy()

    def step(self) -> None:
        """Advance every running sequence: one forward pass, one new token for each that is not still in its prompt.

        If another thread is at it, wait for the end of its step instead. RequestError if the engine is closed.
        """
        self._step_lock.refuse_owner()
        try:
            if self._step_lock.begin_or_wait():
                self._check_open()
                self._step()
        finally:
            self._step_lock.end()

    def refuse_within_step(self) -> None:
        """RequestError in a function that a step calls."""
        self._step_lock.refuse_owner()

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """Teacher-forced logits, (T, V) float32, of a sequence that is no part of the steps."""
        with self._step_lock.taken():
            self._check_open()
            # A copy: the next step writes over it.
            return np.concatenate([self._forward(batch).copy() for batch in self._spare_row_batches(token_ids, "all")])

    def hidden_states(self, token_ids: list[int], layers: slice = slice(None)) -> np.ndarray:
        """(L + 1, T, C) float32, or those of some layers: their inputs, and last what ln_f makes of the output."""
        with self._step_lock.taken():
            self._check_open()
            return np.concatenate([hidden[layers].copy() for hidden, _ in self._trace(token_ids)], axis=1)

    def queries_and_keys(self, token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Queries (L, T, C) float32, and keys (L, H, T, D) as the cache holds them."""
        with self._step_lock.taken():
            self._check_open()
            queries = np.concatenate([queries for _, queries in self._trace(token_ids)], axis=1)  # (L, T, C)
            slot, head_size = self.limits.num_slots - 1, self._head_size
            return queries, self._backend.read_positions(self._cache, slot, 0, len(token_ids), head_size)[0]

    @cached_property
    def origin(self) -> dict[str, Any]:
        """What keys and values come from, beside the tokens. It takes a look at all weights, once."""
        with self._step_lock.taken():
            self._check_open()
            return {**self._about, "weights": fingerprint(self._params)}

    def keys_and_values(self, token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """(L, H, T, D) each, in the cache's type, of a sequence that is no part of the steps.

        What a kept slot holds of it is copied, and the rest computed.
        """
        slot = self.limits.num_slots - 1
        with self._step_lock.taken():
            self._check_open()
            num_held, source = self.scheduler.slots.find(token_ids)
            if num_held:
                self._copy_positions(source, slot, 0, num_held)
            for batch in self._spare_row_batches(token_ids, [0], num_held):
                self._forward(batch)
            return self._backend.read_positions(self._cache, slot, 0, len(token_ids), self._head_size)

    def keep(self, token_ids: list[int], k: np.ndarray, v: np.ndarray) -> None:
        """Put a sequence's keys and values, as `keys_and_values` gives them, among those of ended sequences."""
        with self._step_lock.taken():
            self._check_open()
            if token_ids:
                self.scheduler.slots.put(
                    token_ids, lambda slot: self._backend.write_positions(self._cache, slot, 0, k, v)
                )

    def close(self) -> None:
        """Give the memory back. Any later step raises RequestError."""
        with self._step_lock.taken():
            self._params = self._cache = self._workspace = self._speculator = None

    def _trace(self, token_ids: list[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for batch in self._spare_row_batches(token_ids, [0]):
            yield self._backend.trace(self._params, batch, self._cache, self._workspace)

    def _spare_row_batches(
        self, token_ids: list[int], logits_of: str | list[int], num_held: int = 0
    ) -> Iterator[Batch]:
        """A sequence that is no part of the steps, in chunks: it runs in the slot that these never use."""
        size = min(LOGIT_ROWS, self.limits.max_num_batched_tokens)
        for start in range(num_held, len(token_ids), size):
            yield Batch.of([token_ids[start : start + size]], [start], [self.limits.num_slots - 1], logits_of)

    def _step(self) -> None:
        self._remove_finished()  # of a step that was interrupted
        self._expire(self._deadlines.pop_expired(time.perf_counter()))
        chunks = self.scheduler.schedule()
        if chunks:  # none: another thread's step has finished everything
            self._advance(chunks)
        for beams in dict.fromkeys(sequence.beams for sequence in self.scheduler.running):
            if beams is not None:
                beams.advance(self._copy_positions)
        self._remove_finished()

    def _expire(self, sequences: list[Sequence]) -> None:
        for i, sequence in enumerate(sequences):
            try:
                (sequence.beams or sequence).expire()
            except BaseException:  # Ctrl-C in on_chunk: the others' turn comes in the next step
                for other in sequences[i + 1 :]:
                    self._deadlines.add(other)
                raise
            finally:
                self._end(sequence)

    def _remove_finished(self) -> None:
        for sequence in self.scheduler.finished:
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Free the slot of a sequence that has ended, and tell."""
        try:
            self.scheduler.remove(sequence)
        finally:
            on_end, sequence.on_end = sequence.on_end, None
            if on_end is not None:
                on_end()

    def _advance(self, chunks: list[Chunk]) -> None:
        drafts = self._speculator.propose(chunks)
        steps = 1 if drafts else num_steps_ahead(self._backend, chunks, self._vocab_size, self.limits.max_model_len)
        if steps > 1:
            self._advance_ahead(chunks, steps)
            return
        token_ids = [chunk.sequence.next_token_ids(chunk.count) for chunk in chunks]
        embeds = replace_virtual(chunks, token_ids)  # (E, C)
        counts = [chunk.num_logits for chunk in chunks]
        for i, draft in drafts.items():
            token_ids[i], counts[i] = token_ids[i] + draft, counts[i] + len(draft)
        starts, slots = [c.sequence.num_cached for c in chunks], [c.sequence.slot for c in chunks]
        logits = self._forward(Batch.of(token_ids, starts, slots, counts, embeds))  # (R, V)
        last = [end - 1 - len(drafts.get(i, ())) for i, end in enumerate(itertools.accumulate(counts))]
        sampled = [i for i, chunk in enumerate(chunks) if chunk.is_sampled]
        found = self._read_prompt_logprobs(logits, chunks, last)
        last_logits = logits[[last[i] for i in sampled]] if len(sampled) < len(logits) else logits
        tokens = self._choose(last_logits, [chunks[i].sequence for i in sampled]) if sampled else iter(())
        # Nothing has changed so far: a step that is interrupted, as by Ctrl-C, is simply taken again. From here on that
        # holds for each sequence, as what is computed counts last: the same positions again are the same bits.
        for i, chunk in enumerate(chunks):
            sequence = chunk.sequence
            if i in found:
                sequence.prompt_logprobs.note(sequence.num_cached, found[i])
            if chunk.is_sampled:
                _take(sequence, next(tokens))
            sequence.num_cached += chunk.count
        self._confirm(logits, [Draft(chunks[i].sequence, draft, last[i]) for i, draft in drafts.items()])

    def _advance_ahead(self, chunks: list[Chunk], steps: int) -> None:
        """Take several steps at once, of sequences that all decode."""
        sequences = [chunk.sequence for chunk in chunks]
        starts, slots = [s.num_cached for s in sequences], [s.slot for s in sequences]
        batch = Batch.of([s.next_token_ids(1) for s in sequences], starts, slots)
        on = self._params, batch, self._cache, self._workspace
        take_tokens(chunks, self._backend.multi_step(*on, *draws_of(chunks), steps))  # (steps, S)

    def _read_prompt_logprobs(
        self, logits: np.ndarray, chunks: list[Chunk], last: list[int]
    ) -> dict[int, list[dict[int, float]]]:
        """What the step finds out about prompts, by the index of the chunk.

        last[i] is the row of `logits` (R, V) after chunks[i]'s last token.
        """
        found = {}
        for i, (chunk, row) in enumerate(zip(chunks, last, strict=True)):
            if count := chunk.num_prompt_logits:
                wanted, rows = chunk.sequence.prompt_logprobs, logits[row + 1 - count : row + 1]
                found[i] = wanted.read(self._backend, chunk.sequence.num_cached, rows)
        return found

    def _confirm(self, logits: np.ndarray, drafts: list[Draft]) -> None:
        """Go on with the sequences whose tokens are what was guessed: the logits after those are there already."""
        num_tokens = 0
        while drafts := [draft for draft in drafts if draft.is_confirmed(num_tokens)]:
            num_tokens += 1
            tokens = self._choose(logits[[d.row + num_tokens for d in drafts]], [d.sequence for d in drafts])
            for draft, token in zip(drafts, tokens, strict=True):
                _take(draft.sequence, token)
                draft.sequence.num_cached += 1

    def _choose(self, logits: np.ndarray, sequences: list[Sequence]) -> Iterator[Any]:
        """What `_take` gives each sequence, from its row of logits (R, V)."""
        of_beams = [r for r, sequence in enumerate(sequences) if sequence.beams is not None]
        if not of_beams:
            chosen = choose(self._backend, self._workspace, logits, sequences)
            return zip(chosen.token_ids, chosen.logprobs, chosen.chosen_logprobs, chosen.errors, strict=True)
        others = [r for r, sequence in enumerate(sequences) if sequence.beams is None]
        tokens = self._choose(logits[others], [sequences[r] for r in others]) if others else iter(())
        predictions = iter(predict(self._backend, logits[of_beams], [sequences[r] for r in of_beams]))
        return (next(tokens if sequence.beams is None else predictions) for sequence in sequences)

    def _forward(self, batch: Batch) -> np.ndarray:
        return self._backend.forward(self._params, batch, self._cache, self._workspace)  # (R, V)

    def _copy_positions(self, source_slot: int, target_slot: int, start: int, stop: int) -> None:
        self._backend.copy_positions(self._cache, source_slot, target_slot, start, stop)

    def _write_prefix(self, sequence: Sequence) -> None:
        prompt = sequence.soft_prompt.prompt
        if prompt.kind == "prefix":
            self._backend.write_positions(self._cache, sequence.slot, 0, prompt.keys, prompt.values)
            sequence.num_cached = len(prompt)

    def _forget_removed(self) -> None:
        while self._removed:
            sequence = self._removed[0]
            sequence.on_end = None
            self.scheduler.remove(sequence)
            if not sequence.is_finished:
                sequence.fail("it was cancelled.")
            self._removed.popleft()  # not before: if this is interrupted, the next turn's end does it

    def _check_open(self) -> None:
        if self._params is None:
            raise RequestError("this LLM has been closed: make a new one.")


def _take(sequence: Sequence, token: Any) -> None:
    """Give a sequence its next token, the logprobs to report and that of the token, or an error instead; or, to a beam,
    what is to come next."""
    if sequence.beams is not None:
        sequence.beams.take(sequence, token)
        return
    token_id, logprobs, logprob, error = token
    if error is None:
        sequence.append(token_id, logprobs, logprob)
    else:
        sequence.fail(error)


def _new_cache(backend: ModuleType, config: ModelConfig, limits: EngineConfig, dtype: str) -> Any:
    sizes = config, limits.num_slots, limits.max_model_len, dtype
    try:
        return backend.new_kv_cache(*sizes)
    except MemoryError:
        size = backend.kv_cache_bytes(*sizes) / 2**30
        raise RequestError(
            f"the KV cache for max_num_seqs={limits.max_num_seqs}, prefix_cache_seqs={limits.prefix_cache_seqs} and "
            f"{limits.max_model_len} positions takes {size:.1f} GiB, which this machine "
            "cannot give: lower max_num_seqs, prefix_cache_seqs or max_model_len."
        ) from None
