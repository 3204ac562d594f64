"""The kernel of logit bias and penalties, which touches named tokens and the history's alone."""

from typing import Any, NamedTuple

import numpy as np

from tinygpt.kernels.cuda.runtime.jit import device_function, kernel
from tinygpt.kernels.cuda.runtime.ptx import rounded_product
from tinygpt.kernels.cuda.step import Parts

from numba import cuda, float32, int32, int64  # isort: skip

REPETITION, FREQUENCY, PRESENCE = 0, 1, 2
NUM_PENALTIES = 3


class ProcessorArrays(NamedTuple):
    """Settings of P rows on the device, by one copy."""

    rows: Any  # (P,) int32, indices of rows of logits; a negative one stays as it is
    num_prompt_tokens: Any  # (P,) int32
    penalties: Any  # (P, NUM_PENALTIES) float32
    token_bounds: Any  # (P + 1,) int32, of the rows' parts of token_ids
    token_ids: Any  # int32, prompts and outputs
    bias_bounds: Any  # (P + 1,) int32, of the rows' parts of bias_ids
    bias_ids: Any  # int32
    biases: Any  # float32


class Row(NamedTuple):
    """V scores of one row, logits[start:], and V counts from counts_start, 0 between uses."""

    logits: Any
    start: int
    counts: Any
    counts_start: int


def pack_processors(device: Any, processors: Any, rows: np.ndarray) -> ProcessorArrays:
    p = processors
    values = {
        "rows": rows.astype(np.int32),
        "num_prompt_tokens": p.num_prompt_tokens.astype(np.int32),
        "penalties": np.stack((p.repetition_penalty, p.frequency_penalty, p.presence_penalty), 1).astype(np.float32),
        "token_bounds": p.token_ids.bounds.astype(np.int32),
        "token_ids": p.token_ids.values.astype(np.int32),
        "bias_bounds": p.bias_ids.bounds.astype(np.int32),
        "bias_ids": p.bias_ids.values.astype(np.int32),
        "biases": p.biases.values.astype(np.float32),
    }
    parts = Parts({name: (max(value.size, 1), value.dtype) for name, value in values.items()})
    return ProcessorArrays(**parts.split(device.array(parts.join(values))))


@kernel
def process_rows(logits, vocab_size, processors, counts):
    """Add biases and apply penalties to rows of logits (any, V) float32, in place.

    Grid: P. counts: (P, V) int32, 0 before and after. A block counts a row's tokens and takes each count back as it
    uses
    it: two passes over the history.
    """
    p = int32(cuda.blockIdx.x)
    a = processors
    if a.rows[p] < 0:
        return
    row = Row(logits, int64(a.rows[p]) * int64(vocab_size), counts, int64(p) * int64(vocab_size))
    begin, end = a.token_bounds[p], a.token_bounds[p + 1]
    first = p * NUM_PENALTIES
    for i in range(int32(a.bias_bounds[p] + cuda.threadIdx.x), a.bias_bounds[p + 1], cuda.blockDim.x):
        row.logits[row.start + a.bias_ids[i]] += a.biases[i]
    cuda.syncthreads()
    _penalize_repetition(row, a.token_ids, begin, end, a.penalties[first + REPETITION])
    frequency, presence = a.penalties[first + FREQUENCY], a.penalties[first + PRESENCE]
    _penalize_presence(row, a.token_ids, int32(begin + a.num_prompt_tokens[p]), end, frequency, presence)


@device_function
def _penalize_repetition(row, token_ids, begin, end, penalty):
    if penalty == float32(1):
        return
    _count(row, token_ids, begin, end)
    for i in range(int32(begin + cuda.threadIdx.x), end, cuda.blockDim.x):
        if _take_count(row, token_ids[i]) > 0:
            score = row.logits[row.start + token_ids[i]]
            row.logits[row.start + token_ids[i]] = score * penalty if score < float32(0) else score / penalty
    cuda.syncthreads()


@device_function
def _penalize_presence(row, token_ids, begin, end, frequency, presence):
    if frequency == float32(0) and presence == float32(0):
        return
    _count(row, token_ids, begin, end)
    for i in range(int32(begin + cuda.threadIdx.x), end, cuda.blockDim.x):
        count = _take_count(row, token_ids[i])
        if count > 0:
            score = row.logits[row.start + token_ids[i]] - rounded_product(frequency, float32(count))
            row.logits[row.start + token_ids[i]] = score - presence


@device_function
def _count(row, token_ids, begin, end):
    for i in range(int32(begin + cuda.threadIdx.x), end, cuda.blockDim.x):
        cuda.atomic.add(row.counts, row.counts_start + token_ids[i], int32(1))
    cuda.syncthreads()


@device_function
def _take_count(row, token_id):
    """Return the token's count and set it to 0: one thread alone gets it."""
    return cuda.atomic.exch(row.counts, row.counts_start + token_id, int32(0))
