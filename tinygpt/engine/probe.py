"""Probe: runs one sequence that is no part of the steps, to look at what the model makes of it."""

from collections.abc import Iterator

import numpy as np

from tinygpt.engine_config import LOGIT_ROWS, EngineConfig
from tinygpt.errors import RequestError
from tinygpt.execution.model_runner import ModelRunner
from tinygpt.kernels.batch import Batch

POOLINGS = {
    "last": lambda states: states[-1],
    "mean": lambda states: states.mean(0),
    "sum": lambda states: states.sum(0),
}


class Probe:
    """Logits, hidden states and attention of given tokens, computed in a slot that steps never use.

    The engine's thread alone calls the methods.
    """

    def __init__(self, runner: ModelRunner, engine_config: EngineConfig):
        self._runner = runner
        self._slot = engine_config.spare_slot
        self._chunk_size = min(LOGIT_ROWS, engine_config.max_num_batched_tokens)

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """Teacher-forced logits, (T, V) float32."""
        # Copies: the next step writes over them.
        return np.concatenate([self._runner.forward(batch).copy() for batch in self._batches(token_ids, "all")])

    def hidden_states(self, token_ids: list[int], layers: slice = slice(None)) -> np.ndarray:
        """(L + 1, T, C) float32, or those of some layers: their inputs, and last what ln_f makes of the output."""
        return np.concatenate([hidden[layers].copy() for hidden, _ in self._traces(token_ids)], axis=1)

    def attentions(self, token_ids: list[int]) -> np.ndarray:
        """(L, H, T, T) float32: how much each position attends to each at or before it."""
        queries = np.concatenate([queries for _, queries in self._traces(token_ids)], axis=1)  # (L, T, C)
        keys, _ = self._runner.read_positions(self._slot, 0, len(token_ids))  # (L, H, T, D)
        return self._runner.attention_maps(queries, keys)

    def embedding(self, token_ids: list[int], pooling: str) -> np.ndarray:
        """One vector (C,) float32 of the last hidden states: the last token's, or the mean or sum of all."""
        return POOLINGS[pooling](self.hidden_states(token_ids, slice(-1, None))[0])

    def _traces(self, token_ids: list[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return map(self._runner.trace, self._batches(token_ids, [0]))

    def _batches(self, token_ids: list[int], logits_of: str | list[int]) -> Iterator[Batch]:
        for first in range(0, len(token_ids), self._chunk_size):
            yield Batch.of([token_ids[first : first + self._chunk_size]], [first], [self._slot], logits_of)


def check_pooling(pooling: str) -> None:
    if pooling not in tuple(POOLINGS):
        raise RequestError(f"pooling is {pooling!r} and must be one of {', '.join(map(repr, POOLINGS))}.")
