"""The screen of a head (V, K): its int8 copy, bounds of what that lacks, and the buffers of a step.

A row is w = m + t q + e: a row m that all share, a scale times whole numbers, and the rest. README.md has the proof of
the bounds, for which the figures here are rounded up.
"""

from typing import Any, NamedTuple

import numpy as np

from ..numbers import LEVELS, ROUNDING
from .dtypes import DTYPES, element_at, new_weight, panel_address, panel_count
from .jit import kernel
from .layers.activations import ONE, ZERO
from .layers.linear import Linear, whole
from .layers.operands import Int8Operand
from .simd.tiles import OUT_TILE
from .simd.vector_ir import PANEL_VECTORS, ROW_BYTES, SCALE_GROUP, address, float32_at, int32_at, zeros

ROWS_IN_LEVELS = (
    3  # rows that become int8 twice, themselves and what that lacks: tiles take it as further rows
)
LEAST_SIZE = 2**23  # weights: a smaller head stays in a cache, and is read as fast as it is screened
MOST_K = 2**16
PARTS_BYTES = 112  # by a weight's bytes: parts, of which a step packs one in 3 % of its time
LEAST_SCALE = np.float32(2.0**-100)  # rows with a smaller one are zeros and e
EPS = 2.0**-23
GREATEST_ROW = 512.0  # times a denormal number of a state, which some instructions take as 0
ROUND_UP = 1 + 2.0**-18  # the bounds are computed in float32
ZERO_LEVELS = np.uint32(0x80808080).view(np.int32)  # four bytes of zeros, as int8 panels have them


class Screen(NamedTuple):
    head: Linear  # (V, K) int8, t q
    segments: np.ndarray  # of K
    lost: np.ndarray  # (P * OUT_TILE,) float32: times |x|, of e and of all roundings
    sizes: np.ndarray  # (P * OUT_TILE,) float32: times |x - x'|, |t q|
    mean: np.ndarray  # (K,) float32: m
    parts: np.ndarray  # (1,) int64: of the screen, if each step of the call packs one; else 0
    num_packed: np.ndarray  # (1,) int64: parts; -1: there is no mean yet
    largest: np.ndarray  # (1,) float64: a bound of a row's size; infinite: no screen; NaN: it is not packed
    rows: np.ndarray  # (1,) int64: R, or 0 for the whole head
    top: np.ndarray  # (R,) int64: greatest logits that are wanted
    num_tokens: np.ndarray  # (R,) int64: of so many first ones
    states: Int8Operand  # (R + 3, K): R rows of each level
    norms: np.ndarray  # (R, 2) float32: |x|, |x - x'|
    lows: np.ndarray  # (R, P * PANEL_VECTORS) float32: the greatest lower bound of a vector of columns
    highs: np.ndarray  # (R, P) float32: the greatest upper bound of a panel
    is_wanted: np.ndarray  # (P,) int64: panels that may have a wanted logit
    calls: np.ndarray  # (1,) int64: that wanted a screen since the last that gained by it


def new_screen(rows: int, n: int, k: int) -> Screen:
    int8 = DTYPES["int8"]
    panels = panel_count(n)
    no_bias = np.empty((1, 0), np.float32)
    pays = n * k >= LEAST_SIZE and k <= MOST_K
    return Screen(
        head=Linear(new_weight("int8", 1, n, k), no_bias, no_bias),
        segments=whole(int8.whole_k(k)),
        lost=zeros((panels * OUT_TILE,)),
        sizes=zeros((panels * OUT_TILE,)),
        mean=zeros((k,)),
        parts=np.zeros(1, np.int64),
        num_packed=np.full(1, -1),
        largest=np.full(1, np.nan if pays else np.inf),
        rows=np.zeros(1, np.int64),
        top=np.zeros(rows, np.int64),
        num_tokens=np.zeros(rows, np.int64),
        states=int8.new_operand(rows + ROWS_IN_LEVELS, k),
        norms=zeros((rows, 2)),
        lows=zeros((rows, panels * PANEL_VECTORS)),
        highs=zeros((rows, panels)),
        is_wanted=np.ones(panels, np.int64),
        calls=np.zeros(1, np.int64),
    )


