"""Tiles of tokens by features, and the choice among them by a device's multiprocessors and shared memory.

If K is long and blocks are few, several share a tile's segments.
"""

import math
from dataclasses import dataclass
from typing import Any

from ...backend import DeviceError
from ..jit import WARP
from ..params import DTYPES, OUT_TILE, SEGMENTS, STEP
from .linear import ROW_TILE

EXCHANGE = 4  # loads of a lane that change places in odd tokens, so that two tokens lie in different banks
SUM_PAD = 8  # float32 between two rows of sums, which spreads a warp's writes over the banks
ROWS_AT_ONCE = 8  # tokens whose sums a lane finishes together
LONG = 40  # steps of K from which on blocks share a tile: their sums are at most some half of its loads
MAX_SHARED = 2  # blocks of a multiprocessor, up to which they do


@dataclass(frozen=True)
class Tile:
    """A block's warps, in all 2 n, in float32 4 n; each multiplies token_tiles * 16 tokens by `panels` panels.

    stages: steps of K in shared memory, all but one on their way
    """

    token_warps: int
    feature_warps: int
    token_tiles: int
    panels: int
    stages: int = 4

    @property
    def tokens(self) -> int:
        return self.token_warps * self.token_tiles * ROW_TILE

    @property
    def features(self) -> int:
        return self.feature_warps * self.panels * OUT_TILE

    @property
    def warps(self) -> int:
        return self.token_warps * self.feature_warps

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def lane_sums(self) -> int:
        return self.token_tiles * self.panels * 4

    @property
    def row_size(self) -> int:
        """Return the float32 from a token's sums to the next one's in shared memory."""
        return self.features + SUM_PAD

    @property
    def is_one_round(self) -> bool:
        """Return whether a lane finishes ROWS_AT_ONCE sums of a feature, and no more."""
        return self.features <= WARP and self.tokens == ROWS_AT_ONCE * self.warps

    @property
    def fma_work(self) -> int:
        """Return what float32 takes: products, and 6 for each token and feature, by the instructions of a step."""
        return self.tokens * self.features + 6 * (self.tokens + self.features)

    def grid(self, tokens: int, features: int) -> tuple[int, int]:
        return math.ceil(features / self.features), math.ceil(tokens / self.tokens)

    def input_bytes(self, dtype: str) -> int:
        return self.tokens * STEP * DTYPES[dtype].numbers.item_bytes

    def stage_bytes(self, dtype: str) -> int:
        return self.input_bytes(dtype) + self.features * STEP * DTYPES[dtype].item_bytes

    def shared_bytes(self, dtype: str) -> int:
        return max(self.stages * self.stage_bytes(dtype), self.tokens * self.row_size * 4)


# Tiles, with the blocks of a multiprocessor from which on each is taken: small tiles hide latency, large tiles share
# loads. Of six tiles in 24 shapes, the first two are the fastest on an H200.
MMA_TILES = {Tile(2, 2, 1, 2): 0, Tile(2, 4, 2, 3): 1, Tile(2, 4, 4, 4): 2}
# In float32 a large tile's step takes longer than its copies: two stages, with which all fit in 99 KiB, two in 64.
FMA_TILES = dict.fromkeys((Tile(2, 2, 1, 2, 3), Tile(2, 2, 2, 3, 2), Tile(2, 4, 2, 3, 2)), 0)


def pick_tile(tokens: int, features: int, num_steps: int, dtype: str, device: Any) -> tuple[Tile, int]:
    """Return a tile that fits in the device's shared memory, and how many blocks share it.

    It has enough blocks; on tensor cores the largest, in float32 that of the least work of a multiprocessor.
    """
    has_mma = DTYPES[dtype].numbers.has_mma
    work = {}
    for tile, least in (MMA_TILES if has_mma else FMA_TILES).items():
        blocks = math.prod(tile.grid(tokens, features))
        parts = 1
        if num_steps >= LONG and least < MAX_SHARED:
            while parts < SEGMENTS and 2 * parts * blocks <= MAX_SHARED * device.multiprocessors:
                parts *= 2
        waves = math.ceil(parts * blocks / device.multiprocessors)
        fits = tile.shared_bytes(dtype) <= device.shared_bytes
        if fits and parts * blocks >= least * device.multiprocessors:
            work[tile, parts] = 0 if has_mma else waves * tile.fma_work / parts
    if not work:
        raise DeviceError(f"no tile of {dtype} fits in this GPU's shared memory.")
    return min(reversed(work), key=work.get)


def run_sums_size(device: Any) -> int:
    """Return how many numbers the sums of all shared tiles are: most if two blocks share each."""
    tiles = MAX_SHARED * device.multiprocessors // 2
    tiles_that_share = (MMA_TILES | FMA_TILES).items()
    sizes = (tile.tokens * tile.features for tile, least in tiles_that_share if least < MAX_SHARED)
    return tiles * slots_of(2) * max(sizes)


def slots_of(parts: int) -> int:
    """Return how many sums of a tile its blocks write: the first block one, the others one for each segment."""
    return 1 + SEGMENTS - SEGMENTS // parts
