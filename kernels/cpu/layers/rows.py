"""Phases over rows: layer norm, in float32 with sums in a fixed order of 16 lanes, and copies."""

import numpy as np

from tinygpt.kernels.cpu.jit import kernel, overload_by_dtype
from tinygpt.kernels.cpu.layers.formats import PostNorm
from tinygpt.kernels.cpu.layers.operands import put
from tinygpt.kernels.cpu.runtime.team import claim_rows, complete_rows, finish_phase
from tinygpt.kernels.cpu.simd.vector_ir import LANES, address, float32_at, sum_lanes, sum_squares_lanes

ONE_LAYER = np.int64(0)  # a NumPy scalar: Numba compiles anew for each Python constant


@kernel
def layer_norm(team, out, x, rows, norm, layer, epsilon):
    """Row i of the operand `out` = layer norm of x[rows[i]]. A phase; needs C values of scratch."""
    normed = float32_at(address(team.scratch), x.shape[1])
    weight, bias = norm.weight[layer], norm.bias[layer]
    first, last = claim_rows(team, rows.size)
    while first >= 0:
        for i in range(first, last):
            row = float32_at(address(x) + rows[i] * x.shape[1] * 4, x.shape[1])
            normalize(normed, row, weight, bias, epsilon)
            put(out, i, 0, normed)
        complete_rows(team, rows.size)
        first, last = claim_rows(team, rows.size)
    finish_phase(team)


@kernel
def put_rows(team, out, x, rows):
    first, last = claim_rows(team, rows.size)
    while first >= 0:
        for i in range(first, last):
            put(out, i, 0, float32_at(address(x) + rows[i] * x.shape[1] * 4, x.shape[1]))
        complete_rows(team, rows.size)
        first, last = claim_rows(team, rows.size)
    finish_phase(team)


@kernel
def norm_if_any(team, out, x, rows, norm, layer, epsilon):
    """Apply a layer norm. A phase, unless norm is None."""
    if norm is None:
        return
    layer_norm(team, out, x, rows, norm, layer, epsilon)


def _normed(team, out, x, rows, norm, layer, epsilon):
    layer_norm(team, out, x, rows, norm, layer, epsilon)


def _copied(team, out, x, rows, norm, layer, epsilon):
    put_rows(team, out, x, rows)


def _nothing(team, out, x, rows, norm, layer, epsilon):
    pass


# norm_before makes a block's input, norm_behind its output: a phase for PostNorm alone.
norm_before = overload_by_dtype({PostNorm: _copied, None: _copied}, otherwise=_normed, argument=4)
norm_behind = overload_by_dtype({PostNorm: _normed}, otherwise=_nothing, argument=4)


@kernel
def normalize(out, x, weight, bias, epsilon):
    n = x.size
    mean = _sum(x) / np.float32(n)
    for c in range(n):
        out[c] = x[c] - mean
    scale = np.float32(1) / np.sqrt(_sum_squares(out) / np.float32(n) + epsilon)
    for c in range(n):
        out[c] = out[c] * scale * weight[c] + bias[c]


@kernel
def _sum(x):
    vectors = x.size // LANES
    total = sum_lanes(address(x), vectors) if vectors else np.float32(0)
    for i in range(vectors * LANES, x.size):
        total += x[i]
    return total


@kernel
def _sum_squares(x):
    vectors = x.size // LANES
    total = sum_squares_lanes(address(x), vectors) if vectors else np.float32(0)
    for i in range(vectors * LANES, x.size):
        total += x[i] * x[i]
    return total


@kernel
def keep_rows(team, kept, layer, rows):
    """kept[layer] (N, C) = the first C columns of rows. A phase, unless `kept` is empty."""
    if kept.size == 0:
        return
    columns = kept.shape[2]
    first, last = claim_rows(team, rows.shape[0])
    while first >= 0:
        for n in range(first, last):
            source = float32_at(address(rows) + n * rows.shape[1] * 4, columns)
            target = float32_at(address(kept) + (layer * kept.shape[1] + n) * columns * 4, columns)
            for c in range(columns):
                target[c] = source[c]
        complete_rows(team, rows.shape[0])
        first, last = claim_rows(team, rows.shape[0])
    finish_phase(team)
