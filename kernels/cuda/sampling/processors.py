"""What changes the scores before a token is chosen; the reference's processors.py says how and in which order.

Nearly all of it touches only the tokens that are named or have come before, so a row costs what its history does.
"""

import math
from typing import Any, NamedTuple

from tinygpt.kernels.cuda.runtime.jit import device_function, kernel
from tinygpt.kernels.cuda.runtime.ptx import bits_to_float32, rounded_product
from tinygpt.kernels.cuda.sampling import controls as fields

from numba import cuda, float32, int32, int64, uint32  # isort: skip


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


@kernel
def process_rows(logits, vocab_size, controls, history, history_bounds, counts):
    """Change rows of the logits in place, as their controls say.

    Grid: P. A block counts a row's tokens in V places of device memory, and takes each count back as it uses it: two
    passes over the history, where to compare its tokens with each other would take its square, and shared memory
    would not hold the counts of a long one.

    Args:
        logits: (any, V) float32
        controls, history, history_bounds: the fields of PackedControls; a row below 0 is none
        counts: (P, V) int32, 0 before and after
    """
    p = int32(cuda.blockIdx.x)
    first = p * fields.NUM_FIELDS
    if controls[first + fields.ROW] < 0:
        return
    size = int32(vocab_size)
    row = Row(logits, int64(controls[first + fields.ROW]) * int64(size), counts, int64(p) * int64(size), size)
    all_tokens = History(history, history_bounds[2 * p], history_bounds[2 * p + 1])
    new_begin = int32(all_tokens.begin + controls[first + fields.NUM_PROMPT_TOKENS])
    frequency = _float_in(controls, first + fields.FREQUENCY_PENALTY)
    presence = _float_in(controls, first + fields.PRESENCE_PENALTY)
    _add_bias(row, controls, first)
    _penalise_repetition(row, all_tokens, _float_in(controls, first + fields.REPETITION_PENALTY))
    _penalise_presence(row, History(history, new_begin, all_tokens.end), frequency, presence)
    _forbid_ngrams(row, all_tokens, controls[first + fields.NO_REPEAT_NGRAM_SIZE])
    _forbid_words(row, all_tokens, controls, first)
    cuda.syncthreads()
    _allow(row, controls, first)
    forbidden_at = controls[first + fields.FORBIDDEN_IDS_AT]
    for i in range(int32(cuda.threadIdx.x), controls[first + fields.NUM_FORBIDDEN_IDS], cuda.blockDim.x):
        _forbid(row, controls[forbidden_at + i])


@device_function
def _float_in(controls, index):
    return bits_to_float32(uint32(controls[index]))


@device_function
def _forbid(row, token_id):
    row.logits[row.start + token_id] = float32(-math.inf)


@device_function
def _add_bias(row, controls, first):
    ids_at, biases_at = controls[first + fields.BIAS_IDS_AT], controls[first + fields.BIASES_AT]
    for i in range(int32(cuda.threadIdx.x), controls[first + fields.NUM_BIASES], cuda.blockDim.x):
        row.logits[row.start + controls[ids_at + i]] += _float_in(controls, biases_at + i)
    cuda.syncthreads()


@device_function
def _penalise_repetition(row, history, penalty):
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
def _penalise_presence(row, history, frequency, presence):
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


@device_function
def _forbid_ngrams(row, history, size):
    if size == 0:
        return
    ids, begun = history.token_ids, int32(size - 1)
    for start in range(int32(history.begin + cuda.threadIdx.x), int32(history.end - begun), cuda.blockDim.x):
        if _is_same(ids, start, ids, int32(history.end - begun), begun):
            _forbid(row, ids[start + begun])


@device_function
def _forbid_words(row, history, controls, first):
    bounds_at = controls[first + fields.WORD_BOUNDS_AT]
    for word in range(int32(cuda.threadIdx.x), controls[first + fields.NUM_WORDS], cuda.blockDim.x):
        word_begin, last = controls[bounds_at + word], int32(controls[bounds_at + word + 1] - 1)
        begun = int32(last - word_begin)
        start = int32(history.end - begun)
        if start >= history.begin and _is_same(history.token_ids, start, controls, word_begin, begun):
            _forbid(row, controls[last])


@device_function
def _is_same(values, start, others, other_start, count):
    """Backwards, since most differ in the last token."""
    left = int32(count)
    while left > 0 and values[start + left - 1] == others[other_start + left - 1]:
        left = int32(left - 1)
    return left == 0


@device_function
def _allow(row, controls, first):
    """Forbid all others; where no ids are given, none."""
    ids_at, num_ids = controls[first + fields.ALLOWED_IDS_AT], controls[first + fields.NUM_ALLOWED_IDS]
    if num_ids == 0:
        return
    thread, threads = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
    for i in range(thread, num_ids, threads):
        row.counts[row.counts_start + controls[ids_at + i]] = 1
    cuda.syncthreads()
    for i in range(thread, row.size, threads):
        if row.counts[row.counts_start + i] == 0:
            _forbid(row, i)
        row.counts[row.counts_start + i] = 0
    cuda.syncthreads()
