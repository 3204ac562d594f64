"""Probe: runs one sequence that is no part of the steps, to look at what the model makes of it."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from tinygpt.engine.kv_slots import SlotTable
from tinygpt.engine_config import LOGIT_ROWS, EngineConfig
from tinygpt.errors import RequestError
from tinygpt.execution.batch import Batch
from tinygpt.execution.model_runner import ModelRunner

POOLINGS = {
    "last": lambda states: states[-1],
    "mean": lambda states: states.mean(0),
    "sum": lambda states: states.sum(0),
}


class Probe:
    """Logits, hidden states, attention, keys and values of given tokens. It runs in the slot that steps never use.

    Each call keeps the steps waiting.
    """

    def __init__(
        self,
        runner: ModelRunner,
        slots: SlotTable,
        engine_config: EngineConfig,
        hold_steps: Callable[[], AbstractContextManager[None]],
    ):
        """hold_steps: what keeps all steps waiting for a block; RequestError once the model is closed."""
        self._runner, self._slots, self._hold_steps = runner, slots, hold_steps
        self._slot = engine_config.spare_slot
        self._chunk_size = min(LOGIT_ROWS, engine_config.max_num_batched_tokens)

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """Teacher-forced logits, (T, V) float32."""
        with self._hold_steps():
            # Copies: the next step writes over them.
            return np.concatenate([self._runner.forward(batch).copy() for batch in self._batches(token_ids, "all")])

    def hidden_states(self, token_ids: list[int], layers: slice = slice(None)) -> np.ndarray:
        """(L + 1, T, C) float32, or those of some layers: their inputs, and last what ln_f makes of the output."""
        with self._hold_steps():
            return np.concatenate([hidden[layers].copy() for hidden, _ in self._traces(token_ids)], axis=1)

    def attentions(self, token_ids: list[int]) -> np.ndarray:
        """(L, H, T, T) float32: how much each position attends to each at or before it."""
        with self._hold_steps():
            queries = np.concatenate([queries for _, queries in self._traces(token_ids)], axis=1)  # (L, T, C)
            keys, _ = self._runner.read_positions(self._slot, 0, len(token_ids))  # (L, H, T, D)
        return self._runner.attention_maps(queries, keys)  # steps need not wait for this

    def embedding(self, token_ids: list[int], pooling: str) -> np.ndarray:
        """One vector (C,) float32 of the last hidden states: the last token's, or the mean or sum of all."""
        return POOLINGS[pooling](self.hidden_states(token_ids, slice(-1, None))[0])

    def keys_and_values(self, token_ids: list[int], cache_salt: Hashable) -> tuple[np.ndarray, np.ndarray]:
        """(L, H, T, D) each, in the KV cache's type. What a kept slot holds of them is copied, the rest computed."""
        with self._hold_steps():
            num_held, source = self._slots.find(token_ids, cache_salt)
            if num_held:
                self._runner.copy_positions(source, self._slot, 0, num_held)
            for batch in self._batches(token_ids, [0], num_held):
                self._runner.forward(batch)
            return self._runner.read_positions(self._slot, 0, len(token_ids))

    def no_keys(self) -> np.ndarray:
        """(L, H, 0, D): what keys are like, in the KV cache's type."""
        with self._hold_steps():
            return self._runner.read_positions(self._slot, 0, 1)[0][:, :, :0]

    def keep(self, token_ids: list[int], cache_salt: Hashable, keys: np.ndarray, values: np.ndarray) -> None:
        """Put keys and values, as `keys_and_values` gives them, among those of ended sequences."""
        with self._hold_steps():
            if token_ids:
                self._slots.put(token_ids, cache_salt, lambda slot: self._runner.write_positions(slot, 0, keys, values))

    def origin(self) -> dict[str, Any]:
        """What keys and values depend on, beside the tokens."""
        with self._hold_steps():
            return self._runner.origin

    def _traces(self, token_ids: list[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return map(self._runner.trace, self._batches(token_ids, [0]))

    def _batches(self, token_ids: list[int], logits_of: str | list[int], start: int = 0) -> Iterator[Batch]:
        for first in range(start, len(token_ids), self._chunk_size):
            yield Batch.of([token_ids[first : first + self._chunk_size]], [first], [self._slot], logits_of)


def check_pooling(pooling: str) -> None:
    if pooling not in tuple(POOLINGS):
        raise RequestError(f"pooling is {pooling!r} and must be one of {', '.join(map(repr, POOLINGS))}.")
