"""Layer norm over rows: mean and variance in float32, two passes, sums in a fixed order of 16 lanes."""

import numpy as np

from tinygpt.kernels.cpu.jit import kernel
from tinygpt.kernels.cpu.layers.operands import put
from tinygpt.kernels.cpu.runtime.team import claim_rows, complete_rows, finish_phase
from tinygpt.kernels.cpu.simd.vector_ir import LANES, address, float32_at, sum_lanes, sum_squares_lanes


@kernel
def layer_norm(team, out, x, rows, norm, layer, epsilon):
    """Row i of the operand `out` = layer norm of x[rows[i]]. A phase.

    x (N, C), rows (R,), norm a Norm of formats.py. Needs C values of the thread's scratch.
    """
    normed = float32_at(address(team.scratch), x.shape[1])
    weight, bias = norm.weight[layer], norm.bias[layer]
    first, last = claim_rows(team, rows.size)
    while first >= 0:
        for i in range(first, last):
            row = float32_at(address(x) + rows[i] * x.shape[1] * 4, x.shape[1])
            normalise(normed, row, weight, bias, epsilon)
            put(out, i, 0, normed)
        complete_rows(team, rows.size)
        first, last = claim_rows(team, rows.size)
    finish_phase(team)


@kernel
def normalise(out, x, weight, bias, epsilon):
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
