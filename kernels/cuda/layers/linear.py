"""inputs @ weights.T + bias for a few tokens at a time: a block for each panel of 8 features, a warp for each segment.

Decode is limited by memory bandwidth: loads of weights are contiguous, 16 bytes a lane, and the next steps' are in
flight during a product. A multiprocessor of an H200 needs 23 KB in flight; a block has 12 KB if K is 768. Sums over K
have one order: a token's bits do not depend on its batch. Up to FUSED_TOKENS rows are normalized in each block.
"""

import functools
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint16, uint32

from tinygpt.kernels.cuda.layers.epilogue import ADD, epilogue_of
from tinygpt.kernels.cuda.layers.rows import held_numbers, row_functions, shared_norm_functions
from tinygpt.kernels.cuda.params import OUT_TILE, SEGMENTS, STEP, STEP_SIZE
from tinygpt.kernels.cuda.runtime.jit import device_function, kernel
from tinygpt.kernels.cuda.runtime.ptx import (
    ALL_LANES,
    WARP,
    bits_to_float32,
    int8_to_bfloat16,
    let_next_kernel_begin,
    load_global,
    load_shared,
    load_weights,
    mma_bfloat16,
    shared_address,
    wait_for_copies,
    wait_for_kernel_before,
)

ROW_TILE = 16  # of a tile: the rows of one mma
TILE_SIZE = ROW_TILE * OUT_TILE
GROUP_STEPS = 2  # steps whose weights are loaded together
SHARED_PAD = 32  # bfloat16 between two rows in shared memory: 8 rows lie in different banks
WORDS = {"float32": 0, "bfloat16": 8, "int8": 4}  # uint32 of a lane in a step; float32 loads as it goes
LINEAR_THREADS = SEGMENTS * WARP
FUSED_TOKENS = SEGMENTS  # each warp of a block normalizes one row
NOT_FOUND = int64(0), float32(-0.0)  # a sum's index in the target, and the number before it


class Norm(NamedTuple):
    x: Any  # (N, C) float32
    rows: Any  # (n,) int32, indices of x's rows
    weight: Any  # (L, C) float32
    bias: Any  # (L, C) float32
    epsilon: Any  # float32


def fused_shared_bytes(num_steps: int) -> int:
    return FUSED_TOKENS * (num_steps * STEP + SHARED_PAD) * 2


def fused_block_bytes(columns: int) -> int:
    """Return a block's shared memory in normed_linear_kernel, with its arrays of a fixed size."""
    return fused_shared_bytes(columns // STEP) + 4 * (2 * columns + SEGMENTS * TILE_SIZE)


@functools.cache
def linear_kernel(dtype: str, tiles: int, epilogue: str):
    """target (n, width), or Heads for QKV, of inputs (n, num_steps * STEP); n: sizes[row_kind].

    Grid (num_panels, n / (tiles * ROW_TILE)).
    """
    # ADD has the fewest features, and the most of K in c_proj of the MLP.
    has_few_blocks = epilogue == ADD and tiles == 1
    load_group, product = load_group_function(dtype), product_function(dtype, tiles, has_few_blocks=has_few_blocks)
    locate, find, store = _store_functions(dtype, tiles, epilogue)
    words_size, partials_size = max(GROUP_STEPS * WORDS[dtype], 1), tiles * SEGMENTS * TILE_SIZE
    LOCATES_EARLY = dtype != "float32"  # whose sums fill the registers

    def linear(target, inputs, weights, layer, width, sizes, row_kind):
        let_next_kernel_begin()
        partials, words = cuda.shared.array(partials_size, float32), cuda.local.array(words_size, uint32)
        panel, first, count = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y) * int32(tiles * ROW_TILE), sizes[row_kind]
        if first >= count:
            return
        base = first_weight(weights, layer, panel)
        load_group(words, weights.panels, base, weights.num_steps)
        if LOCATES_EARLY:
            place = locate(target, weights, layer, panel)
        wait_for_kernel_before()
        own = find(target, layer, width, first, count, place) if LOCATES_EARLY else NOT_FOUND
        product(partials, words, inputs, first, count, weights.panels, base, weights.num_steps)
        if not LOCATES_EARLY:
            place = locate(target, weights, layer, panel)
        cuda.syncthreads()
        store(target, partials, place, own, weights, layer, panel, width, first, count)

    return kernel(linear)


