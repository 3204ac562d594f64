"""The softmax of attention over chunks: within a chunk, and the merging of chunks in ascending order.

Online softmax: Milakov and Gimelshein (2018). Each product that a sum takes is said as `fma`, and no other sum takes
a bare product: no compiler can fuse them in one kernel and leave them apart in the next.
"""

import math

from tinygpt.kernels.cuda.layers.attention_products import CHUNK, Products
from tinygpt.kernels.cuda.runtime.jit import device_function
from tinygpt.kernels.cuda.runtime.warp import ALL_LANES

from numba import cuda, float32, int32, uint32  # isort: skip


def chunk_weights(products: Products):
    """The device function that weighs a chunk's keys for a warp's queries, from the cache to packed weights.

    weigh_keys(highest, total, packed, words, newest, k_cache, start, scale, lane): the weights are exp(score -
    highest) of the keys up to `newest` (rows,) of the chunk, and 0 of the others. highest and total (rows,): the
    largest score and the sum of the weights; -inf and 0, weights included, where newest is negative.
    """
    multiply_keys, pack_weights = products.multiply_keys, products.pack_weights
    ROWS, ROW_LANES = products.rows, products.row_lanes
    KEYS, STEPS = CHUNK // ROW_LANES, ROW_LANES.bit_length() - 1
    SCORES = ROWS * KEYS

    @device_function
    def weigh_keys(highest, total, packed, words, newest, k_cache, start, scale, lane):
        scores = cuda.local.array(SCORES, float32)
        multiply_keys(scores, words, k_cache, start, lane)
        for r in range(ROWS):
            last, top = int32(newest[r] - 2 * (lane & ROW_LANES - 1)), float32(-math.inf)
            for i in range(KEYS):
                score = cuda.fma(scores[r * KEYS + i], scale, float32(0))
                if 2 * ROW_LANES * (i // 2) + i % 2 > last:
                    score = float32(-math.inf)
                scores[r * KEYS + i] = score
                top = max(top, score)
            for step in range(STEPS):
                top = max(top, cuda.shfl_xor_sync(uint32(ALL_LANES), top, 1 << step))
            highest[r] = top
            if newest[r] < 0:  # no key, and -inf less -inf is NaN
                top = float32(0)
            whole = float32(0)
            for i in range(KEYS):
                weight = math.exp(scores[r * KEYS + i] - top)
                scores[r * KEYS + i] = weight
                whole += weight
            for step in range(STEPS):
                whole += cuda.shfl_xor_sync(uint32(ALL_LANES), whole, 1 << step)
            total[r] = whole
        pack_weights(packed, scores)

    return weigh_keys


@device_function
def merge(highest, total, chunk_highest, chunk_total):
    """The softmax of what came before and of a chunk. One without a key, -inf and 0, changes nothing.

    Returns the new highest and total, and the factors that `blend` takes for the values.
    """
    top = max(highest, chunk_highest)
    kept, added = math.exp(highest - top), math.exp(chunk_highest - top)
    return top, blend(total, kept, chunk_total, added), kept, added


@device_function
def blend(before, kept, chunk, added):
    return cuda.fma(before, kept, chunk * added)
