"""The CPU's name for itself."""

import platform
from pathlib import Path


def cpu_name() -> str:
    """As the system calls it, such as "AMD EPYC 9B14"."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
