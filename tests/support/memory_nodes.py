"""Memory nodes as Linux tells of them, in a folder that stands for its root."""

from collections.abc import Iterable
from pathlib import Path


def tell_cpus(root: Path, node: int, cpus: Iterable[int]) -> None:
    """As Linux does: an entry for each, beside others."""
    folder = root / f"sys/devices/system/node/node{node}"
    for name in ("cpulist", "cpumap", "memory0", *(f"cpu{number}" for number in cpus)):
        (folder / name).mkdir(parents=True)
