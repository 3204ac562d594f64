"""How many threads compute, one number for every pool, and how many cores there are for them."""

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
        return logical_cores()
    return len({_siblings(cpu) for cpu in os.sched_getaffinity(0)})


def logical_cores() -> int:
    """Cores this process may run on, each hyper-thread counted."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _siblings(cpu: int) -> str:
    try:
        with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
            return file.read()
    except OSError:
        return str(cpu)
