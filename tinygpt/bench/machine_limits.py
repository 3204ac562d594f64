"""What the machine could do at most: the same for every model."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass

from tinygpt.bench.work import TILES
from tinygpt.hardware.bandwidth import read_bandwidth
from tinygpt.kernels.cpu.simd.peak import tile_rate


@dataclass(frozen=True)
class MachineLimits:
    """Bytes a second of reading memory, and operations a second of the tiles in the blocks and in the head."""

    bandwidth: float
    block_rate: float
    head_rate: float

    def best(self, other: "MachineLimits") -> "MachineLimits":
        """The larger of each: what else runs on a machine can only make it slower."""
        return MachineLimits(*map(max, astuple(self), astuple(other)))


def measure_limits(dtype: str, threads: int) -> MachineLimits:
    """Those of so many threads, measured in half a second."""
    rates = {kind: tile_rate(kind, threads) for kind in TILES[dtype]}
    in_blocks, in_head = TILES[dtype]
    return MachineLimits(read_bandwidth(threads), rates[in_blocks], rates[in_head])


def best_of(found: Mapping[str, MachineLimits], dtype: str) -> MachineLimits:
    """The best for `dtype` of what was measured, by dtype, with one number of threads: all read the same memory, and
    some have tiles in common."""
    rates: dict[str, float] = {}
    for name, limits in found.items():
        for kind, rate in zip(TILES[name], (limits.block_rate, limits.head_rate), strict=True):
            rates[kind] = max(rate, rates.get(kind, 0.0))
    in_blocks, in_head = TILES[dtype]
    return MachineLimits(max(limits.bandwidth for limits in found.values()), rates[in_blocks], rates[in_head])
