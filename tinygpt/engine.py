"""Engine: the step loop, and what a step needs: parameters, KV cache, workspace, scheduler."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from tinygpt.batch import Batch
from tinygpt.choose import choose
from tinygpt.config import GPT2Config
from tinygpt.deadlines import Deadlines
from tinygpt.errors import RequestError
from tinygpt.rows import RowTable
from tinygpt.scheduler import Chunk, Scheduler
from tinygpt.sequence import Sequence
from tinygpt.turn import Turn

# Rows whose logits are computed together when all are wanted: 64 x 50257 x 4 bytes are 13 MB.
LOGIT_ROWS = 64


@dataclass(frozen=True)
class Limits:
    """What the engine's memory is laid out for; LLM's docstring says what each is."""

    max_num_seqs: int
    prefix_cache_seqs: int
    max_model_len: int
    max_num_batched_tokens: int

    @property
    def num_rows(self) -> int:
        """Of the KV cache: the scheduler's, and one more for `Engine.logits`."""
        return self.max_num_seqs + self.prefix_cache_seqs + 1


class Engine:
    """Runs sequences, any number of which may be added and removed between steps, by any Python thread.

    Whoever wants a sequence to go on calls `step`. One thread takes a step at a time, for all sequences.
    """

    def __init__(
        self,
        backend: ModuleType,
        params: Any,
        config: GPT2Config,
        limits: Limits,
        dtype: str,
        kv_cache_dtype: str,
        threads: int,
    ):
        self.limits = limits
        self._backend = backend
        self._params = params
        self._cache = _new_cache(backend, config, limits, kv_cache_dtype)
        self._workspace = backend.new_workspace(
            config, limits.max_num_batched_tokens, max(LOGIT_ROWS, limits.max_num_seqs), threads, dtype
        )
        rows = RowTable(limits.max_num_seqs, limits.prefix_cache_seqs)
        self.scheduler = Scheduler(rows, limits.max_num_batched_tokens, self._copy_positions)
        self._deadlines = Deadlines()
        self._removed: deque[Sequence] = deque()  # not yet forgotten by the scheduler
        self._turn = Turn(self._forget_removed)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Have sequences run from the next step on, or as soon as there are rows for them."""
        for sequence in sequences:
            self._deadlines.add(sequence)
            self.scheduler.add(sequence)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Forget sequences, whether or not they have ended; their rows are free at once, or after the step."""
        self._removed.extend(sequences)
        self._turn.tidy()

    def step(self) -> None:
        """Advance every running sequence: one forward pass, one new token for each that is not still in its prompt.

        If another thread is at it, wait for the end of its step instead. RequestError if the engine is closed.
        """
        if self._turn.begin_or_wait():
            try:
                self._check_open()
                self._step()
            finally:
                self._turn.end()

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """Teacher-forced logits, (T, V) float32, of a sequence that is no part of the steps."""
        row, parts = self.limits.num_rows - 1, []
        with self._turn.taken():
            self._check_open()
            size = min(LOGIT_ROWS, self.limits.max_num_batched_tokens)
            for start in range(0, len(token_ids), size):
                batch = Batch.of([token_ids[start : start + size]], [start], [row], "all")
                parts.append(self._forward(batch).copy())  # the next step writes over it
        return np.concatenate(parts)  # (T, V)

    def close(self) -> None:
        """Give the memory back. Any later step raises RequestError."""
        with self._turn.taken():
            self._params = self._cache = self._workspace = None

    def _step(self) -> None:
        for sequence in self._deadlines.pop_expired(time.perf_counter()):
            sequence.expire()
            self.scheduler.remove(sequence)
            _tell_end(sequence)
        chunks = self.scheduler.schedule()
        if chunks:  # none: another thread's step has finished everything
            self._advance(chunks)
        for sequence in self.scheduler.finish_step():
            _tell_end(sequence)

    def _advance(self, chunks: list[Chunk]) -> None:
        is_sampled = [chunk.is_sampled for chunk in chunks]
        batch = Batch.of(
            [chunk.sequence.next_token_ids(chunk.count) for chunk in chunks],
            [chunk.sequence.num_cached for chunk in chunks],
            [chunk.sequence.row for chunk in chunks],
            is_sampled,
        )
        logits = self._forward(batch)  # (R, V)
        sampled = [chunk.sequence for chunk, flag in zip(chunks, is_sampled, strict=True) if flag]
        tokens = self._choose(logits, sampled) if sampled else iter(())
        # Nothing has changed so far: a step that is interrupted, as by Ctrl-C, is simply taken again.
        for chunk, flag in zip(chunks, is_sampled, strict=True):
            sequence = chunk.sequence
            if flag:
                token_id, logprobs, logprob, error = next(tokens)
                if error is None:
                    sequence.append(token_id, logprobs, logprob)
                else:
                    sequence.fail(error)
            sequence.num_cached += chunk.count

    def _choose(self, logits: np.ndarray, sequences: list[Sequence]) -> Iterator[tuple]:
        """Of each sequence: its next token, the logprobs to report, that of the token, or an error instead."""
        chosen = choose(self._backend, self._workspace, logits, sequences)
        return zip(chosen.token_ids, chosen.logprobs, chosen.chosen_logprobs, chosen.errors, strict=True)

    def _forward(self, batch: Batch) -> np.ndarray:
        return self._backend.forward(self._params, batch, self._cache, self._workspace)  # (R, V)

    def _copy_positions(self, source_row: int, target_row: int, start: int, stop: int) -> None:
        self._backend.copy_positions(self._cache, source_row, target_row, start, stop)

    def _forget_removed(self) -> None:
        while self._removed:
            sequence = self._removed.popleft()
            sequence.on_end = None
            self.scheduler.remove(sequence)
            if not sequence.is_finished:
                sequence.fail("it was cancelled.")

    def _check_open(self) -> None:
        if self._params is None:
            raise RequestError("this LLM has been closed: make a new one.")


def _tell_end(sequence: Sequence) -> None:
    on_end, sequence.on_end = sequence.on_end, None
    if on_end is not None:
        on_end()


def _new_cache(backend: ModuleType, config: GPT2Config, limits: Limits, dtype: str) -> Any:
    sizes = config, limits.num_rows, limits.max_model_len, dtype
    try:
        return backend.new_cache(*sizes)
    except MemoryError:
        raise RequestError(
            f"the KV cache for max_num_seqs={limits.max_num_seqs}, prefix_cache_seqs={limits.prefix_cache_seqs} and "
            f"{limits.max_model_len} positions takes {backend.cache_bytes(*sizes) / 2**30:.1f} GiB, which this machine "
            "cannot give: lower max_num_seqs, prefix_cache_seqs or max_model_len."
        ) from None
