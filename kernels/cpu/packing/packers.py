"""The threads that pack, and the memory that they pack into."""

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tinygpt.kernels.cpu.runtime.nodes import homes_of_threads, place
from tinygpt.kernels.cpu.simd.memory import untouched, zeros

PACK_SHARES = 16  # of a matrix, for any number of threads to take
# What a layer has on one node, in bytes, to be in pages of 2 MB. With small ones more of it is near, but a core reads
# them up to 20 % more slowly.
HUGE_ENOUGH = 8 << 20


class Packers:
    """As many threads as the team that will read what they pack. A context: at its end they are gone."""

    def __init__(self, threads: int):
        self._pool, self._homes = ThreadPoolExecutor(threads), homes_of_threads(threads)

    def __enter__(self) -> "Packers":
        return self

    def __exit__(self, *error) -> None:
        self._pool.shutdown()

    def pack(self, kernel: Callable, panels: int, *arguments) -> None:
        """kernel(*arguments, first, last) for all panels, in shares."""
        bounds = [i * panels // PACK_SHARES for i in range(PACK_SHARES + 1)]
        for share in [self._pool.submit(kernel, *arguments, *pair) for pair in itertools.pairwise(bounds)]:
            share.result()

    def zeros(self, shape: tuple[int, ...], dtype) -> np.ndarray:
        """(layers, panels, ...): where a team of so many threads will read it."""
        return placed_zeros(shape, dtype, self._homes)


def placed_zeros(shape: tuple[int, ...], dtype, homes: list[frozenset[int]]) -> np.ndarray:
    """(layers, panels, ...): on the memory nodes of a team's threads, if there are several."""
    if not homes or 0 in shape:
        return zeros(shape, dtype)
    array = untouched(shape, dtype, takes_huge_pages(shape, dtype, len({*homes})))
    place(array, homes)
    return array


def takes_huge_pages(shape: tuple[int, ...], dtype, nodes: int) -> bool:
    """Whether a weight (layers, panels, ...) on so many memory nodes lies in pages of 2 MB."""
    return math.prod(shape[1:]) * np.dtype(dtype).itemsize >= nodes * HUGE_ENOUGH
