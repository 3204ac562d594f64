"""The kernels that choose tokens: the greatest logit, and a draw after temperature, top-k, top-p and min-p.

A filter sets the scores that it removes to -inf.
"""

import functools
import math

from numba import cuda, float32, float64, int32, int64, uint32, uint64

from ..runtime.jit import device_function, kernel
from ..runtime.ptx import (
    MAX_WARPS,
    WARP,
    block_greatest,
    block_sum,
    is_last_warp,
    let_next_kernel_begin,
    wait_for_kernel_before,
    warp_greatest,
)
from .search import (
    ALL_ONES,
    BUCKETS,
    Row,
    Shared,
    find_border,
    find_drawn,
    find_tie,
    key_of,
    least_mass_above,
    mass_of,
    multiply_high,
    probability_of,
    weight_of,
)

KEY_OF_MINUS_INFINITY = 0x007FFFFF
KEY_OF_REFUSED = ALL_ONES
ID_BITS = 31
ALL_IDS = (1 << ID_BITS) - 1

# With 128 registers a thread: fewer would slow down the float64 exponentials, which take most of the time.
DRAW_THREADS = 512
NUM_SETTINGS = 4
TEMPERATURE, TOP_K, TOP_P, MIN_P = range(NUM_SETTINGS)

# Philox4x64-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
MULTIPLIER_0 = 0xD2E7470EE14C6C93
MULTIPLIER_1 = 0xCA5A826395121157
INCREMENT_0 = 0x9E3779B97F4A7C15
INCREMENT_1 = 0xBB67AE8584CAA73B
ROUNDS = 10
UNUSED_BITS = 11  # a float64 in [0, 1) has 53


