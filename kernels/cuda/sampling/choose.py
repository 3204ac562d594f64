"""The kernels that choose a token for each row: the greatest logit by many blocks, or a draw by one block a row.

The reference's sampling.py and warpers.py say what is computed. Compiled are temperature, top-k, top-p and min-p.
"""

import math

from tinygpt.kernels.cuda.runtime.block import ALL_LANES, MAX_WARPS, WARP, block_greatest, block_sum, warp_greatest
from tinygpt.kernels.cuda.runtime.jit import device_function, kernel
from tinygpt.kernels.cuda.runtime.ptx import arrive, let_next_kernel_begin, wait_for_kernel_before
from tinygpt.kernels.cuda.sampling.search import (
    BUCKETS,
    COUNT,
    PROBABILITY,
    Measure,
    Row,
    Shared,
    find_border,
    find_drawn,
    find_tie,
    greatest_key,
    least_mass_above,
    mass_in,
    probability_of,
    random_fraction,
    token_of,
    weight_of,
)

from numba import cuda, float32, float64, int32, int64, uint32  # isort: skip

# With 128 registers each they take a multiprocessor's 65536, and there are more multiprocessors than rows to draw for.
# Fewer registers would hold back the exponentials in float64, which take most of the time.
DRAW_THREADS = 512
# A row of settings, in the order of the fields of `Warpers`.
NUM_SETTINGS = 8
TEMPERATURE, TOP_K, TOP_P = 0, 1, 2
MIN_P = 4


@kernel
def take_greatest(logits, vocab_size, rows, keys, arrivals, token_ids):
    """The token with the greatest logit, ties to the lowest id; -1 for NaN, +inf or nothing but -inf in the row.

    Grid: slices of a row, R. The last block of a row that arrives reads what the others have found; whichever it is,
    the token is the same.

    Args:
        logits: (any, V) float32
        rows: (R,) int32, which rows of the logits; below 0 is none, and leaves its token as it is
        keys: (R, slices) int64, of any content
        arrivals: (R,) uint32, 0 before and after
        token_ids: (R,) int32
    """
    let_next_kernel_begin()
    piece, pieces, r = int32(cuda.blockIdx.x), int32(cuda.gridDim.x), int32(cuda.blockIdx.y)
    thread = int32(cuda.threadIdx.x)
    if rows[r] < 0:
        return
    wait_for_kernel_before()
    base = int64(rows[r]) * int64(vocab_size)
    length = int32((vocab_size + pieces - 1) // pieces)
    key = int64(-1)
    for i in range(int32(piece * length + thread), min(vocab_size, int32((piece + 1) * length)), cuda.blockDim.x):
        key = max(key, greatest_key(logits[base + i], i))
    key = block_greatest(key, cuda.shared.array(MAX_WARPS, int64))
    if thread >= WARP:
        return
    is_last = int32(0)
    if thread == 0:
        keys[r * pieces + piece] = key
        is_last = int32(arrive(arrivals, r) == uint32(pieces - 1))
    is_last = cuda.shfl_sync(uint32(ALL_LANES), is_last, 0)
    cuda.syncwarp()  # what lane 0 has acquired, all lanes may read
    if is_last == 0:
        return
    for i in range(thread, pieces, WARP):
        key = max(key, keys[r * pieces + i])
    key = warp_greatest(key)
    if thread == 0:
        token_ids[r] = token_of(key)
        arrivals[r] = uint32(0)


@kernel
def draw_tokens(logits, vocab_size, rows, warpers, seeds, sample_indices, positions, scores, ids, token_ids):
    """Draw a token for each row whose temperature is above 0, where `take_greatest` has put the greatest before.

    Grid: R, of DRAW_THREADS threads, or fewer, but 64 or more: their number decides on the last bit of a sum at most.
    What is drawn depends on the row alone.

    Args:
        logits: (any, V) float32
        rows: (R,) int32, which rows of the logits; below 0 is none, and leaves its token as it is
        warpers: (R, 8) float64, the fields of Warpers
        seeds, sample_indices: (R,) uint64
        positions: (R,) int32, the position in the sequence that the drawn token will have
        scores, ids: (R, V) float32 and int32, of any content
        token_ids: (R,) int32, -1 where `take_greatest` refused the row; -1 too where the division by the temperature
            leaves no finite score
    """
    let_next_kernel_begin()
    wait_for_kernel_before()
    r, thread = int32(cuda.blockIdx.x), int32(cuda.threadIdx.x)
    temperature = float32(warpers[NUM_SETTINGS * r + TEMPERATURE])
    greatest_id = token_ids[r]
    if rows[r] < 0 or warpers[NUM_SETTINGS * r + TEMPERATURE] == 0 or greatest_id < 0:
        return
    cuda.syncthreads()  # all have read the token that is about to change
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
    filter_row(row, greatest, warpers, NUM_SETTINGS * r)
    token_id = find_drawn(row, greatest, random_fraction(seeds[r], sample_indices[r], positions[r]))
    if thread == 0:
        token_ids[r] = token_id


@device_function
def filter_row(row, greatest, warpers, first):
    """Set the scores that top-k, top-p and min-p, warpers[first:], remove to -inf.

    A loop over the filters: each call of a device function would be one more copy of its code.
    """
    for field in range(TOP_K, MIN_P + 1):
        setting = warpers[first + field]
        if not _is_on(field, setting, row.size):
            continue
        if field == TOP_K:
            measure = Measure(int32(COUNT), greatest, float64(0))
        else:
            measure = Measure(int32(PROBABILITY), greatest, 1 / _total_weight(row, greatest))
        if field == MIN_P:
            _cut_off(row, measure, float32(float32(setting) * float32(measure.inverse_total)))
        else:
            _keep_to_border(row, measure, field, setting)


@device_function
def _is_on(field, setting, size):
    if field == TOP_K:
        return 0 < setting < size
    return setting < 1 if field == TOP_P else field == MIN_P and setting > 0


@device_function
def _keep_to_border(row, measure, field, setting):
    """Keep the most probable tokens up to the setting, and those tied with the k-th."""
    goal = int64(setting) if field == TOP_K else int64(1) - least_mass_above(float32(1 - setting))
    border, goal, above, at = find_border(row, measure, goal)
    if border == float32(-math.inf):
        return
    first = int32(0)
    if field == TOP_P:  # of the tokens tied at the border, the highest ids stay
        mass = mass_in(measure, border)
        wanted, ties = 1 + (goal - above - 1) // mass, at // mass
        if wanted < ties:
            first = find_tie(row, border, ties - wanted)
    cuda.syncthreads()
    for i in range(int32(cuda.threadIdx.x), row.size, cuda.blockDim.x):
        score = row.scores[row.start + i]
        if score < border or (score == border and i < first):
            row.scores[row.start + i] = float32(-math.inf)
    cuda.syncthreads()


@device_function
def _cut_off(row, measure, threshold):
    """Keep tokens as probable as the threshold, and the most probable ones."""
    for i in range(int32(cuda.threadIdx.x), row.size, cuda.blockDim.x):
        score = row.scores[row.start + i]
        if float32(-math.inf) < score < measure.greatest_score and probability_of(measure, score) < threshold:
            row.scores[row.start + i] = float32(-math.inf)
    cuda.syncthreads()


@device_function
def _total_weight(row, greatest):
    total = float64(0)
    for i in range(int32(cuda.threadIdx.x), row.size, cuda.blockDim.x):
        score = row.scores[row.start + i]
        if score > float32(-math.inf):
            total += weight_of(score, greatest)
    return block_sum(total, row.shared.sums)
