"""The matrix product: out = epilogue(x @ weight.T), over weights packed once into panels.

A panel holds PANEL output columns, k by k: weight (N, K) becomes (ceil(N / PANEL), K, PANEL), the last panel filled
with zeros. A tile reads a panel from its first byte to its last, which is how memory likes to be read.

K may be cut into four segments, each accumulated apart and added as (s0 + s1) + (s2 + s3). That is the order in
which four tensor-parallel ranks would add them, so that one rank or four give the same bits.
"""

import numpy as np

from tinygpt.kernels.cpu.activations import NONE, activate
from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.team import claim, complete, finish_phase
from tinygpt.kernels.cpu.tiles import PANEL, TILE_ROWS, address, panel_tile

# Rows of x that a thread takes on at a time: enough to use each panel well while it is in the L2 cache.
ROW_BLOCK = 8 * TILE_ROWS
MAX_SEGMENTS = 4
# What to do with the result. NumPy scalars: Numba would compile one more `linear` for each Python constant.
REPLACE, ADD = np.bool_(False), np.bool_(True)
SCRATCH = MAX_SEGMENTS * TILE_ROWS * PANEL  # float32 values that one thread needs


@jit
def pack(weight, is_transposed, panels, first, last):
    """Panels first to last of (P, K, PANEL) from weight (N, K), or (K, N) if transposed, as Conv1D stores it."""
    n = weight.shape[1] if is_transposed else weight.shape[0]
    for p in range(first, last):
        columns = min(PANEL, n - p * PANEL)
        for k in range(panels.shape[1]):
            if is_transposed:
                for j in range(columns):
                    panels[p, k, j] = weight[k, p * PANEL + j]
            else:
                for j in range(columns):
                    panels[p, k, j] = weight[p * PANEL + j, k]
            for j in range(columns, PANEL):
                panels[p, k, j] = 0


def panel_count(columns: int) -> int:
    return -(-columns // PANEL)


@jit
def linear(team, out, x, panels, bias, activation, add, segments):
    """out = activation(x @ weight.T + bias), or out += that if `add`. A phase; an item is a panel and a row block.

    out (M, N), x (M, K), panels (P, K, PANEL), bias (N,) or (0,) for none, segments: the bounds of the segments of
    K, (2,) or (5,) with no segment empty. Needs SCRATCH values of the thread's scratch.
    """
    blocks = max((out.shape[0] + ROW_BLOCK - 1) // ROW_BLOCK, 1)
    items = panels.shape[0] * blocks
    item = claim(team, items)
    while item >= 0:
        panel, block = item // blocks, item % blocks
        stop = min((block + 1) * ROW_BLOCK, out.shape[0])
        for row in range(block * ROW_BLOCK, stop, TILE_ROWS):
            rows = min(TILE_ROWS, stop - row)
            _products(rows, row, panel, x, panels, segments, team.scratch)
            _epilogue(rows, row, panel, out, bias, activation, add, segments, team.scratch)
        complete(team, items)
        item = claim(team, items)
    finish_phase(team)


@jit
def _products(rows, row, panel, x, panels, segments, scratch):
    """scratch[segment, r, column] = the product over one segment of K, for the rows of one tile."""
    k = x.shape[1]
    a = address(x) + row * k * 4
    b = address(panels) + panel * k * PANEL * 4
    c = address(scratch)
    for s in range(segments.size - 1):
        start, steps = segments[s], segments[s + 1] - segments[s]
        c_segment = c + s * TILE_ROWS * PANEL * 4
        panel_tile(rows, a + start * 4, k * 4, b + start * PANEL * 4, PANEL * 4, steps, c_segment, PANEL * 4)


@jit
def _epilogue(rows, row, panel, out, bias, activation, add, segments, scratch):
    """Add up the segments, then bias, activation and residual, while the tile is in the L1 cache."""
    sums = scratch[:SCRATCH].reshape(MAX_SEGMENTS, TILE_ROWS, PANEL)
    first = panel * PANEL
    columns = min(PANEL, out.shape[1] - first)
    for r in range(rows):
        y = sums[0, r, :columns]
        if segments.size == 5:
            for j in range(columns):
                y[j] = (y[j] + sums[1, r, j]) + (sums[2, r, j] + sums[3, r, j])
        if bias.size:
            for j in range(columns):
                y[j] += bias[first + j]
        if activation != NONE:
            activate(y, activation)
        target = out[row + r, first : first + columns]
        if add:
            for j in range(columns):
                target[j] += y[j]
        else:
            for j in range(columns):
                target[j] = y[j]


def whole(k: int) -> np.ndarray:
    """The bounds of one segment: all of K."""
    return np.array([0, k], np.int64)


def quarters(units: int, unit: int) -> np.ndarray:
    """The bounds of four segments of `units` pieces of `unit` values, the first ones longer by a piece: 25 heads
    are 7 + 6 + 6 + 6. With fewer than four pieces there is no way to share them: one segment."""
    if units < 4:
        return whole(units * unit)
    share, longer = divmod(units, 4)
    bounds = [i * share + min(i, longer) for i in range(5)]
    return np.array(bounds, np.int64) * unit
