"""What the tiles are made of on the CPU that Numba compiles for: one table, and the one choice from it.

The same bits come out of every row. What differs is which instruction multiplies, and so how the left side of a product
(activations, queries, softmax weights) lies in memory: see steps.py, and lane_steps.py for ARM.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tinygpt.kernels.cpu.features import has_feature, target_cpu

# How four bytes of a column are multiplied, by the instruction that does it.
PAIRS = "vdpbf16ps"  # two bfloat16
LONGS = "bfmlalt, bfmlalb"  # the same one after the other: fused multiply-adds, which know denormals
WIDENED = "two multiply-adds"  # of the same two in float32: the same bits, as each product is exact
FOURS = "vpdpbusd"  # four bytes into an int32
SHORTS = "vpmaddwd"  # two int16 into an int32, so bytes are widened
BYTES = "vpmaddubsw"  # two bytes into an int16, which eight steps of nibbles cannot overflow
DOTS = "sdot"  # four bytes into an int32, both sides signed
MATRICES = "usmmla"  # eight bytes of two columns and two rows into four int32; a lone row takes usdot, four into one
SINGLES = "multiply-adds"  # of float32
# Products that each makes for 32 bits of a register.
PRODUCTS = {SINGLES: 1, PAIRS: 2, LONGS: 1, WIDENED: 1, FOURS: 4, SHORTS: 2, BYTES: 4, DOTS: 4, MATRICES: 8}


@dataclass(frozen=True)
class Target:
    name: str
    features: tuple[str, ...]  # which a CPU must have, in LLVM's spelling
    cpu: str  # how LLVM's name of it must begin
    vector_bytes: int
    registers: int
    bfloat16: str
    int8: str
    int4: str

    @property
    def has_lanes(self) -> bool:
        """Whether a product may be one by a single lane of a register: ARM's."""
        return "neon" in self.features

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether the left side of a product lies in bfloat16, not in float32 rounded to it."""
        return self.bfloat16 in (PAIRS, LONGS)

    @property
    def int8_cache(self) -> str:
        """How the products with an int8 KV cache are made. ARM's own steps for bytes are not among them."""
        return FOURS if self.int8 == FOURS else SHORTS


# The first that fits. Zen takes one cycle for vdpbf16ps; Intel's cores take two, and one for two multiply-adds. ARM's
# bfdot and bfmmla round otherwise than two fused multiply-adds do.
TARGETS = (
    Target("AVX-512 BF16 VNNI", ("avx512bf16", "avx512vnni"), "znver", 64, 32, PAIRS, FOURS, FOURS),
    Target("AVX-512 VNNI", ("avx512vnni",), "", 64, 32, WIDENED, FOURS, FOURS),
    Target("AVX-512", ("avx512bw",), "", 64, 32, WIDENED, SHORTS, BYTES),
    Target("AVX2 VNNI", ("avx2", "fma", "avxvnni"), "", 32, 16, WIDENED, FOURS, FOURS),
    Target("AVX2", ("avx2", "fma"), "", 32, 16, WIDENED, SHORTS, BYTES),
    Target("NEON BF16 I8MM", ("neon", "bf16", "i8mm"), "", 16, 32, LONGS, MATRICES, MATRICES),
    Target("NEON DotProd", ("neon", "dotprod"), "", 16, 32, WIDENED, DOTS, DOTS),
    Target("NEON", ("neon",), "", 16, 32, WIDENED, SHORTS, SHORTS),
    Target("what LLVM makes of 16 lanes", (), "", 16, 16, WIDENED, SHORTS, SHORTS),
)


def choose(has: Callable[[str], bool], cpu: str) -> Target:
    return next(t for t in TARGETS if all(map(has, t.features)) and cpu.startswith(t.cpu))


TARGET = choose(has_feature, target_cpu())
