"""The threads that pack, and the memory that they pack into."""

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tinygpt.kernels.cpu.runtime.nodes import homes_of_threads, place
from tinygpt.kernels.cpu.simd.memory import untouched, zeros

PACK_SHARES = 16  # of a matrix, for any number of threads to take
# What a layer has on one node, in bytes, to be in pages of 2 MB. Some of them lie across two nodes, and one core reads
# from small pages 15 to 20 % more slowly.
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
        """(layers, panels, ...): on the memory nodes of the threads of a team that will read it."""
        if not self._homes:
            return zeros(shape, dtype)
        array = untouched(shape, dtype, takes_huge_pages(shape, dtype, len({*self._homes})))
        place(array, self._homes)
        return array


def takes_huge_pages(shape: tuple[int, ...], dtype, nodes: int) -> bool:
    """Whether a weight (layers, panels, ...) on so many memory nodes lies in pages of 2 MB."""
    return math.prod(shape[1:]) * np.dtype(dtype).itemsize >= nodes * HUGE_ENOUGH
