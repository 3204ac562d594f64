"""What the machine could do at most: the same for every model."""

from dataclasses import astuple, dataclass

from tinygpt.bandwidth import read_bandwidth
from tinygpt.bench.work import TILES
from tinygpt.kernels.cpu.peak import tile_rate


@dataclass(frozen=True)
class Limits:
    """Bytes a second of reading memory, and operations a second of the tiles in the blocks and in the head."""

    bandwidth: float
    block_rate: float
    head_rate: float

    def best(self, other: "Limits") -> "Limits":
        """The larger of each: what else runs on a machine can only make it slower."""
        return Limits(*map(max, astuple(self), astuple(other)))


def measure_limits(dtype: str, threads: int) -> Limits:
    """Those of so many threads, measured in half a second."""
    rates = {kind: tile_rate(kind, threads) for kind in TILES[dtype]}
    in_blocks, in_head = TILES[dtype]
    return Limits(read_bandwidth(threads), rates[in_blocks], rates[in_head])
