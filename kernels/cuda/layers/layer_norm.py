"""Layer norm, a warp for each row: the same bits wherever a row is normalised.

A row is held in registers, C / 32 numbers a lane, so that all of it is asked for at once: of a kernel this small, a
round trip to the L2 cache is most of the time.
"""

import functools
import math
from typing import Any, NamedTuple

from tinygpt.kernels.cuda.runtime.jit import device_function, kernel
from tinygpt.kernels.cuda.runtime.ptx import load_fresh, store_bfloat16, to_bfloat16
from tinygpt.kernels.cuda.runtime.warp import WARP, warp_sum

from numba import cuda, float32, int32, int64  # isort: skip

NORM_WARPS = 4
AT_ONCE = 4  # numbers of a row that a lane scales together; 8 would take a third block's registers


class NormWeights(NamedTuple):
    """A layer norm of every layer of the model."""

    weight: Any  # (L, C) float32
    bias: Any  # (L, C) float32


def held_numbers(columns: int) -> int:
    """How many numbers of a row a lane holds: columns lane, lane + 32, ..."""
    return -(-columns // WARP)


@functools.cache
def row_functions(columns: int):
    """(load_row, normalise_row) of rows of this many columns.

    load_row(values, array, start, lane): array[start : start + columns] to the lanes' registers, zeros behind it.
    normalise_row(values, epsilon, lane): to mean 0 and variance 1.
    """
    held = held_numbers(columns)

    @device_function
    def load_row(values, array, start, lane):
        first = int64(start + lane)  # one address for all of them
        for i in range(held - 1):
            values[i] = load_fresh(array, first + i * WARP)
        is_within = lane + (held - 1) * WARP < columns
        last = load_fresh(array, first + (held - 1) * WARP if is_within else int64(start))
        values[held - 1] = last if is_within else float32(0)

    @device_function
    def normalise_row(values, epsilon, lane):
        total, squares = float32(0), float32(0)
        for i in range(held):
            total += values[i]
        mean = warp_sum(total) / float32(columns)
        for i in range(held):
            if i < held - 1 or lane + i * WARP < columns:
                values[i] -= mean
                squares = cuda.fma(values[i], values[i], squares)
        scale = float32(1) / math.sqrt(warp_sum(squares) / float32(columns) + epsilon)
        for i in range(held):
            values[i] *= scale

    return load_row, normalise_row


@functools.cache
def scaled_row_function(columns: int):
    """store_scaled(rows, at, values, weight, bias, lane): rows[at:], shared bfloat16, of a row that is normalised.

    weight and bias (C,) are shared, too. AT_ONCE numbers at a time: the compiler cannot know that what is stored is
    not what it would load next, so that each load would wait for the store before it.
    """
    held = held_numbers(columns)

    @device_function
    def store_scaled(rows, at, values, weight, bias, lane):
        weights, biases = cuda.local.array(AT_ONCE, float32), cuda.local.array(AT_ONCE, float32)
        for first in range(0, held, AT_ONCE):
            for i in range(AT_ONCE):
                c = int32(lane + (first + i) * WARP)
                if first + i < held and c < columns:
                    weights[i], biases[i] = weight[c], bias[c]
            for i in range(AT_ONCE):
                c = int32(lane + (first + i) * WARP)
                if first + i < held and c < columns:
                    rows[at + c] = to_bfloat16(cuda.fma(values[first + i], weights[i], biases[i]))

    return store_scaled


@functools.cache
def layer_norm_kernel(dtype: str, columns: int):
    """layer_norm(normed, x, rows, weight, bias, layer, padded_columns, epsilon, sizes, which).

    normed (n, padded columns) = layer norm of x[rows[i]] (columns,) by weight and bias (layers, columns), for the first
    sizes[which] rows; padding is left as it is. NORM_WARPS rows in a block of NORM_WARPS * WARP threads.
    """
    is_float32, held = dtype == "float32", held_numbers(columns)
    load_row, normalise_row = row_functions(columns)

    def layer_norm(normed, x, rows, weight, bias, layer, padded_columns, epsilon, sizes, which):
        lane = int32(cuda.threadIdx.x) % int32(WARP)
        row = int32(cuda.blockIdx.x) * int32(NORM_WARPS) + int32(cuda.threadIdx.x) // int32(WARP)
        if row >= sizes[which]:
            return
        values = cuda.local.array(held, float32)
        weights, biases = cuda.local.array(held, float32), cuda.local.array(held, float32)
        load_row(values, x, rows[row] * columns, lane)
        load_row(weights, weight, layer * columns, lane)
        load_row(biases, bias, layer * columns, lane)
        normalise_row(values, epsilon, lane)
        for i in range(held):
            c = int32(lane + i * WARP)
            if c < columns:
                value = cuda.fma(values[i], weights[i], biases[i])
                if is_float32:
                    normed[row * padded_columns + c] = value
                else:
                    store_bfloat16(normed, row * padded_columns + c, value)

    return kernel(layer_norm)
