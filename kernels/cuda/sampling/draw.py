"""Tokens that are drawn, a block for each row; the reference's sampling.py says what is computed."""

import math

from tinygpt.kernels.cuda.runtime.block import MAX_WARPS
from tinygpt.kernels.cuda.runtime.jit import kernel
from tinygpt.kernels.cuda.runtime.ptx import let_next_kernel_begin, wait_for_kernel_before
from tinygpt.kernels.cuda.sampling.philox import random_fraction
from tinygpt.kernels.cuda.sampling.search import BUCKETS, Row, Shared, find_drawn
from tinygpt.kernels.cuda.sampling.warpers import NUM_SETTINGS, TEMPERATURE, filter_row

from numba import cuda, float32, float64, int32, int64, uint32  # isort: skip

# With 128 registers each they take a multiprocessor's 65536, and there are more multiprocessors than rows to draw for.
# Fewer registers would hold back the exponentials in float64, which take most of the time.
DRAW_THREADS = 512


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
    greatest = filter_row(row, greatest, warpers, NUM_SETTINGS * r)
    token_id = find_drawn(row, greatest, random_fraction(seeds[r], sample_indices[r], positions[r]))
    if thread == 0:
        token_ids[r] = token_id
