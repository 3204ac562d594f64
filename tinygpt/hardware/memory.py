"""How much memory this process has taken at its peak."""

import contextlib
import sys
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
FORGET_PEAK = "5"  # proc_pid_clear_refs(5)


def forget_peak() -> None:
    """Start counting the peak anew where the system can, on Linux; elsewhere it stays that of the whole process."""
    with contextlib.suppress(OSError):
        CLEAR.write_text(FORGET_PEAK)


def peak_memory() -> int:
    """Bytes of the largest resident set; 0 where the system does not say. Memory never touched does not count."""
    try:
        lines = STATUS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return _peak_of_usage()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def _peak_of_usage() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
