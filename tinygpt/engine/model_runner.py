"""ModelRunner: a loaded model on one backend. Probe: logits, hidden states and attention of given tokens."""

import logging
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ..errors import FailedRequestError, RequestError, invalid
from ..kernels import numbers
from ..kernels.backend import Batch, DeviceError
from ..sampling_params import num_best
from ..weights.config import ModelConfig
from .model_source import LOGIT_ROWS, EngineConfig, ModelSource

logger = logging.getLogger(__name__)

MAX_STEPS = 16
POOLINGS = {
    "last": lambda states: states[-1],
    "mean": lambda states: states.mean(0),
    "sum": lambda states: states.sum(0),
}


class ModelRunner:
    """Weights, KV cache and buffers of a model, and the functions of `kernels.backend.Backend` on them."""

    shares_layers = False  # with other processes, for which there are other kernels
    adapter_of_slot: np.ndarray | None = None  # of a model with lora_modules, (slots,) int32; -1: none

    def __init__(self, source: ModelSource, engine_config: EngineConfig, threads: int):
        """Raise CheckpointError for a damaged checkpoint, RequestError if memory does not suffice."""
        self.config: ModelConfig = source.config
        self.dtype = source.dtype
        self.kv_cache_dtype = source.kv_cache_dtype
        self._file = source.file
        self._backend = source.backend
        _check_memory(source, engine_config)
        started = time.perf_counter()
        self._params = source.load_params(threads)
        if source.adapters:
            given = self.config, source.adapters, engine_config.num_slots
            self._params, self.adapter_of_slot = self._backend.with_adapters(self._params, *given)
        seconds = time.perf_counter() - started
        logger.debug("%s: weights in %s after %.2f s", source.checkpoint.path, self.dtype, seconds)
        self._kv_cache = _new_kv_cache(source, engine_config)
        self._workspace = _new_workspace(source, engine_config, threads)

    def forward(self, batch: Batch, look: Any = None) -> Any:
        """Run one step, with a kernels.backend.Look. Raise CheckpointError if the mapped file was cut short."""
        self._check_file()
        return self._backend.forward(self._params, batch, self._kv_cache, self._workspace, look)  # (R, V)

    def trace(self, batch: Batch, is_whole: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """Run a step. Return hidden states (L + 2, N, C), Hugging Face's with ln_f's input, and queries (L, N, C).

        is_whole: False for the last two states alone.
        """
        from ..look.captures import trace  # rarely needed

        streams, queries = trace(partial(self.forward, batch), batch, self.config.n_layer, is_whole)
        normed = self._backend.final_norm(self._params, streams[-1])
        return np.concatenate([streams, normed[None]], dtype=np.float32), queries

    def choose_num_steps(self, num_sequences: int, num_in_time: int) -> int:
        """Return how many decode steps `multi_step` is to run; 1: use `forward`. num_in_time: steps that fit."""
        if self._backend.multi_step is None:
            return 1
        return (
            MAX_STEPS if self._backend.QUEUES_STEPS else min(num_in_time, MAX_STEPS)
        )  # tokens come while steps run

    def multi_step(
        self, batch: Batch, warpers: Any, seeds: np.ndarray, indices: np.ndarray, steps: int, ends: np.ndarray
    ) -> Iterable[np.ndarray]:
        self._check_file()
        on = self._params, batch, self._kv_cache, self._workspace
        return self._backend.multi_step(*on, warpers, seeds, indices, steps, ends)

    def stop_early(self, is_wanted: bool) -> None:
        """Make the current step of `multi_step` its last, from any thread."""
        workspace = self._workspace
        if workspace is not None:  # `close` frees it in another thread
            self._backend.stop_early(workspace, is_wanted)

    def sample(self, logits: Any, warpers: Any, seeds: Any, indices: Any, positions: Any) -> np.ndarray:
        """Return a token (R,) int32 for each row; -1 for a row that is not finite or has no token left."""
        return self._backend.sample(logits, warpers, seeds, indices, positions)  # (R,)

    def process_logits(self, logits: Any, processors: Any) -> None:
        self._backend.process_logits(logits, processors)

    def filter_logits(self, logits: Any, warpers: Any) -> np.ndarray:
        return self._backend.filter_logits(logits, warpers)  # (R, V), -inf for a removed token

    def top_logprobs(self, logits: np.ndarray, token_id: int, n: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Return ids and log probabilities of the n most probable tokens of a row (V,), or ALL, and token_id's."""
        return self._backend.top_logprobs(logits, token_id, num_best(n, len(logits)))

    def copy_positions(self, source_slot: int, target_slot: int, start: int, stop: int) -> None:
        self._backend.copy_positions(self._kv_cache, source_slot, target_slot, start, stop)

    def read_positions(self, slot: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        return self._backend.read_positions(self._kv_cache, slot, start, stop, self.config.head_size)

    def write_positions(self, slot: int, start: int, keys: np.ndarray, values: np.ndarray) -> None:
        self._backend.write_positions(self._kv_cache, slot, start, keys, values)

    def close(self) -> None:
        self._params = self._file = self._kv_cache = self._workspace = None

    def _check_file(self) -> None:
        if self._file is not None:
            self._file.check_whole()


class Probe:
    """Computes in a slot that steps never use. The engine's thread alone calls the methods."""

    def __init__(self, runner: ModelRunner, engine_config: EngineConfig):
        self._runner = runner
        self._slot = engine_config.num_slots - 1
        self._max_num_tokens = engine_config.max_num_batched_tokens
        self._chunk_size = min(LOGIT_ROWS, engine_config.max_num_batched_tokens, engine_config.max_model_len)

    def logits(self, token_ids: list[int], looks: Any = None) -> np.ndarray:
        """Return logits (T, V). looks: Captures, which see all positions. Raise FailedRequestError if an edit fails."""
        if looks is None:  # copies: the next step overwrites them
            return np.concatenate(
                [self._runner.forward(batch).copy() for batch in self._batches(token_ids, "all")]
            )
        last = "resid_post", self._runner.config.n_layer - 1
        looks.wanted |= {last}
        for batch in self._batches(token_ids, [0]):
            look = looks.step(batch)
            self._runner.forward(batch, look)
            if look.failed:
                raise FailedRequestError(look.failed[0])
        return self.logits_of(np.concatenate(looks.seen[last]))

    def logits_of(self, stream: np.ndarray) -> np.ndarray:
        """Return logits (N, V) of a residual stream (N, C) after the last layer."""
        from ..look.captures import given  # rarely needed

        config = self._runner.config
        found = np.empty((len(stream), config.vocab_size), np.float32)
        for start in range(0, len(stream), self._chunk_size):
            rows = stream[start : start + self._chunk_size]
            batch = Batch.of([[0] * len(rows)], [0], [self._slot], "all")
            found[start : start + len(rows)] = self._runner.forward(batch, given(batch, config.n_layer, rows))
        return found

    def hidden_states(self, token_ids: list[int], layers: list[int]) -> np.ndarray:
        return np.concatenate([hidden[layers].copy() for hidden, _ in self._traces(token_ids)], axis=1)

    def attentions(self, token_ids: list[int]) -> np.ndarray:
        queries = np.concatenate([queries for _, queries in self._traces(token_ids)], axis=1)  # (L, T, C)
        keys, _ = self._runner.read_positions(self._slot, 0, len(token_ids))  # (L, H, T, D)
        config = self._runner.config
        maps = np.empty((*keys.shape[:3], len(token_ids)), np.float32)
        for layer in range(config.n_layer):
            of_layer = queries[layer], keys[layer], config.attention_scale(layer), config.alibi_slopes
            maps[layer] = numbers.softmax(numbers.attention_scores(*of_layer))
        return maps  # (L, H, T, T)

    def last_states(self, token_ids: list[int]) -> np.ndarray:
        return np.concatenate([hidden[-1] for hidden, _ in self._traces(token_ids, False)])  # (T, C)

    def embedding(self, token_ids: list[int], pooling: str) -> np.ndarray:
        return POOLINGS[pooling](self.last_states(token_ids))

    def _traces(self, token_ids: list[int], is_whole: bool = True) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return (self._runner.trace(batch, is_whole) for batch in self._batches(token_ids, [0]))

    def _batches(self, token_ids: list[int], logits_of: str | list[int]) -> Iterator[Batch]:
        size = self._chunk_size if logits_of == "all" else self._max_num_tokens
        for first in range(0, len(token_ids), size):
            yield Batch.of([token_ids[first : first + size]], [first], [self._slot], logits_of)


def check_pooling(pooling: str) -> None:
    if pooling not in tuple(POOLINGS):
        raise invalid("pooling", pooling, f"one of {', '.join(map(repr, POOLINGS))}")


def _check_memory(source: ModelSource, sizes: EngineConfig) -> None:
    config = source.config
    tied = source.checkpoint.tied
    slots = (sizes.num_slots, sizes.max_model_len)
    steps = (sizes.max_num_batched_tokens, sizes.max_num_logits)
    try:
        source.backend.check_memory(config, tied, source.dtype, source.kv_cache_dtype, *slots, *steps)
    except DeviceError as error:
        raise RequestError(str(error)) from None


def _new_kv_cache(source: ModelSource, sizes: EngineConfig) -> Any:
    shape = source.config, sizes.num_slots, sizes.max_model_len, source.kv_cache_dtype
    size = source.backend.kv_cache_bytes(*shape) / 2**30
    logger.debug("KV cache: %d slots of %d positions in %s, %.2f GiB", *shape[1:], size)
    try:
        return source.backend.new_kv_cache(*shape)
    except MemoryError:
        raise RequestError(
            f"the KV cache of {source.checkpoint.path} for {sizes.max_num_seqs} running samples, "
            f"{sizes.prefix_cache_seqs} finished ones and {sizes.max_model_len} positions takes {size:.1f} GiB, "
            "which this machine cannot give: lower max_num_seqs, prefix_cache_seqs or max_model_len."
        ) from None


def _new_workspace(source: ModelSource, sizes: EngineConfig, threads: int) -> Any:
    steps = sizes.max_num_batched_tokens, sizes.max_num_logits
    try:
        return source.backend.new_workspace(source.config, *steps, threads, source.dtype)
    except MemoryError:
        raise RequestError(
            f"this machine cannot give the memory for steps of {sizes.max_num_batched_tokens} tokens: lower "
            "max_num_batched_tokens."
        ) from None
