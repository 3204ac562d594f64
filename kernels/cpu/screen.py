"""The screened head: an int8 copy bounds every logit, and panels of the head that can still win are computed exactly.

For a state x, known as x' by whole numbers, |w x - m x - t q x'| <= |e| |x| + |t q| |x - x'|, and m x is the same for
all rows: see screen_pack.py, and README.md for the proof. Other logits are -inf.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..numbers import top_of
from .dtypes import BFloat16Weight, Tile
from .jit import kernel, overload_by_dtype
from .layers.activations import NONE
from .layers.linear import REPLACE, compute_tile, for_each_tile, linear_to_operand, rows_together
from .layers.operands import BFloat16Operand, from_bfloat16, put
from .layers.rows import ONE_LAYER
from .sampling_rows import reached_by
from .screen_pack import ROWS_IN_LEVELS, is_packed, pack_panel, size_of
from .simd.targets import TARGET
from .simd.tiles import OUT_TILE, ROW_BLOCK
from .simd.vector_ir import PANEL_VECTORS, SCALE_GROUP, VECTOR_BYTES, address, float32_at, max_lanes
from .team import claim, complete, finish_phase

MAX_TOP = 64  # greatest logits of a row
RETRIES = 63  # a mask of calls in vain: of each 64, the 1st, 2nd, 4th, ... 32nd and 64th try again
SAFE = 1e33  # times the largest row's size: the int8 sums, without t, are up to 127 sqrt(K) times as large
TINY = np.float32(2.0**-100)  # more than what underflows in a sum
INFINITE = np.float32(np.inf)


def plan_screen(params: Any, buffers: Any, drawn_by: Callable) -> None:
    """Plan the next call: with a screen if each row's draw, of Warpers that drawn_by() returns, wants few logits."""
    screen, weight = buffers.screen, params.lm_head.weight
    if screen is None:
        return
    if screen.rows[0] and 2 * screen.is_wanted.sum() <= screen.is_wanted.size:
        screen.calls[0] = 0
    screen.rows[0] = 0
    screen.parts[0] = 0
    screen.is_wanted[:] = 1
    if (warpers := drawn_by()) is None:
        return
    top = top_of(warpers)
    # Rows of bfloat16 pass the head as fast as rows of int8.
    most = ROWS_IN_LEVELS if isinstance(weight, BFloat16Weight) else screen.top.size
    if not 0 < top.size <= most or top.min() < 1 or top.max() > MAX_TOP:
        return
    if not is_packed(screen, weight):
        return
    screen.calls[0] += 1
    if screen.calls[0] & (screen.calls[0] - 1) & RETRIES:
        return
    if np.isfinite(screen.largest[0]):
        screen.rows[0] = top.size
        screen.top[: top.size] = top
        screen.num_tokens[: top.size] = np.minimum(warpers.num_tokens, buffers.logits.shape[1])


@kernel
def score_tokens(team, project_out, head, segments, logits, final, x, screen, products):
    """logits (R, V) = x @ head.T, or -inf. Phases: as many with a screen in use as without: late threads count them.

    x: `final`, or its projection. products: `logits`, with rows for a second level.
    """
    rows, columns = logits.shape
    if project_out is not None:
        linear_to_operand(team, x, final, project_out.linear, ONE_LAYER, project_out.segments, NONE, rows)
    if screen is None:
        for_each_tile(team, logits, x, head, ONE_LAYER, segments, NONE, REPLACE, rows, columns)
        return
    screened = screen.rows[0]
    levels = 2 if screened <= ROWS_IN_LEVELS else 1
    count = levels * screened
    every = screen.segments
    quantize_states(team, screen, x, screened, levels)
    for_each_tile(team, products, screen.states, screen.head, ONE_LAYER, every, NONE, REPLACE, count, columns)
    bound_rows(team, screen, products, screened, levels)
    score_panels(team, screen, head, segments, logits, x)


@kernel
def quantize_states(team, screen, x, rows, levels):
    items = max(rows, 1)
    row = claim(team, items)
    while row >= 0:
        if row == 0 and screen.parts[0]:
            screen.num_packed[0] += 1
        if row < rows:
            _quantize(screen, x, row, rows, levels, float32_at(address(team.scratch), x.values.shape[1]))
        complete(team, items)
        row = claim(team, items)
    finish_phase(team)


