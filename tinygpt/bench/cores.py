"""Whether threads have a core each: where they do not, they wait for one another."""

import os


def logical_cores() -> int:
    """Cores this process may run on, hyper-threads counted each."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def crowd_note(threads: int) -> str:
    """What a reader of the figures has to know, if anything."""
    cores = logical_cores()
    return f"{threads} threads share {cores} logical core{'s' * (cores > 1)}" if threads > cores else ""