@functools.cache
def normed_linear_kernel(dtype: str, columns: int, epilogue: str):
    """As linear_kernel, for up to FUSED_TOKENS rows of a Norm of 64 n columns, not in float32. Grid num_panels."""
    load_group, product = load_group_function(dtype), product_function(dtype, 1, in_shared=True)
    locate, find, store = _store_functions(dtype, 1, epilogue)
    load_norm, store_scaled = shared_norm_functions(columns, LINEAR_THREADS)
    load_row, normalize_row = row_functions(columns)
    held, row_bytes = held_numbers(columns), 2 * (columns + SHARED_PAD)
    words_size, partials_size = GROUP_STEPS * WORDS[dtype], SEGMENTS * TILE_SIZE

    def normed_linear(target, norm, weights, layer, width, sizes, row_kind):
        let_next_kernel_begin()
        partials, words = cuda.shared.array(partials_size, float32), cuda.local.array(words_size, uint32)
        norm_weight = shared_address(cuda.shared.array(columns, float32, alignment=16))
        norm_bias = shared_address(cuda.shared.array(columns, float32, alignment=16))
        rows = shared_address(cuda.shared.array(0, uint16, alignment=16))
        values = cuda.local.array(held, float32)
        panel, count, thread = int32(cuda.blockIdx.x), sizes[row_kind], int32(cuda.threadIdx.x)
        lane, row = thread % int32(WARP), thread // int32(WARP)
        base = first_weight(weights, layer, panel)
        load_group(words, weights.panels, base, weights.num_steps)
        place = locate(target, weights, layer, panel)
        load_norm(norm_weight, norm_bias, norm, layer, thread)
        wait_for_kernel_before()
        if row < count:
            load_row(values, norm.x, norm.rows[row] * columns, lane)
        own = find(target, layer, width, int32(0), count, place)
        if row < count:
            normalize_row(values, norm.epsilon, lane)
        wait_for_copies(0)
        cuda.syncthreads()
        if row < count:
            store_scaled(uint32(rows + uint32(row * row_bytes)), values, norm_weight, norm_bias, lane)
        cuda.syncthreads()
        product(partials, words, rows, int32(0), count, weights.panels, base, weights.num_steps)
        cuda.syncthreads()
        store(target, partials, place, own, weights, layer, panel, width, int32(0), count)

    return kernel(normed_linear)


@device_function
def first_weight(weights, layer, panel):
    return (int64(layer) * weights.num_panels + panel) * weights.num_steps * int32(STEP_SIZE)


@functools.cache
def _store_functions(dtype: str, tiles: int, epilogue: str):
    """Return (locate_own, find_own, store).

    locate_own: the `place` of the feature whose sums a thread finishes
    find_own: with one tile, the index of a thread's sum, and the number before it
    """
    steps, IS_ONE = epilogue_of(dtype, epilogue), tiles == 1 and dtype != "float32"
    locate, find, finish, read, put = steps

    @device_function
    def locate_own(target, weights, layer, panel):
        feature = panel * int32(OUT_TILE) + int32(cuda.threadIdx.x) % int32(OUT_TILE)
        return locate(target, weights, layer, min(int32(feature), int32(weights.features - int32(1))))

    @device_function
    def find_own(target, layer, width, first, count, place):
        if not IS_ONE:
            return NOT_FOUND
        token = min(int32(first + int32(cuda.threadIdx.x) // int32(OUT_TILE)), int32(count - int32(1)))
        at = find(target, layer, width, token, place)
        return at, read(target, at)

    def store(target, partials, place, own, weights, layer, panel, width, first, count):
        for index in range(int32(cuda.threadIdx.x), int32(tiles * TILE_SIZE), int32(LINEAR_THREADS)):
            token, feature = first + index // int32(OUT_TILE), panel * int32(OUT_TILE) + index % int32(OUT_TILE)
            if token < count and feature < weights.features:
                value = finish(total(partials, index // int32(TILE_SIZE), index % int32(TILE_SIZE)), place)
                at, before = own
                if not IS_ONE:
                    at = find(target, layer, width, token, place)
                    before = read(target, at)
                put(target, at, before + value, place)

    return locate_own, find_own, device_function(store)


@functools.cache
def product_function(dtype: str, tiles: int, in_shared: bool = False, has_few_blocks: bool = False):
    """Multiply some tiles of tokens by a panel.

    partials: shared float32 (tiles, SEGMENTS, ROW_TILE, OUT_TILE), of which a warp writes one segment
    words: local (GROUP_STEPS * WORDS[dtype],), the first weights. inputs: an address if in_shared
    has_few_blocks: a warp loads more inputs at once, into registers that no third block needs
    """
    if dtype == "float32":
        return _product_float32(tiles)
    return _product_bfloat16(dtype, tiles, in_shared, GROUP_STEPS * 2 if has_few_blocks else 1)


@device_function
def segment_start(segment, num_steps):
    return segment * num_steps // int32(SEGMENTS)


@device_function
def total(partials, tile, index):
    """Return the sum over segments; index: token * OUT_TILE + feature."""
    start = tile * int32(SEGMENTS * TILE_SIZE) + index
    value = partials[start]
    for segment in range(int32(1), int32(SEGMENTS)):
        value += partials[start + segment * int32(TILE_SIZE)]
    return value


@functools.cache
def load_group_function(dtype: str):
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
    """at_once: halves of steps whose inputs a warp loads together."""
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
        for eight in range(eights):
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