@kernel
def _quantize(screen, x, row, rows, levels, rest):
    """Write a state's levels, |x|, and the size of what the levels lack."""
    for k in range(rest.size):
        rest[k] = state_at(x, row, k)
    screen.norms[row, 0] = size_of(rest)
    states = screen.states
    for level in range(levels):
        place = level * rows + row
        put(states, place, 0, rest)
        for k in range(rest.size):
            rest[k] -= np.float32(states.values[place, k]) * states.scales[place, k // SCALE_GROUP, 0]
    screen.norms[row, 1] = size_of(rest)
    if row == 0:
        screen.is_wanted[:] = 0


def _float_at(x, row, k):
    return x.values[row, k]


def _widened_at(x, row, k):
    return from_bfloat16(x.values[row, k])


state_at = overload_by_dtype(
    {BFloat16Operand: _widened_at if TARGET.packs_bfloat16 else _float_at}, otherwise=_float_at
)


@kernel
def bound_rows(team, screen, products, rows, levels):
    """Mark the panels with an upper bound that as many lower bounds as logits are wanted do not exceed."""
    items = max(rows, 1)
    row = claim(team, items)
    while row >= 0:
        if row < rows:
            least = -INFINITE
            if screen.norms[row, 0] * max(screen.largest[0], 1.0) < SAFE:  # not if a number is NaN
                count = screen.lows.shape[1]
                for panel in range(screen.is_wanted.size):
                    _bound_panel(team.scratch, screen, products, row, rows, levels, panel)
                least = reached_by(float32_at(address(screen.lows) + row * count * 4, count), screen.top[row])
            for panel in range(screen.is_wanted.size):
                if screen.highs[row, panel] >= least:
                    screen.is_wanted[panel] = 1
        complete(team, items)
        row = claim(team, items)
    finish_phase(team)


@kernel
def _bound_panel(scratch, screen, products, row, rows, levels, panel):
    """Write the greatest bounds of a panel's columns that are of tokens: t q x' -+ a radius."""
    columns = products.shape[1]
    first = panel * OUT_TILE
    used = max(min(OUT_TILE, screen.num_tokens[row] - first), 0)
    low = float32_at(address(scratch), OUT_TILE)
    high = float32_at(address(scratch) + OUT_TILE * 4, OUT_TILE)
    low[:] = -INFINITE
    high[:] = -INFINITE
    y = float32_at(address(products) + (row * columns + first) * 4, used)
    if levels > 1:
        further = float32_at(address(products) + ((rows + row) * columns + first) * 4, used)
        for j in range(used):
            y[j] += further[j]
    lost = float32_at(address(screen.lost) + first * 4, used)
    sizes = float32_at(address(screen.sizes) + first * 4, used)
    size = screen.norms[row, 0]
    rest = screen.norms[row, 1]
    for j in range(used):
        radius = lost[j] * size + (sizes[j] * rest + TINY)
        low[j] = y[j] - radius
        high[j] = y[j] + radius
    for v in range(PANEL_VECTORS):
        screen.lows[row, panel * PANEL_VECTORS + v] = max_lanes(address(low) + v * VECTOR_BYTES, 1)
    screen.highs[row, panel] = max_lanes(address(high), PANEL_VECTORS)


@kernel
def score_panels(team, screen, head, segments, logits, x):
    """Compute panels as `for_each_tile` does, or fill them with -inf. Pack those of the step's part, which are near."""
    rows, columns = logits.shape
    is_wanted = screen.is_wanted
    parts = screen.parts[0]
    height = rows_together(head.weight, (rows + ROW_BLOCK - 1) // ROW_BLOCK)
    panel = claim(team, is_wanted.size)
    while panel >= 0:
        if is_wanted[panel]:
            for row in range(0, rows, height):
                tile = Tile(min(height, rows - row), row, panel)
                compute_tile(team, logits, x, head, ONE_LAYER, segments, NONE, REPLACE, columns, tile)
        else:
            for row in range(rows):
                for column in range(panel * OUT_TILE, min((panel + 1) * OUT_TILE, columns)):
                    logits[row, column] = -INFINITE
        if parts and panel * parts // is_wanted.size == screen.num_packed[0] - 1:
            pack_panel(team.scratch, screen, head.weight, panel)
        complete(team, is_wanted.size)
        panel = claim(team, is_wanted.size)
    finish_phase(team)
