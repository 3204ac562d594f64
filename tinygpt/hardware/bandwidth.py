"""How fast this machine reads memory: what bounds the speed of a model that decodes one sequence."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

READ_BYTES = 512 << 20  # far more than any cache


def read_bandwidth(threads: int, size: int = READ_BYTES, repetitions: int = 3) -> float:
    """Bytes a second that `threads` threads read from `size` bytes together, the best of some repetitions.

    NumPy's reduction holds no GIL and reads as fast as a compiled loop.
    """
    shares = np.array_split(np.ones(size // 8, np.int64), threads)
    with ThreadPoolExecutor(threads) as pool:
        return size / min(_seconds(pool, shares) for _ in range(repetitions))


def _seconds(pool: ThreadPoolExecutor, shares: list[np.ndarray]) -> float:
    started = time.perf_counter()
    list(pool.map(np.bitwise_or.reduce, shares))
    return time.perf_counter() - started
