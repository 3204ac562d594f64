"""The threads that pack, and the memory that they pack into."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tinygpt.kernels.cpu.runtime.nodes import homes_of_threads, place
from tinygpt.kernels.cpu.simd.memory import small_pages, zeros

PACK_SHARES = 16  # of a matrix, for any number of threads to take


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
        # A layer's panels of one node are often less than one of the pages of 2 MB that NumPy would ask for.
        array = small_pages(shape, dtype)
        place(array, self._homes)
        return array
