"""What a block of a gemm multiplies, and which such tile suits a shape."""

import math
from dataclasses import dataclass

from tinygpt.kernels.cuda.layers.product import TILE_TOKENS
from tinygpt.kernels.cuda.packing.layout import PANEL, STEP, STEP_SIZE
from tinygpt.kernels.cuda.runtime.warp import WARP

STAGES = 4  # steps of K in shared memory: one is multiplied while three are on their way
SUM_PAD = 8  # float32 between two rows of sums in shared memory, which spreads a warp's writes over the banks
WEIGHT_BYTES = {"bfloat16": 2, "int8": 1}

# What a multiprocessor of an H200 does in a clock, until somebody measures it: products of mma.sync, 62 % of the 2048
# that the GPU is sold with; bytes of shared memory; bytes of the L2 cache, its share of some 6 TB/s when all read,
# and the most that it takes in alone.
PRODUCTS_A_CLOCK, SHARED_A_CLOCK, L2_A_CLOCK, L2_A_CLOCK_ALONE = 1270, 128, 27, 50


@dataclass(frozen=True)
class Tile:
    """A grid of warps, each of which multiplies token_tiles * 16 tokens by `panels` panels of 8 features.

    An even number of warps, and at least 8 tokens for each feature warp: 16 * token_tiles / feature_warps = 8, 16, ...
    """

    token_warps: int
    feature_warps: int
    token_tiles: int
    panels: int

    @property
    def tokens(self) -> int:
        return self.token_warps * self.token_tiles * TILE_TOKENS

    @property
    def features(self) -> int:
        return self.feature_warps * self.panels * PANEL

    @property
    def warps(self) -> int:
        return self.token_warps * self.feature_warps

    @property
    def threads(self) -> int:
        return self.warps * WARP

    def grid(self, tokens: int, features: int) -> tuple[int, int]:
        return math.ceil(features / self.features), math.ceil(tokens / self.tokens)

    def input_bytes(self) -> int:
        """Of a step of its tokens."""
        return self.tokens * STEP * 2

    def stage_bytes(self, dtype: str) -> int:
        """Of a step of its tokens and of its weights."""
        return self.input_bytes() + self.features // PANEL * STEP_SIZE * WEIGHT_BYTES[dtype]

    def read_bytes(self) -> int:
        """Of a step, what the warps read from shared memory, with weights of bfloat16."""
        return self.warps * (self.token_tiles * TILE_TOKENS + self.panels * PANEL) * STEP * 2

    def shared_bytes(self, dtype: str) -> int:
        """Shared memory of a launch: the stages, and, when they are done with, the sums."""
        return max(STAGES * self.stage_bytes(dtype), self.tokens * (self.features + SUM_PAD) * 4)


# 32, 64, 64, 64, 128 and 128 tokens by 32, 32, 64, 96, 96 and 128 features. Two float32 registers for each of its sums
# are what bounds a warp's part: 32 by 24 sums are 48 registers of a lane, 32 by 48 are 96, 64 by 32 are 128.
TILES = (Tile(2, 2, 1, 2), Tile(4, 2, 1, 2), Tile(2, 4, 2, 2), Tile(2, 4, 2, 3), Tile(4, 2, 2, 6), Tile(2, 4, 4, 4))


def pick_tile(tokens: int, features: int, multiprocessors: int = 132) -> Tile:
    """The tile that takes the fewest clocks by the arithmetic of `clocks`; of equals, the largest.

    For more than 64 tokens: fewer are cheaper with linear_kernel. tokens and features may be upper bounds.
    """
    return min(reversed(TILES), key=lambda tile: clocks(tile, tokens, features, multiprocessors))


def clocks(tile: Tile, tokens: int, features: int, multiprocessors: int) -> float:
    """Of a step of K in all of a grid, with weights of bfloat16, if nothing but the slowest of four things counts."""
    blocks = math.prod(tile.grid(tokens, features))
    rounds, copied = math.ceil(blocks / multiprocessors), tile.stage_bytes("bfloat16")
    return max(
        rounds * tile.tokens * tile.features * STEP / PRODUCTS_A_CLOCK,
        rounds * (copied + tile.read_bytes()) / SHARED_A_CLOCK,
        blocks * copied / (multiprocessors * L2_A_CLOCK),
        rounds * copied / L2_A_CLOCK_ALONE,
    )
