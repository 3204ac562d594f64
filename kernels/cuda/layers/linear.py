"""inputs @ weights.T + bias for a few tokens at a time: a block for each panel of 8 features, a warp for each segment.

In batches of up to FUSED_TOKENS the layer norm before it is part of the kernel: each block normalizes the rows while
its weights are in flight.
"""

import functools
from typing import Any, NamedTuple

from tinygpt.kernels.cuda.layers.epilogue import ADD, epilogue_of
from tinygpt.kernels.cuda.layers.layer_norm import held_numbers, row_functions, shared_norm_functions
from tinygpt.kernels.cuda.layers.product import (
    GROUP_STEPS,
    ROW_TILE,
    SHARED_PAD,
    TILE_SIZE,
    WORDS,
    load_group_function,
    product_function,
    total,
)
from tinygpt.kernels.cuda.packing import OUT_TILE, SEGMENTS, STEP, STEP_SIZE
from tinygpt.kernels.cuda.runtime.jit import device_function, kernel
from tinygpt.kernels.cuda.runtime.ptx import (
    let_next_kernel_begin,
    shared_address,
    wait_for_copies,
    wait_for_kernel_before,
)
from tinygpt.kernels.cuda.runtime.warp import WARP

from numba import cuda, float32, int32, int64, uint16, uint32  # isort: skip

LINEAR_THREADS = SEGMENTS * WARP
FUSED_TOKENS = SEGMENTS  # each warp of a block normalizes one row
NOT_FOUND = int64(0), float32(-0.0)  # index of a sum in the target, and the number it is added to


class Weights(NamedTuple):
    """A linear layer of every layer of the model."""

    panels: Any  # (L, features, K), see packing.py
    scales: Any  # (L, num_panels * OUT_TILE) float32
    bias: Any  # (L, features) float32
    num_panels: int
    num_steps: int
    features: int


class Norm(NamedTuple):
    """A layer norm of every layer of the model, and its rows."""

    x: Any  # (N, C) float32
    rows: Any  # (n,) int32, indices of x's rows
    weight: Any  # (L, C) float32
    bias: Any  # (L, C) float32
    epsilon: Any  # float32


def fused_shared_bytes(num_steps: int) -> int:
    """Return the dynamic shared memory of normed_linear: normalized rows in bfloat16."""
    return FUSED_TOKENS * (num_steps * STEP + SHARED_PAD) * 2


@functools.cache
def linear_kernel(dtype: str, tiles: int, epilogue: str):
    """linear(target, inputs, weights, layer, width, sizes, row_kind): a Weights applied to n rows of inputs.

    tiles: of 16 tokens, that a block multiplies. inputs (n, num_steps * STEP); n is sizes[row_kind]. target: (n,
    width), or Heads for QKV. Grid (num_panels, ceil(n / (tiles * ROW_TILE))), LINEAR_THREADS threads.
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
    """normed_linear(target, norm, weights, layer, width, sizes, row_kind): up to FUSED_TOKENS rows, normalized first.

    Not for float32. columns: whole steps. Grid num_panels, LINEAR_THREADS threads, fused_shared_bytes.
    """
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

    locate_own(target, weights, layer, panel): `place` of the one feature whose sums a thread finishes, loaded before
        the
        product if registers suffice
    find_own(target, layer, width, first, count, place): if there is one tile, the index of the thread's sum and the
        number
        it is added to, loaded before the product
    store(target, partials, place, own, weights, layer, panel, width, first, count): finish each sum of a block's tiles
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
