"""ModelRunner: a loaded model: its weights, KV cache and buffers on one backend, and all that can be asked of them.

The engine runs one, a draft model is a second one, a benchmark wraps one, and what runs a model elsewhere replaces it.
"""

import logging
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from tinygpt.engine_config import EngineConfig
from tinygpt.errors import RequestError
from tinygpt.execution.model_source import ModelSource
from tinygpt.kernels import host
from tinygpt.kernels.backend import DeviceError
from tinygpt.kernels.batch import Batch
from tinygpt.sampling_params import num_best
from tinygpt.weights.config import ModelConfig

logger = logging.getLogger(__name__)

MAX_STEPS = 16


class ModelRunner:
    """Runs steps of one model. For one thread at a time.

    Shapes: N new tokens of a step, R rows whose logits are wanted, V vocabulary, L layers, H heads, D head size.
    """

    def __init__(self, source: ModelSource, engine_config: EngineConfig, threads: int):
        """Load the weights, and reserve the KV cache and the buffers of the largest step.

        engine_config: as its `for_model` gives it. Raises CheckpointError for a damaged checkpoint, RequestError if
        memory does not suffice.
        """
        self.config: ModelConfig = source.config
        self.dtype, self.kv_cache_dtype = source.dtype, source.kv_cache_dtype
        self._backend = source.backend
        _check_memory(source, engine_config)
        started = time.perf_counter()
        self._params, self._file = source.load_params(threads), source.file
        logger.debug(
            "%s: weights in %s after %.2f s", source.checkpoint.path, self.dtype, time.perf_counter() - started
        )
        self._kv_cache = _new_kv_cache(source, engine_config)
        self._workspace = _new_workspace(source, engine_config, threads)

    @property
    def is_closed(self) -> bool:
        return self._params is None

    def forward(self, batch: Batch) -> Any:
        """Run one step: its keys and values go into the KV cache. Logits (R, V) float32, valid until the next step.

        CheckpointError if the file that the weights are mapped from was cut short.
        """
        self._check_file()
        return self._backend.forward(self._params, batch, self._kv_cache, self._workspace)  # (R, V)

    def trace(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Run a step and look inside: hidden states (L + 1, N, C) and queries (L, N, C), float32."""
        self._check_file()
        return self._backend.trace(self._params, batch, self._kv_cache, self._workspace)

    def choose_num_steps(self, num_sequences: int, num_in_time: int) -> int:
        """How many decode steps of so many sequences `multi_step` is to take; 1: one, looked at before the next.

        num_in_time: how many those can wait for who watch the tokens. A GPU's come while the later steps are taken, and
        MAX_STEPS of them take some milliseconds.
        """
        if self._backend.multi_step is None:
            return 1
        return MAX_STEPS if self._backend.QUEUES_STEPS else min(num_in_time, MAX_STEPS)

    def multi_step(
        self, batch: Batch, warpers: Any, seeds: np.ndarray, indices: np.ndarray, steps: int, ends: np.ndarray
    ) -> Iterable[np.ndarray]:
        """Take so many decode steps: the tokens (S,) of each, as they come; -1 where logits are not finite.

        They may be fewer: after one in which a token is among `ends` (E,) int32, and after `stop_early`. Raises
        CheckpointError as `forward` does.
        """
        self._check_file()
        on = self._params, batch, self._kv_cache, self._workspace
        return self._backend.multi_step(*on, warpers, seeds, indices, steps, ends)

    def stop_early(self, is_wanted: bool) -> None:
        """Whether `multi_step`, running or not, takes no other step after the one that it is at. Any thread may call
        this."""
        workspace = self._workspace
        if workspace is not None:  # it is given back by another thread
            self._backend.stop_early(workspace, is_wanted)

    # Sampling: rows of logits (R, V) that `forward` has returned, or copies of them.

    def sample(self, logits: Any, warpers: Any, seeds: Any, indices: Any, positions: Any) -> np.ndarray:
        """A token (R,) int32 for each row; -1 for one that is not finite or has nothing left."""
        return self._backend.sample(logits, warpers, seeds, indices, positions)  # (R,)

    def process_logits(self, logits: Any, processors: Any) -> None:
        """Apply logits processors to their rows, in place."""
        self._backend.process_logits(logits, processors)

    def filter_logits(self, logits: Any, warpers: Any) -> np.ndarray:
        """The rows (R, V) after the warpers: -inf where a token was removed."""
        return self._backend.filter_logits(logits, warpers)  # (R, V)

    def top_logprobs(self, logits: np.ndarray, token_id: int, n: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Of a row (V,): ids and log probabilities of the n most probable tokens, or ALL, and that of token_id."""
        return self._backend.top_logprobs(logits, token_id, num_best(n, len(logits)))

    def log_softmax(self, logits: np.ndarray) -> np.ndarray:
        """Of each row (R, V), in float32."""
        return host.log_softmax(logits)  # (R, V)

    def attention_maps(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """(L, H, T, T) float32: how much each position attends to each; of `trace`'s queries and the cached keys."""
        scales = [self.config.attention_scale(layer) for layer in range(self.config.n_layer)]
        return host.attention_maps(queries, keys, scales, self.config.alibi_slopes)

    # Positions of the KV cache.

    def copy_positions(self, source_slot: int, target_slot: int, start: int, stop: int) -> None:
        """Give positions start to stop of one slot the keys and values of another, bit for bit."""
        self._backend.copy_positions(self._kv_cache, source_slot, target_slot, start, stop)

    def read_positions(self, slot: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Copies of keys and values, (L, H, stop - start, D) each, in the KV cache's type."""
        return self._backend.read_positions(self._kv_cache, slot, start, stop, self.config.head_size)

    def write_positions(self, slot: int, start: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Put keys and values, as `read_positions` gives them, into a slot from position `start` on."""
        self._backend.write_positions(self._kv_cache, slot, start, keys, values)

    def close(self) -> None:
        """Give the memory back; nothing can be run any more."""
        self._params = self._file = self._kv_cache = self._workspace = None

    def _check_file(self) -> None:
        """CheckpointError if the weights are no longer there; a microsecond."""
        if self._file is not None:
            self._file.check_whole()


def _check_memory(source: ModelSource, sizes: EngineConfig) -> None:
    config, tied = source.config, source.checkpoint.tied
    slots, steps = (sizes.num_slots, sizes.max_model_len), (sizes.max_num_batched_tokens, sizes.max_num_logits)
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
            f"the KV cache of {source.checkpoint.path} for max_num_seqs={sizes.max_num_seqs}, "
            f"prefix_cache_seqs={sizes.prefix_cache_seqs} and {sizes.max_model_len} positions takes {size:.1f} GiB, "
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
