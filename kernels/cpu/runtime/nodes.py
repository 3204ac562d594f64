"""Memory nodes, such as those of two sockets: which one each thread of a team belongs to, and memory that lies there.

Linux puts a page on the node of the thread that touches it first, and a core reads its own node's memory faster than
another's. As a thread has the same share of a phase in every step, what it reads can lie on its own node. On a machine
with one node, and where the system tells of none, nothing is done.
"""

import contextlib
import mmap
import os
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path("/")  # of what Linux tells in files


def homes_of_threads(threads: int) -> list[frozenset[int]]:
    """The CPUs that each thread of a team stays on, those of its node; empty where there is nothing to choose."""
    if threads == 1 or not hasattr(os, "sched_getaffinity"):
        return []
    nodes = memory_nodes(os.sched_getaffinity(0), ROOT)
    return homes_among(nodes, threads) if len(nodes) > 1 else []


def homes_among(nodes: list[frozenset[int]], threads: int) -> list[frozenset[int]]:
    """Each thread's node. Neighbours share one, and a node has as many threads as befits its part of all CPUs: were
    the first filled up before the next, two small teams would meet there, and leave the others' memory idle."""
    node_of_cpu = [node for node in nodes for _ in node]
    return [node_of_cpu[i * len(node_of_cpu) // threads] for i in range(threads)]


def memory_nodes(allowed: Set[int], root: Path) -> list[frozenset[int]]:
    """The allowed CPUs of each node that has some, in order, on a system whose files are under `root`."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    cpus = [{int(cpu.name.removeprefix("cpu")) for cpu in folder.glob("cpu[0-9]*")} for folder in folders]
    return sorted(filter(None, (frozenset(allowed & of_node) for of_node in cpus)), key=min)


def stay_on(cpus: frozenset[int]) -> None:
    """Keep the calling thread on these CPUs; where the system does not allow it, all is as if there were one node."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, cpus)


def share_of(thread: int, threads: int, items: int) -> range:
    """Which of a phase's items are a thread's own: as `team.py` shares them."""
    return range(-(-thread * items // threads), -(-(thread + 1) * items // threads))


def place(array: np.ndarray, homes: list[frozenset[int]]) -> None:
    """Have an array (layers, items, ...) of zeros that nobody has touched lie with the threads that have its items."""
    pages = array.view(np.uint8).reshape(len(array), -1)  # (layers, bytes)
    items, threads = array.shape[1], len(homes)
    with ThreadPoolExecutor(threads) as pool:
        shares = [share_of(i, threads, items) for i in range(threads)]
        list(pool.map(_touch, homes, [pages] * threads, shares, [pages.shape[1] // items] * threads))


def _touch(home: frozenset[int], pages: np.ndarray, share: range, size: int) -> None:
    stay_on(home)
    pages[:, share.start * size : share.stop * size : mmap.PAGESIZE] = 0
