"""inputs @ weights.T for one panel of weights: the inner loop of every linear layer.

A warp multiplies up to 16 tokens by a panel's 8 features over a segment of K, so that 8 warps share a panel. Decoding
reads each weight once, and its bytes over the memory's bandwidth are the limit. So loads of weights are 16 bytes a
lane, all of a warp's contiguous, and the next steps' are under way while one is multiplied: up to 4 KB of each of 8
warps. 4.3 TB/s over 132 multiprocessors with 700 ns of latency ask for 23 KB in flight on each of them; a block has 12
KB in all where K is 768, so that two or three must be there at once, as they are.

Each sum has one order (layout.SEGMENTS), whatever the number of tokens: a token's bits do not depend on its batch.
"""

import functools

from tinygpt.kernels.cuda.packing.layout import PANEL, SEGMENTS, STEP, STEP_SIZE
from tinygpt.kernels.cuda.runtime.jit import device_function
from tinygpt.kernels.cuda.runtime.ptx import (
    bits_to_float32,
    int8_to_bfloat16,
    load_global,
    load_shared,
    load_weights,
    mma_bfloat16,
)
from tinygpt.kernels.cuda.runtime.warp import ALL_LANES

from numba import cuda, float32, int32, int64, uint32  # isort: skip

TILE_TOKENS = 16  # of a tile: the rows of one mma
TILE_SIZE = TILE_TOKENS * PANEL
GROUP_STEPS = 2  # steps whose weights are loaded together
SHARED_PAD = 32  # bfloat16 between two rows in shared memory, so that 8 rows lie in different banks
WORDS = {"float32": 0, "bfloat16": 8, "int8": 4}  # uint32 of a lane in a step; float32 loads as it goes


@functools.cache
def product_function(dtype: str, tiles: int, in_shared: bool = False):
    """product(partials, words, inputs, first, count, weights, base, num_steps): some tiles of tokens times a panel.

    partials: shared float32 (tiles, SEGMENTS, TILE_TOKENS, PANEL), of which each warp of a block writes one segment.
    words: registers, local uint32 (GROUP_STEPS * WORDS[dtype],), in which the warp's first weights are already.
    inputs (n, num_steps * STEP) of the family's type, of which rows `first` to `count` - 1 are multiplied, and the
    rest of the tiles are zeros; in_shared: an address of shared memory, with SHARED_PAD numbers after each row.
    weights[base]: the first number of the panel.
    """
    return _product_float32(tiles) if dtype == "float32" else _product_bfloat16(dtype, tiles, in_shared)


@device_function
def segment_start(segment, num_steps):
    return segment * num_steps // int32(SEGMENTS)


@device_function
def total(partials, tile, index):
    """The sum of all segments of one number, index = token * PANEL + feature, of a tile."""
    start = tile * int32(SEGMENTS * TILE_SIZE) + index
    value = partials[start]
    for segment in range(int32(1), int32(SEGMENTS)):
        value += partials[start + segment * int32(TILE_SIZE)]
    return value


@functools.cache
def load_group_function(dtype: str):
    """load_group(words, weights, base, num_steps): a warp's first weights, of GROUP_STEPS steps if it has as many."""
    load_ahead = _load_ahead_function(dtype)

    def load_group(words, weights, base, num_steps):
        lane, segment = int32(cuda.threadIdx.x) % int32(32), int32(cuda.threadIdx.x) // int32(32)
        step, stop = segment_start(segment, num_steps), segment_start(segment + int32(1), num_steps)
        load_ahead(words, weights, base, step, stop, lane)

    return device_function(load_group)


