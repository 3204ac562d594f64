"""Layer norm, a warp for each row: the same bits wherever a row is normalised."""

import functools
import math

from tinygpt.kernels.cuda.jit import device_function, kernel
from tinygpt.kernels.cuda.ptx import store_bfloat16
from tinygpt.kernels.cuda.warp import WARP, warp_sum

from numba import cuda, float32, int32  # isort: skip

NORM_WARPS = 4


@device_function
def row_statistics(x, start, columns, epsilon, lane):
    """Mean and 1 / standard deviation of x[start : start + columns], known to each lane."""
    total = float32(0)
    for c in range(lane, columns, int32(WARP)):
        total += cuda.ldcg(x, start + c)
    mean = warp_sum(total) / float32(columns)
    squares = float32(0)
    for c in range(lane, columns, int32(WARP)):
        centred = cuda.ldcg(x, start + c) - mean
        squares = cuda.fma(centred, centred, squares)
    return mean, float32(1) / math.sqrt(warp_sum(squares) / float32(columns) + epsilon)


@device_function
def normalised(x, start, c, mean, scale, gain, bias, offset):
    """Column c of the row that begins at x[start]; gain[offset] is that of its first column."""
    return cuda.fma((cuda.ldcg(x, start + c) - mean) * scale, gain[offset + c], bias[offset + c])


@functools.cache
def layer_norm_kernel(dtype: str):
    """layer_norm(normed, x, rows, gain, bias, layer, columns, padded_columns, epsilon, sizes, which).

    normed (n, padded columns) = layer norm of x[rows[i]] (columns,) by gain and bias (layers, columns), for the first
    sizes[which] rows; padding is left as it is. NORM_WARPS rows in a block of NORM_WARPS * WARP threads.
    """
    is_float32 = dtype == "float32"

    def layer_norm(normed, x, rows, gain, bias, layer, columns, padded_columns, epsilon, sizes, which):
        lane = int32(cuda.threadIdx.x) % int32(WARP)
        row = int32(cuda.blockIdx.x) * int32(NORM_WARPS) + int32(cuda.threadIdx.x) // int32(WARP)
        if row >= sizes[which]:
            return
        start = rows[row] * columns
        mean, scale = row_statistics(x, start, columns, epsilon, lane)
        for c in range(lane, columns, int32(WARP)):
            value = normalised(x, start, c, mean, scale, gain, bias, layer * columns)
            if is_float32:
                normed[row * padded_columns + c] = value
            else:
                store_bfloat16(normed, row * padded_columns + c, value)

    return kernel(layer_norm)
