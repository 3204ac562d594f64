"""The machine's limits, measured beside the engines: how fast it reads memory, and how fast our tiles can multiply."""

from pathlib import Path

from tinygpt.bench.work import TILES
from tinygpt.hardware.bandwidth import read_bandwidth
from tinygpt.kernels.cpu.simd.peak import tile_rate


class Engine:
    def __init__(self, folder: Path, dtype: str, threads: int):
        self.threads, self.kinds = threads, sorted(set(TILES[dtype]))

    def limits(self) -> dict[str, float]:
        """Bytes a second of reading, "bandwidth", and operations a second of each kind of tile that the dtype uses."""
        rates = {kind: tile_rate(kind, self.threads) for kind in self.kinds}
        return {"bandwidth": read_bandwidth(self.threads)} | rates