@functools.cache
def _load_ahead_function(dtype: str):
    loads = WORDS[dtype] // 4

    def load_ahead(words, weights, base, step, stop, lane):
        for ahead in range(GROUP_STEPS):
            if step + ahead < stop:
                start = base + int64(step + ahead) * int32(STEP_SIZE)
                for part in range(loads):
                    # 16 bytes: 8 bfloat16 or 16 int8
                    loaded = load_weights(weights, start + (part * 32 + lane) * int32(16 // loads))
                    for i in range(4):
                        words[(ahead * loads + part) * 4 + i] = loaded[i]

    return device_function(load_ahead)


def _product_bfloat16(dtype: str, tiles: int, in_shared: bool):
    load_ahead, group_words = _load_ahead_function(dtype), GROUP_STEPS * WORDS[dtype]
    is_int8, sums_size = dtype == "int8", tiles * 4

    @device_function
    def load_input(inputs, token, count, k, num_steps):
        """8 numbers of a token from k on, or zeros."""
        if token >= count:
            return uint32(0), uint32(0), uint32(0), uint32(0)
        if in_shared:
            row_size = num_steps * int32(STEP) + int32(SHARED_PAD)
            return load_shared(inputs + uint32((token * row_size + k) * int32(2)))
        return load_global(inputs, token * num_steps * int32(STEP) + k)

    @device_function
    def weights_of(words, ahead, half):
        """The 8 weights of a lane in half a step, as bfloat16."""
        if is_int8:
            first = int8_to_bfloat16(words[ahead * 4 + half * 2])
            second = int8_to_bfloat16(words[ahead * 4 + half * 2 + 1])
            return first[0], first[1], second[0], second[1]
        start = (ahead * 2 + half) * 4
        return words[start], words[start + 1], words[start + 2], words[start + 3]

    def product(partials, words, inputs, first, count, weights, base, num_steps):
        lane, segment = int32(cuda.threadIdx.x) % int32(32), int32(cuda.threadIdx.x) // int32(32)
        g, q = lane // int32(4), lane % int32(4)
        step, stop = segment_start(segment, num_steps), segment_start(segment + int32(1), num_steps)
        following = cuda.local.array(group_words, uint32)
        sums = cuda.local.array(sums_size, float32)
        for i in range(sums_size):
            sums[i] = float32(0)
        while step < stop:
            load_ahead(following, weights, base, step + int32(GROUP_STEPS), stop, lane)
            for ahead in range(GROUP_STEPS):
                if step + ahead < stop:
                    for half in range(2):
                        w = weights_of(words, ahead, half)
                        k = (step + ahead) * int32(STEP) + half * int32(32) + q * int32(8)
                        for tile in range(tiles):
                            token = first + tile * int32(TILE_TOKENS) + g
                            a = load_input(inputs, token, count, k, num_steps)
                            b = load_input(inputs, token + int32(8), count, k, num_steps)
                            c = (sums[tile * 4], sums[tile * 4 + 1], sums[tile * 4 + 2], sums[tile * 4 + 3])
                            c = mma_bfloat16((a[0], b[0], a[1], b[1]), (w[0], w[1]), c)
                            c = mma_bfloat16((a[2], b[2], a[3], b[3]), (w[2], w[3]), c)
                            for i in range(4):
                                sums[tile * 4 + i] = c[i]
            for i in range(group_words):
                words[i] = following[i]
            step += int32(GROUP_STEPS)
        for tile in range(tiles):
            start = (tile * int32(SEGMENTS) + segment) * int32(TILE_SIZE) + g * int32(PANEL) + q * int32(2)
            partials[start], partials[start + 1] = sums[tile * 4], sums[tile * 4 + 1]
            start += int32(8 * PANEL)
            partials[start], partials[start + 1] = sums[tile * 4 + 2], sums[tile * 4 + 3]

    return device_function(product)


def _product_float32(tiles: int):
    tokens = tiles * TILE_TOKENS

    def product(partials, words, inputs, first, count, weights, base, num_steps):
        lane, segment = int32(cuda.threadIdx.x) % int32(32), int32(cuda.threadIdx.x) // int32(32)
        g, q = lane // int32(4), lane % int32(4)
        sums = cuda.local.array(tokens, float32)
        for t in range(tokens):
            sums[t] = float32(0)
        quarter = segment_start(segment, num_steps) * int32(4)  # 16 of K, for which a lane has 4 weights
        while quarter < segment_start(segment + int32(1), num_steps) * int32(4):
            w = load_weights(weights, base + int64(quarter) * int32(STEP_SIZE // 4) + lane * int32(4))
            k = quarter * int32(16) + q * int32(4)
            for t in range(tokens):
                if first + t < count:
                    x = load_global(inputs, (first + t) * num_steps * int32(STEP) + k)
                    for i in range(4):
                        sums[t] = cuda.fma(bits_to_float32(w[i]), bits_to_float32(x[i]), sums[t])
            quarter += int32(1)
        for t in range(tokens):
            if first + t < count:
                value = sums[t]
                value += cuda.shfl_xor_sync(uint32(ALL_LANES), value, 1)
                value += cuda.shfl_xor_sync(uint32(ALL_LANES), value, 2)
                if q == t % 4:
                    start = (t // TILE_TOKENS * int32(SEGMENTS) + segment) * int32(TILE_SIZE)
                    partials[start + t % TILE_TOKENS * int32(PANEL) + g] = value

    return device_function(product)