@kernel
def take_greatest(logits, vocab_size, rows, keys, arrivals, token_ids):
    """Write each row's token of the greatest logit, ties to the lowest id; -1 if it is NaN or infinite.

    Grid: (slices of a row, R). The last block of a row to arrive merges the slices. Arrays: SamplingBuffers.
    """
    let_next_kernel_begin()
    piece = int32(cuda.blockIdx.x)
    pieces = int32(cuda.gridDim.x)
    r = int32(cuda.blockIdx.y)
    thread = int32(cuda.threadIdx.x)
    if rows[r] < 0:
        return
    wait_for_kernel_before()
    base = int64(rows[r]) * int64(vocab_size)
    length = int32((vocab_size + pieces - 1) // pieces)
    key = int64(-1)
    for i in range(
        int32(piece * length + thread), min(vocab_size, int32((piece + 1) * length)), cuda.blockDim.x
    ):
        key = max(key, _greatest_key(logits[base + i], i))
    key = block_greatest(key, cuda.shared.array(MAX_WARPS, int64))
    if thread >= WARP:
        return
    if thread == 0:
        keys[r * pieces + piece] = key
    if not is_last_warp(arrivals, r, pieces):
        return
    for i in range(thread, pieces, WARP):
        key = max(key, keys[r * pieces + i])
    key = warp_greatest(key)
    if thread == 0:
        token_ids[r] = _token_of(key)


@device_function
def _greatest_key(value, token_id):
    """Return an int64 that orders by value, then from high ids to low; greatest for NaN and +inf."""
    key = key_of(value) if value < float32(math.inf) else uint32(KEY_OF_REFUSED)
    return int64(key) << int64(ID_BITS) | int64(ALL_IDS - token_id)


@device_function
def _token_of(key):
    value_key = key >> int64(ID_BITS)
    if value_key <= int64(KEY_OF_MINUS_INFINITY) or value_key == int64(KEY_OF_REFUSED):
        return int64(-1)
    return int64(ALL_IDS) - (key & int64(ALL_IDS))


@functools.partial(kernel, threads=DRAW_THREADS)
def draw_tokens(logits, vocab_size, rows, settings, seeds, sample_indices, positions, scores, ids, token_ids):
    """Draw a token for each row with a temperature above 0, after `take_greatest`. Grid: R. Arrays: SamplingBuffers.

    token_ids: (R,), the greatest logit's before; -1 after if no score is finite, divided by the temperature
    """
    let_next_kernel_begin()
    wait_for_kernel_before()
    r = int32(cuda.blockIdx.x)
    thread = int32(cuda.threadIdx.x)
    temperature = float32(settings[NUM_SETTINGS * r + TEMPERATURE])
    greatest_id = token_ids[r]
    if rows[r] < 0 or settings[NUM_SETTINGS * r + TEMPERATURE] == 0 or greatest_id < 0:
        return
    cuda.syncthreads()  # every thread has read the token, which changes below
    base = int64(rows[r]) * int64(vocab_size)
    greatest = logits[base + greatest_id] / temperature
    if not float32(-math.inf) < greatest < float32(math.inf):
        if thread == 0:
            token_ids[r] = -1
        return
    shared = Shared(
        cuda.shared.array(MAX_WARPS, float64),
        cuda.shared.array(MAX_WARPS, int64),
        cuda.shared.array(BUCKETS, uint32),
        cuda.shared.array(BUCKETS, uint32),
        cuda.shared.array(4, int64),
        cuda.shared.array(1, int32),
    )
    row = Row(scores, ids, int64(r) * int64(vocab_size), int32(vocab_size), shared)
    for i in range(thread, row.size, cuda.blockDim.x):
        scores[row.start + i] = logits[base + i] / temperature
    cuda.syncthreads()
    _filter_row(row, greatest, settings, NUM_SETTINGS * r)
    token_id = find_drawn(row, greatest, random_fraction(seeds[r], sample_indices[r], positions[r]))
    if thread == 0:
        token_ids[r] = token_id


@device_function
def _filter_row(row, greatest, settings, first):
    """Apply the filters of settings[first:], in a loop, as each call is inlined."""
    for field in range(TOP_K, NUM_SETTINGS):
        setting = settings[first + field]
        if not _is_on(field, setting, row.size):
            continue
        inverse_total = float64(0) if field == TOP_K else 1 / _total_weight(row, greatest)
        if field == MIN_P:
            _cut_off(row, greatest, inverse_total, float32(float32(setting) * float32(inverse_total)))
            continue
        goal = int64(setting) if field == TOP_K else int64(1) - least_mass_above(float32(1 - setting))
        border, goal, above, at = find_border(row, greatest, inverse_total, goal)
        if border == float32(-math.inf):
            continue
        first_tie = int32(0)  # tokens tied with the k-th all stay
        if field == TOP_P:  # of tokens tied at p, the highest ids stay
            mass = mass_of(border, greatest, inverse_total)
            wanted = 1 + (goal - above - 1) // mass
            ties = at // mass
            if wanted < ties:
                first_tie = find_tie(row, border, ties - wanted)
        _keep_from(row, border, first_tie)


@device_function
def _is_on(field, setting, size):
    if field == TOP_K:
        return 0 < setting < size
    return setting < 1 if field == TOP_P else setting > 0


@device_function
def _total_weight(row, greatest):
    total = float64(0)
    for i in range(int32(cuda.threadIdx.x), row.size, cuda.blockDim.x):
        score = row.scores[row.start + i]
        if score > float32(-math.inf):
            total += weight_of(score, greatest)
    return block_sum(total, row.shared.sums)


@device_function
def _keep_from(row, border, first_tie):
    cuda.syncthreads()
    for i in range(int32(cuda.threadIdx.x), row.size, cuda.blockDim.x):
        score = row.scores[row.start + i]
        if score < border or (score == border and i < first_tie):
            row.scores[row.start + i] = float32(-math.inf)
    cuda.syncthreads()


@device_function
def _cut_off(row, greatest, inverse_total, threshold):
    for i in range(int32(cuda.threadIdx.x), row.size, cuda.blockDim.x):
        score = row.scores[row.start + i]
        if (
            float32(-math.inf) < score < greatest
            and probability_of(score, greatest, inverse_total) < threshold
        ):
            row.scores[row.start + i] = float32(-math.inf)
    cuda.syncthreads()


@device_function
def random_fraction(seed, sample_index, position):
    """Return the reference's `uniform` as a uint64, in units of 2**-64."""
    a = uint64(position) + uint64(1)
    b = uint64(0)
    c = uint64(0)
    d = uint64(0)
    key_0, key_1 = uint64(seed), uint64(sample_index)
    for _ in range(ROUNDS):
        a, b, c, d = (
            multiply_high(uint64(MULTIPLIER_1), c) ^ b ^ key_0,
            uint64(MULTIPLIER_1) * c,
            multiply_high(uint64(MULTIPLIER_0), a) ^ d ^ key_1,
            uint64(MULTIPLIER_0) * a,
        )
        key_0 = key_0 + uint64(INCREMENT_0)
        key_1 = key_1 + uint64(INCREMENT_1)
    return a >> uint64(UNUSED_BITS) << uint64(UNUSED_BITS)
