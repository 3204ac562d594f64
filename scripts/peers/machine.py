"""The machine's limits, measured beside the engines: how fast it reads memory, and how fast our tiles can multiply."""

from pathlib import Path

from tinygpt.bench.machine_limits import measure_limits


class Engine:
    def __init__(self, folder: Path, dtype: str, threads: int):
        self.dtype, self.threads = dtype, threads

    def limits(self) -> dict[str, float]:
        """Bytes a second of reading, "bandwidth", and operations a second of each kind of tile that the dtype uses."""
        found = measure_limits(self.dtype, self.threads)
        return {"bandwidth": found.bandwidth, **found.tile_rates}