def is_packed(screen: Screen, weight: Any) -> bool:
    """Return whether the screen is whole. If not, each step of the call that is planned packs a part of it."""
    if not np.isnan(screen.largest[0]):
        return True
    parts = PARTS_BYTES // weight.panels.itemsize
    if 0 <= screen.num_packed[0] < parts:
        screen.parts[0] = parts
        return False
    with np.errstate(all="ignore"):  # a head that is not finite has no screen
        if screen.num_packed[0] < 0:
            screen.mean[:] = _mean_of(weight)[: screen.mean.size]
            screen.num_packed[0] = 0
            return False
        largest = np.linalg.norm(screen.mean) + (screen.sizes + screen.lost).max()
    screen.largest[0] = largest if largest < GREATEST_ROW else np.inf
    return True


def _mean_of(weight: Any) -> np.ndarray:
    """Return the mean (K,) of two panels, which is good enough: any row would be right."""
    unpack = next(row.unpack for row in DTYPES.values() if isinstance(weight, row.record))
    panels = weight.panels[0]
    return unpack(panels[[len(panels) // 3, 2 * len(panels) // 3]]).mean((0, 2))


@kernel
def pack_panel(scratch, screen, weight, panel):
    """Write t, q and the bounds of a panel's rows."""
    mean = screen.mean
    k = mean.size
    panels = screen.head.weight.panels
    scales = float32_at(address(screen.head.weight.scales) + panel * ROW_BYTES, OUT_TILE)
    work = address(scratch)
    largest = float32_at(work, OUT_TILE)
    inverse = float32_at(work + ROW_BYTES, OUT_TILE)
    levels_squared = float32_at(work + 2 * ROW_BYTES, OUT_TILE)
    rests_squared = float32_at(work + 3 * ROW_BYTES, OUT_TILE)
    largest[:] = ZERO
    levels_squared[:] = ZERO
    rests_squared[:] = ZERO
    for i in range(k):
        common = mean[i]
        for j in range(OUT_TILE):
            largest[j] = max(largest[j], abs(element_at(weight, panel, i, j) - common))
    for j in range(OUT_TILE):
        scale = largest[j] / LEVELS
        scales[j] = scale if scale >= LEAST_SCALE else ZERO
        inverse[j] = ONE / scale if scale >= LEAST_SCALE else ZERO
    for i in range(k):
        common = mean[i]
        row = int32_at(panel_address(panels, 0, panel) + i // 4 * ROW_BYTES, OUT_TILE)
        shift = np.int32(8 * (i % 4))
        if shift == 0:
            row[:] = ZERO_LEVELS
        for j in range(OUT_TILE):
            rest = (element_at(weight, panel, i, j) - common) * inverse[j]
            level = (rest + ROUNDING) - ROUNDING
            row[j] += np.int32(level) << shift
            rest -= level
            levels_squared[j] += level * level
            rests_squared[j] += rest * rest
    size_of_mean = size_of(mean)
    for j in range(OUT_TILE):
        scale = np.float64(scales[j])
        size = scale * np.sqrt(np.float64(levels_squared[j]))
        lost = scale * np.sqrt(np.float64(rests_squared[j]))
        if scale == 0:
            lost += largest[j] * np.sqrt(k)
        whole_size = size_of_mean + size + lost
        lost += (k + 16) * EPS * whole_size + (k // SCALE_GROUP + 32) * EPS * size
        screen.lost[panel * OUT_TILE + j] = lost * ROUND_UP
        screen.sizes[panel * OUT_TILE + j] = size * ROUND_UP


@kernel
def size_of(values):
    total = 0.0
    for k in range(values.size):
        total += np.float64(values[k]) * np.float64(values[k])
    return np.sqrt(total)
