"""How many threads compute, one number for every pool, and how many cores there are for them."""

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from tinygpt.errors import invalid

MAX_THREADS = 1024
ROOT = Path("/")  # of what Linux tells in files


def thread_count(threads: Any = None) -> int:
    """`threads` checked, or the number of fast cores this process may use. RequestError if impossible."""
    if threads is None:
        return physical_cores()
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
        raise invalid("threads", threads, f"a whole number from 1 to {MAX_THREADS}")
    return threads


def physical_cores() -> int:
    """Cores this process may run on: no more than its container's share of time, and only the fast ones of a hybrid
    CPU, as all threads wait for the slowest. Hyper-threads count once where the system tells them apart."""
    if sys.platform == "darwin":
        return _mac_cores() or logical_cores()
    if not hasattr(os, "sched_getaffinity"):
        return logical_cores()
    return linux_cores(os.sched_getaffinity(0), ROOT)


def logical_cores() -> int:
    """Cores this process may run on, each hyper-thread counted."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def linux_cores(allowed: Iterable[int], root: Path) -> int:
    """`physical_cores` of a system whose files are under `root`, for a process that may run on some logical cores."""
    cores = len({_siblings(cpu, root) for cpu in _fast(set(allowed), root)})
    return max(1, min([cores, *(int(share) for share in _quotas(root))]))


def _fast(allowed: set[int], root: Path) -> set[int]:
    """Those of the allowed logical cores that are no slow ones: as Linux lists Intel's, or measures ARM's."""
    if listed := allowed & _listed(_read(root / "sys/devices/cpu_core/cpus")):
        return listed
    sizes = {cpu: int(_read(root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity") or 0) for cpu in allowed}
    return {cpu for cpu, size in sizes.items() if 3 * size >= 2 * max(sizes.values())}


def _siblings(cpu: int, root: Path) -> str:
    return _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def _listed(text: str) -> set[int]:
    """ "0-3,8" -> 0, 1, 2, 3, 8."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def _quotas(root: Path) -> list[float]:
    """CPUs' worth of time that the process's control group and those above it allow, as `docker run --cpus` sets it."""
    quotas = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:  # version 2
            found = [_read(place / "cpu.max").split() for place in _places(root / "sys/fs/cgroup", group)]
        elif "cpu" in controllers.split(","):
            names, tops = ("cpu.cfs_quota_us", "cpu.cfs_period_us"), {controllers, "cpu"}
            places = [place for top in tops for place in _places(root / "sys/fs/cgroup" / top, group)]
            found = [[_read(place / name).strip() for name in names] for place in places]
        else:
            continue
        # Where there is no limit, the quota is "max", or -1.
        quotas += [int(pair[0]) / int(pair[1]) for pair in found if len(pair) == 2 and pair[0].isdigit()]
    return quotas


def _places(top: Path, group: str) -> list[Path]:
    """A group's folder and those above it. Inside a container, some or all but the top are out of sight."""
    relative = PurePosixPath(group.lstrip("/"))
    return [top / part for part in (relative, *relative.parents)]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _mac_cores() -> int:
    """The fast ones of Apple's own CPUs, or all; 0 if macOS does not say."""
    count, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    for name in (b"hw.perflevel0.physicalcpu", b"hw.physicalcpu"):
        if ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(count), ctypes.byref(size), None, 0) == 0:
            return count.value
    return 0
