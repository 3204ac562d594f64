"""The compiled logits processors: bias and penalties. The reference's processors.py says how and in which order.

They touch only tokens that are named or have come before, so a row costs what its history does.
"""

from typing import Any, NamedTuple

import numpy as np

from tinygpt.kernels.cuda.runtime.jit import device_function, kernel
from tinygpt.kernels.cuda.runtime.ptx import bits_to_float32, rounded_product

from numba import cuda, float32, int32, int64, uint32  # isort: skip

# The fields of each processed row. `_AT` is the position in `settings` at which something begins.
NUM_FIELDS = 8
ROW, NUM_PROMPT_TOKENS = 0, 1
REPETITION_PENALTY, FREQUENCY_PENALTY, PRESENCE_PENALTY = 2, 3, 4  # the bits of a float32
BIAS_IDS_AT, BIASES_AT, NUM_BIASES = 5, 6, 7


class Row(NamedTuple):
    """The V scores of one row, logits[start:], and V counts that are 0 between uses, counts[counts_start:]."""

    logits: Any
    start: int
    counts: Any
    counts_start: int
    size: int


class History(NamedTuple):
    """A row's tokens: token_ids[begin:end]."""

    token_ids: Any
    begin: int
    end: int


def pack_processors(processors, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the settings, token ids and bounds that `process_rows` reads; rows (P,): of the logits, below 0 for none.

    settings: int32, (P, NUM_FIELDS) and then biases. The tokens are a separate array, all rows end to end.
    """
    p = processors
    header = np.empty((len(rows), NUM_FIELDS), np.int32)
    header[:, ROW], header[:, NUM_PROMPT_TOKENS] = rows, p.num_prompt_tokens
    for field, values in {
        REPETITION_PENALTY: p.repetition_penalty,
        FREQUENCY_PENALTY: p.frequency_penalty,
        PRESENCE_PENALTY: p.presence_penalty,
    }.items():
        header[:, field] = np.ascontiguousarray(values, np.float32).view(np.int32)
    header[:, BIAS_IDS_AT] = header.size + p.bias_ids.bounds[:-1]
    header[:, BIASES_AT] = header.size + p.bias_ids.values.size + p.biases.bounds[:-1]
    header[:, NUM_BIASES] = np.diff(p.bias_ids.bounds)
    biases = np.ascontiguousarray(p.biases.values, np.float32).view(np.int32)
    settings = np.concatenate([header.ravel(), p.bias_ids.values.astype(np.int32, copy=False), biases])
    bounds = np.stack((p.token_ids.bounds[:-1], p.token_ids.bounds[1:]), 1).astype(np.int32)  # (P, 2)
    return settings, p.token_ids.values.astype(np.int32, copy=False), bounds.ravel()


@kernel
def process_rows(logits, vocab_size, settings, history, history_bounds, counts):
    """Change rows of the logits in place.

    Grid: P. A block counts a row's tokens in V places of device memory, and takes each count back as it uses it: two
    passes over the history. Comparing its tokens with each other would take the square; shared memory is too small.

    Args:
        logits: (any, V) float32
        settings, history, history_bounds: from `pack_processors`
        counts: (P, V) int32, 0 before and after
    """
    p = int32(cuda.blockIdx.x)
    first = p * NUM_FIELDS
    if settings[first + ROW] < 0:
        return
    size = int32(vocab_size)
    row = Row(logits, int64(settings[first + ROW]) * int64(size), counts, int64(p) * int64(size), size)
    all_tokens = History(history, history_bounds[2 * p], history_bounds[2 * p + 1])
    new_begin = int32(all_tokens.begin + settings[first + NUM_PROMPT_TOKENS])
    frequency, presence = _float_in(settings, first + FREQUENCY_PENALTY), _float_in(settings, first + PRESENCE_PENALTY)
    _add_bias(row, settings, first)
    _penalize_repetition(row, all_tokens, _float_in(settings, first + REPETITION_PENALTY))
    _penalize_presence(row, History(history, new_begin, all_tokens.end), frequency, presence)


@device_function
def _float_in(settings, index):
    return bits_to_float32(uint32(settings[index]))


@device_function
def _add_bias(row, settings, first):
    ids_at, biases_at = settings[first + BIAS_IDS_AT], settings[first + BIASES_AT]
    for i in range(int32(cuda.threadIdx.x), settings[first + NUM_BIASES], cuda.blockDim.x):
        row.logits[row.start + settings[ids_at + i]] += _float_in(settings, biases_at + i)
    cuda.syncthreads()


@device_function
def _penalize_repetition(row, history, penalty):
    if penalty == float32(1):
        return
    _count(row, history)
    for i in range(int32(history.begin + cuda.threadIdx.x), history.end, cuda.blockDim.x):
        token_id = history.token_ids[i]
        if _take_count(row, token_id) > 0:
            score = row.logits[row.start + token_id]
            row.logits[row.start + token_id] = score * penalty if score < float32(0) else score / penalty
    cuda.syncthreads()


@device_function
def _penalize_presence(row, history, frequency, presence):
    if frequency == float32(0) and presence == float32(0):
        return
    _count(row, history)
    for i in range(int32(history.begin + cuda.threadIdx.x), history.end, cuda.blockDim.x):
        token_id = history.token_ids[i]
        count = _take_count(row, token_id)
        if count > 0:
            score = row.logits[row.start + token_id] - rounded_product(frequency, float32(count))
            row.logits[row.start + token_id] = score - presence
    cuda.syncthreads()


@device_function
def _count(row, history):
    for i in range(int32(history.begin + cuda.threadIdx.x), history.end, cuda.blockDim.x):
        cuda.atomic.add(row.counts, row.counts_start + history.token_ids[i], int32(1))
    cuda.syncthreads()


@device_function
def _take_count(row, token_id):
    """The token's count, which only one thread gets: it is 0 from then on."""
    return cuda.atomic.exch(row.counts, row.counts_start + token_id, int32(0))
