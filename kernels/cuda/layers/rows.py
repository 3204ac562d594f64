"""Rows of x: embeddings, and layer norm, a warp for each row, with the same bits in every kernel.

A normalized row is held in registers, C / 32 numbers a lane: one round trip to the L2 cache. A lane has columns lane,
lane + 32, ..., or pairs from 2 lane, 2 lane + 64, ... if C is a multiple of 64.
"""

import functools
import math

from numba import cuda, float32, int32, uint32

from ..jit import (
    WARP,
    commit_copies,
    copy_async,
    device_function,
    kernel,
    let_next_kernel_begin,
    load_fresh,
    load_fresh_pair,
    load_shared_pair,
    rounded_product,
    store_shared,
    wait_for_kernel_before,
    warp_sum,
)
from ..params import DTYPES, OUT_TILE, STEP, STEP_SIZE, Numbers

EMBED_THREADS = 256
NORM_WARPS = 4
PAIRS = 2 * WARP  # numbers of a row, a pair in each lane
AT_ONCE = 4  # pairs that a lane scales together: a load from shared memory waits for the store before


def held_numbers(columns: int) -> int:
    return -(-columns // WARP)


@functools.cache
def row_functions(columns: int):
    """Return load_row, which fills up with zeros, and normalize_row, to mean 0 and variance 1."""
    held = held_numbers(columns)
    is_paired = columns % PAIRS == 0
    is_whole = columns % WARP == 0

    @device_function
    def load_pairs(values, array, start, lane):
        first = start + lane * 2  # one address for all
        for i in range(0, held, 2):
            values[i], values[i + 1] = load_fresh_pair(array, first + i * WARP)

    @device_function
    def load_numbers(values, array, start, lane):
        first = start + lane
        for i in range(held - 1):
            values[i] = load_fresh(array, first + i * WARP)
        is_within = lane + (held - 1) * WARP < columns
        last = load_fresh(array, first + (held - 1) * WARP if is_within else start)
        values[held - 1] = last if is_within else float32(0)

    @device_function
    def normalize_row(values, epsilon, lane):
        total, squares = float32(0), float32(0)
        for i in range(held):
            total += values[i]
        mean = warp_sum(total) / float32(columns)
        for i in range(held):
            if is_whole or i < held - 1 or lane + i * WARP < columns:
                values[i] -= mean
                squares = cuda.fma(values[i], values[i], squares)
        scale = float32(1) / math.sqrt(warp_sum(squares) / float32(columns) + epsilon)
        for i in range(held):
            values[i] *= scale

    return load_pairs if is_paired else load_numbers, normalize_row


@functools.cache
def shared_norm_functions(numbers: Numbers, columns: int, threads: int):
    """Return load_norm, which begins to copy NormWeights to shared memory, and store_scaled; columns: 64 n."""
    pack = numbers.pack
    pairs = held_numbers(columns) // 2
    pair_bytes = 4 * PAIRS
    kept_size = 4 * AT_ONCE
    turns = -(-columns // (threads * 4))

    @device_function
    def load_norm(weight, bias, weights, layer, thread):
        for turn in range(turns):
            c = int32(thread * 4 + int32(turn * threads * 4))
            if c < columns:
                copy_async(uint32(weight + c * 4), weights.weight, layer * columns + c)
                copy_async(uint32(bias + c * 4), weights.bias, layer * columns + c)
        commit_copies()

    @device_function
    def store_scaled(row, values, weight, bias, lane):
        kept = cuda.local.array(kept_size, float32)
        weight = uint32(weight + lane * 8)
        bias = uint32(bias + lane * 8)
        row = uint32(row + lane * 4)
        for first in range(0, pairs, AT_ONCE):
            for i in range(AT_ONCE):
                if first + i < pairs:
                    at = uint32((first + i) * pair_bytes)
                    kept[4 * i], kept[4 * i + 1] = load_shared_pair(uint32(weight + at))
                    kept[4 * i + 2], kept[4 * i + 3] = load_shared_pair(uint32(bias + at))
            for i in range(AT_ONCE):
                if first + i < pairs:
                    even = cuda.fma(values[2 * (first + i)], kept[4 * i], kept[4 * i + 2])
                    odd = cuda.fma(values[2 * (first + i) + 1], kept[4 * i + 1], kept[4 * i + 3])
                    store_shared(uint32(row + uint32((first + i) * (2 * PAIRS))), pack(even, odd))

    return load_norm, store_scaled


@functools.cache
def layer_norm_kernel(dtype: str, columns: int, is_norm: bool = True):
    """normed (n, padded columns) = layer norm of x[rows[i]], or these rows; n: sizes[row_kind]. Grid: n / NORM_WARPS.

    A row may be written in its own place.
    """
    held = held_numbers(columns)
    store_row = _store_row_function(DTYPES[dtype].numbers, columns)
    load_row, normalize_row = row_functions(columns)

    def layer_norm(normed, x, rows, weight, bias, layer, padded_columns, epsilon, sizes, row_kind):
        let_next_kernel_begin()
        lane = cuda.threadIdx.x % WARP
        row = cuda.blockIdx.x * NORM_WARPS + cuda.threadIdx.x // WARP
        if row >= sizes[row_kind]:
            return
        values = cuda.local.array(held, float32)
        weights = cuda.local.array(held, float32)
        biases = cuda.local.array(held, float32)
        if is_norm:
            load_row(weights, weight, layer * columns, lane)
            load_row(biases, bias, layer * columns, lane)
        wait_for_kernel_before()
        load_row(values, x, rows[row] * columns, lane)
        if is_norm:
            normalize_row(values, epsilon, lane)
            for i in range(held):
                values[i] = cuda.fma(values[i], weights[i], biases[i])
        store_row(normed, row * padded_columns, values, lane)

    return kernel(layer_norm)


def _store_row_function(numbers: Numbers, columns: int):
    held = held_numbers(columns)
    is_paired = columns % PAIRS == 0
    store = numbers.store
    store_pair = numbers.store_pair

    @device_function
    def store_pairs(normed, start, values, lane):
        at = start + lane * 2
        for i in range(0, held, 2):
            store_pair(normed, at + i * WARP, values[i], values[i + 1])

    @device_function
    def store_numbers(normed, start, values, lane):
        for i in range(held):
            c = int32(lane + i * WARP)
            if c < columns:
                store(normed, start + c, values[i])

    return store_pairs if is_paired else store_numbers


@functools.cache
def embed_kernel(dtype: str, of_out: str, has_tokens: bool, has_positions: bool):
    """out (N, width) = scale * wte[token] + wpe[position], or one of them. Grid: N.

    Token -1 - j stands for row j of embeds (E, columns). of_out: the dtype of weights that `out` is multiplied by.
    """
    load = DTYPES[dtype].load
    store = DTYPES[of_out].numbers.store
    HAS_SCALES = DTYPES[dtype].has_scales
    place = DTYPES[dtype].place

    def embed(out, width, token_ids, positions, embeds, wte, scales, scale, wpe, columns, num_steps, sizes):
        let_next_kernel_begin()
        n = cuda.blockIdx.x
        if n >= sizes[0]:
            return
        wait_for_kernel_before()
        token, at = token_ids[n], positions[n] * columns
        g = token % OUT_TILE
        base = token // OUT_TILE * num_steps * STEP_SIZE
        for c in range(cuda.threadIdx.x, columns, int32(EMBED_THREADS)):
            value = float32(0)
            if not has_tokens:
                pass
            elif token < 0:
                value = embeds[(-1 - token) * columns + c]
            else:
                value = load(wte, base + c // STEP * STEP_SIZE + place(g, c % STEP))
                if HAS_SCALES:
                    value = rounded_product(value, scales[token])  # not fused with the sum
                value = rounded_product(value, scale)
            if has_positions:
                value += wpe[at + c]
            store(out, n * width + c, value)

    return kernel(embed)
