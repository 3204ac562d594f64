"""The machine's CPU, cores and memory speed; this process's memory and rank under mpiexec."""

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from .fields import integer, read_field

MAX_THREADS = 1024
THREADS = integer(1, MAX_THREADS)
ROOT = Path("/")
READ_BYTES = 512 << 20  # far more than any cache
STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
# Variables of MPICH and derivatives, Open MPI, PMIx and Slurm.
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
SLURM_RANK = "SLURM_PROCID"
SLURM_SIZE = "SLURM_STEP_NUM_TASKS"  # a step of one task may be a shell


def thread_count(threads: Any = None) -> int:
    """Return `threads`, or the number of fast cores for None. Raise RequestError."""
    if threads is None:
        return physical_cores()
    return read_field("threads", threads, THREADS)


def physical_cores() -> int:
    """Return the number of this process's fast cores, within its container's share of time.

    All threads wait for the slowest: slow cores of a hybrid CPU do not count, nor a core's second hyper-thread.
    """
    if sys.platform == "darwin":
        counts = (_sysctl(name, ctypes.c_int()) for name in ("hw.perflevel0.physicalcpu", "hw.physicalcpu"))
        return next(filter(None, counts), 0) or logical_cores()
    if not hasattr(os, "sched_getaffinity"):
        return logical_cores()
    return linux_cores(os.sched_getaffinity(0), ROOT)


def logical_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def linux_cores(allowed: Iterable[int], root: Path) -> int:
    """Return `physical_cores` from files under `root`."""
    cpus = root / "sys/devices/system/cpu"
    siblings = "topology/thread_siblings_list"
    cores = len({_read(cpus / f"cpu{cpu}" / siblings) or str(cpu) for cpu in _fast(set(allowed), root)})
    return max(1, min([cores, *(int(share) for share in _quotas(root))]))


def _fast(allowed: set[int], root: Path) -> set[int]:
    if listed := allowed & _listed(_read(root / "sys/devices/cpu_core/cpus")):
        return listed
    sizes = {cpu: int(_read(root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity") or 0) for cpu in allowed}
    return {cpu for cpu, size in sizes.items() if 3 * size >= 2 * max(sizes.values())}


def _listed(text: str) -> set[int]:
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}


def _quotas(root: Path) -> list[float]:
    """Return the CPUs' worth of time of the control groups (version 2): `docker run --cpus`."""
    groups = [
        line.removeprefix("0::/")
        for line in _read(root / "proc/self/cgroup").splitlines()
        if line[:3] == "0::"
    ]
    places = [place for group in map(PurePosixPath, groups) for place in (group, *group.parents)]
    pairs = [_read(root / "sys/fs/cgroup" / place / "cpu.max").split() for place in places]
    return [int(pair[0]) / int(pair[1]) for pair in pairs if pair and pair[0] != "max"]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _sysctl(name: str, value: Any) -> Any:
    """Return macOS's value of a name, read into a ctypes object; None if there is none."""
    size = ctypes.c_size_t(ctypes.sizeof(value))
    code = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return value.value if code == 0 else None


def cpu_name() -> str:
    """Return the system's name of the CPU, such as "Apple M2", otherwise LLVM's, such as "neoverse-n1"."""
    lines = _read(ROOT / "proc/cpuinfo").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]  # none on ARM
    if sys.platform == "darwin" and (
        brand := _sysctl("machdep.cpu.brand_string", ctypes.create_string_buffer(256))
    ):
        names = [brand.decode()]
    if names:
        return names[0]
    from llvmlite import binding

    return binding.get_host_cpu_name()


def forget_peak() -> None:
    """Reset the peak of `peak_memory` if the system can, as Linux does."""
    with contextlib.suppress(OSError):
        CLEAR.write_text("5")  # proc_pid_clear_refs(5)


def peak_memory() -> int:
    """Return the bytes of the largest resident set; 0 if the system does not say."""
    for line in _read(STATUS).splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def read_bandwidth(threads: int, size: int = READ_BYTES, repetitions: int = 3) -> float:
    """Return the bytes a second that threads read from `size` bytes together, at best."""
    import numpy as np  # its thread pools are sized before it is imported

    def seconds() -> float:
        started = time.perf_counter()
        list(pool.map(np.bitwise_or.reduce, shares))  # without the GIL, as fast as a compiled loop
        return time.perf_counter() - started

    shares = np.array_split(np.ones(size // 8, np.int64), threads)
    with ThreadPoolExecutor(threads) as pool:
        return size / min(seconds() for _ in range(repetitions))


def launched_rank() -> int | None:
    """Return the rank of this process, None if it was started alone."""
    names = RANKS + (SLURM_RANK,) * (_number(SLURM_SIZE) > 1)
    return next((_number(name) for name in names if name in os.environ), None)


def local_rank() -> int:
    """Return the number of this process on its host."""
    return next((_number(name) for name in LOCAL_RANKS if name in os.environ), launched_rank()) or 0


def launched_size() -> int:
    return max(1, *map(_number, (*SIZES, SLURM_SIZE)))


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0
