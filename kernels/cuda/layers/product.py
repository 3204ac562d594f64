"""inputs @ weights.T for one panel of weights: the inner loop of every linear layer.

A warp multiplies up to 16 tokens by a panel's 8 features over a segment of K. Decode reads each weight once and is
limited by memory bandwidth: loads of weights are contiguous, 16 bytes a lane, and the next steps' are in flight during
a product. A multiprocessor of an H200 needs 23 KB in flight; a block has 12 KB if K is 768.

Each sum has one order (packing.SEGMENTS): a token's bits do not depend on its batch.
"""

import functools

from tinygpt.kernels.cuda.packing import OUT_TILE, SEGMENTS, STEP, STEP_SIZE
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

ROW_TILE = 16  # of a tile: the rows of one mma
TILE_SIZE = ROW_TILE * OUT_TILE
GROUP_STEPS = 2  # steps whose weights are loaded together
SHARED_PAD = 32  # bfloat16 between two rows in shared memory, so that 8 rows lie in different banks
WORDS = {"float32": 0, "bfloat16": 8, "int8": 4}  # uint32 of a lane in a step; float32 loads as it goes


@functools.cache
def product_function(dtype: str, tiles: int, in_shared: bool = False, has_few_blocks: bool = False):
    """product(partials, words, inputs, first, count, weights, base, num_steps): some tiles of tokens times a panel.

    partials: shared float32 (tiles, SEGMENTS, ROW_TILE, OUT_TILE); a warp writes one segment. words: local uint32
    (GROUP_STEPS * WORDS[dtype],) with the first weights. inputs (n, num_steps * STEP), of which rows `first` to `count`
    - 1 are multiplied. in_shared: inputs is an address of shared memory, with SHARED_PAD numbers after each row.
    has_few_blocks: a warp loads more inputs at once, into registers that no third block needs.
    """
    if dtype == "float32":
        return _product_float32(tiles)
    return _product_bfloat16(dtype, tiles, in_shared, GROUP_STEPS * 2 if has_few_blocks else 1)


@device_function
def segment_start(segment, num_steps):
    return segment * num_steps // int32(SEGMENTS)


@device_function
def total(partials, tile, index):
    """Return the sum over segments of number index = token * OUT_TILE + feature of a tile."""
    start = tile * int32(SEGMENTS * TILE_SIZE) + index
    value = partials[start]
    for segment in range(int32(1), int32(SEGMENTS)):
        value += partials[start + segment * int32(TILE_SIZE)]
    return value


@functools.cache
def load_group_function(dtype: str):
    """load_group(words, weights, base, num_steps): load a warp's first weights."""
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


def _product_bfloat16(dtype: str, tiles: int, in_shared: bool, at_once: int):
    """at_once: halves of steps of one tile whose inputs a warp loads together."""
    load_ahead, group_words = _load_ahead_function(dtype), GROUP_STEPS * WORDS[dtype]
    is_int8, sums_size, eights = dtype == "int8", tiles * 4, tiles * 2  # of 8 tokens each
    halves = max(at_once // tiles, 1)
    held_words, turns, row_pad = halves * eights * 4, 2 * GROUP_STEPS // halves, SHARED_PAD if in_shared else 0

    @device_function
    def load_input(inputs, at):
        return load_shared(uint32(inputs + uint32(at * int32(2)))) if in_shared else load_global(inputs, at)

    @device_function
    def weights_of(words, ahead, half):
        if is_int8:
            first = int8_to_bfloat16(words[ahead * 4 + half * 2])
            second = int8_to_bfloat16(words[ahead * 4 + half * 2 + 1])
            return first[0], first[1], second[0], second[1]
        start = (ahead * 2 + half) * 4
        return words[start], words[start + 1], words[start + 2], words[start + 3]

    @device_function
    def load_inputs(held, inputs, rows, first, count, step, stop, turn):
        """Load `halves` halves of steps. rows: the start of the lane's token in each eight."""
        for eight in range(eights):
            # Sums of absent tokens are not stored; an eight of absent tokens is not loaded.
            if eight == 0 or (not in_shared and first + eight * int32(8) < count):
                for i in range(halves):
                    half = turn * halves + i
                    k = min(int32(step + half // 2), int32(stop - int32(1))) * int32(STEP) + half % 2 * int32(32)
                    loaded = load_input(inputs, rows[eight] + k)
                    for j in range(4):
                        held[(i * eights + eight) * 4 + j] = loaded[j]

    def product(partials, words, inputs, first, count, weights, base, num_steps):
        lane, segment = int32(cuda.threadIdx.x) % int32(32), int32(cuda.threadIdx.x) // int32(32)
        g, q = lane // int32(4), lane % int32(4)
        step, stop = segment_start(segment, num_steps), segment_start(segment + int32(1), num_steps)
        following, held = cuda.local.array(group_words, uint32), cuda.local.array(held_words, uint32)
        sums, rows = cuda.local.array(sums_size, float32), cuda.local.array(eights, int32)
        for i in range(sums_size):
            sums[i] = float32(0)
        for i in range(held_words):
            held[i] = uint32(0)
        for eight in range(eights):
            token = min(int32(first + eight * int32(8) + g), int32(count - int32(1)))
            rows[eight] = token * (num_steps * int32(STEP) + int32(row_pad)) + q * int32(8)
        while step < stop:
            load_ahead(following, weights, base, step + int32(GROUP_STEPS), stop, lane)
            for turn in range(turns):
                load_inputs(held, inputs, rows, first, count, step, stop, turn)
                if turn == 0 and not in_shared:
                    cuda.syncwarp()  # else the compiler moves the loads of weights after the first products
                for i in range(halves):
                    half = turn * halves + i
                    if step + half // 2 < stop:
                        w = weights_of(words, half // 2, half % 2)
                        for tile in range(tiles):
                            a, b = (i * eights + 2 * tile) * 4, (i * eights + 2 * tile + 1) * 4
                            c = (sums[tile * 4], sums[tile * 4 + 1], sums[tile * 4 + 2], sums[tile * 4 + 3])
                            c = mma_bfloat16((held[a], held[b], held[a + 1], held[b + 1]), (w[0], w[1]), c)
                            c = mma_bfloat16((held[a + 2], held[b + 2], held[a + 3], held[b + 3]), (w[2], w[3]), c)
                            for j in range(4):
                                sums[tile * 4 + j] = c[j]
            for i in range(group_words):
                words[i] = following[i]
            step += int32(GROUP_STEPS)
        for tile in range(tiles):
            start = (tile * int32(SEGMENTS) + segment) * int32(TILE_SIZE) + g * int32(OUT_TILE) + q * int32(2)
            partials[start], partials[start + 1] = sums[tile * 4], sums[tile * 4 + 1]
            start += int32(8 * OUT_TILE)
            partials[start], partials[start + 1] = sums[tile * 4 + 2], sums[tile * 4 + 3]

    return device_function(product)


def _product_float32(tiles: int):
    tokens = tiles * ROW_TILE

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
                    start = (t // ROW_TILE * int32(SEGMENTS) + segment) * int32(TILE_SIZE)
                    partials[start + t % ROW_TILE * int32(OUT_TILE) + g] = value

    return device_function(product)
