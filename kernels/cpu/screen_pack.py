"""The screen of a head (V, K): its int8 copy, bounds of what that lacks, and the buffers of a step.

A row is w = m + t q + e: a row m that all share, a scale times whole numbers, and the rest. README.md has the proof of
the bounds, for which the figures here are rounded up.
"""

from typing import Any, NamedTuple

import numpy as np

from ..numbers import LEVELS
from .dtypes import DTYPES, new_weight, panel_count
from .layers.linear import Linear, whole
from .layers.operands import Int8Operand
from .simd.tiles import OUT_TILE
from .simd.vector_ir import PANEL_VECTORS, SCALE_GROUP, zeros

ROWS_IN_LEVELS = (
    3  # rows that become int8 twice, themselves and what that lacks: tiles take it as further rows
)
LEAST_SIZE = 2**23  # weights: a smaller head stays in a cache, and is read as fast as it is screened
MOST_K = 2**16
PANELS_OF_CALL = 16  # packed in one call, 10 ms: all at once would hold up a token for half a second
MEAN_OF = 16  # one panel of so many has a mean that is good enough: any row would be right
LEAST_SCALE = 2.0**-100  # rows with a smaller one are zeros and e
EPS = 2.0**-23
GREATEST_ROW = 512.0  # times a denormal number of a state, which some instructions take as 0
ROUND_UP = 1 + 2.0**-18  # the bounds are computed in float32


class Screen(NamedTuple):
    head: Linear  # (V, K) int8, t q
    segments: np.ndarray  # of K
    lost: np.ndarray  # (P * OUT_TILE,) float32: times |x|, of e and of all roundings
    sizes: np.ndarray  # (P * OUT_TILE,) float32: times |x - x'|, |t q|
    mean: np.ndarray  # (K, 1) float64: m
    num_packed: np.ndarray  # (1,) int64: panels
    largest: np.ndarray  # (1,) float64: a bound of a row's size; infinite: no screen
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
        mean=np.zeros((k, 1)),
        num_packed=np.full(1, 0 if pays else panels),
        largest=np.full(1, 0.0 if pays else np.inf),
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


def pack_panels(screen: Screen, weight: Any) -> None:
    """Fill the next of the screen's panels."""
    unpack = next(row.unpack for row in DTYPES.values() if isinstance(weight, row.record))
    with np.errstate(all="ignore"):  # a head that is not finite has no screen
        mean = screen.mean
        k = len(mean)
        first = screen.num_packed[0]
        stop = min(first + PANELS_OF_CALL, screen.is_wanted.size)
        if first == 0:
            mean[:] = unpack(weight.panels[0, ::MEAN_OF]).mean((0, 2), np.float64)[:k, None]
        for panel in range(first, stop):
            rest = unpack(weight.panels[0, panel : panel + 1])[0, :k] - mean  # (K, OUT_TILE) float64
            scales = (np.abs(rest).max(0) / LEVELS).astype(np.float32)
            scales[scales < LEAST_SCALE] = 0
            levels = np.rint(rest * np.where(scales > 0, 1 / scales, 0))
            numbers = np.full((screen.segments[-1], OUT_TILE), 128, np.uint8)
            numbers[:k] = levels + 128
            levels *= scales
            rest -= levels
            lost, sizes = np.linalg.norm(rest, axis=0), np.linalg.norm(levels, axis=0)
            whole_sizes = np.linalg.norm(mean) + sizes + lost
            lost += (k + 16) * EPS * whole_sizes + (k // SCALE_GROUP + 32) * EPS * sizes
            screen.largest[0] = np.maximum(screen.largest[0], whole_sizes.max())
            columns = slice(panel * OUT_TILE, (panel + 1) * OUT_TILE)
            screen.head.weight.panels[0, panel] = numbers.reshape(-1, 4, OUT_TILE).transpose(0, 2, 1)
            screen.head.weight.scales[0, columns] = scales
            screen.lost[columns] = lost * ROUND_UP
            screen.sizes[columns] = sizes * ROUND_UP
    screen.num_packed[0] = stop
    if not screen.largest[0] < GREATEST_ROW:
        screen.largest[0] = np.inf
