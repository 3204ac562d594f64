"""How many threads compute: one number for every pool."""

import os
from typing import Any

from tinygpt.errors import RequestError

MAX_THREADS = 1024


def thread_count(threads: Any = None) -> int:
    """`threads` checked, or the number of physical cores this process may use. RequestError if impossible."""
    if threads is None:
        return physical_cores()
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
        raise RequestError(f"threads is {threads!r} and must be a whole number from 1 to {MAX_THREADS}.")
    return threads


def physical_cores() -> int:
    """Cores this process may run on, hyper-threads counted once where the system tells them apart."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    return len({_siblings(cpu) for cpu in allowed})


def _siblings(cpu: int) -> str:
    try:
        with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
            return file.read()
    except OSError:
        return str(cpu)
