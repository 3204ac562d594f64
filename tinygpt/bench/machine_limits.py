"""What the machine could do at most: the same for every model."""

from dataclasses import dataclass

from tinygpt.bench.work import TILES, tiles_of
from tinygpt.hardware.bandwidth import read_bandwidth
from tinygpt.kernels.cpu.simd.peak import tile_rate


@dataclass(frozen=True)
class MachineLimits:
    """Bytes of memory read a second, and operations a second of each kind of tile, by the kind's name."""

    bandwidth: float
    tile_rates: dict[str, float]

    def best(self, other: "MachineLimits") -> "MachineLimits":
        """The larger of each: whatever else runs on a machine can only make it slower."""
        rates = dict(self.tile_rates)
        for kind, rate in other.tile_rates.items():
            rates[kind] = max(rate, rates.get(kind, 0.0))
        return MachineLimits(max(self.bandwidth, other.bandwidth), rates)


def measure_limits(dtype: str, threads: int) -> MachineLimits:
    """Those of so many threads, with the tiles that `dtype` uses; takes half a second."""
    return MachineLimits(read_bandwidth(threads), {kind: tile_rate(kind, threads) for kind in sorted({*TILES[dtype]})})


def measure_device_limits(dtype: str) -> MachineLimits:
    """Those of the GPU, by its own clock."""
    from tinygpt.kernels.cuda.runtime import peak

    kinds = sorted({*tiles_of(dtype, "cuda")})
    return MachineLimits(peak.read_bandwidth(), {kind: peak.tile_rate(kind) for kind in kinds})
