"""A device that has no card: the CUDA backend's kernels run in the simulator, and its memory is the host's."""

import math
from collections.abc import Callable

import numpy as np
from cuda_simulator import simulate


class SimulatedDevice:
    """As tinygpt.kernels.cuda.device.Device."""

    name, multiprocessors = "simulated", 2

    def __init__(self, free: int = 1 << 30):
        self._free = free
        self.num_launches = self.num_captured = 0

    def free_bytes(self) -> int:
        return self._free

    def array(self, values: np.ndarray) -> np.ndarray:
        return np.array(values).ravel()

    def zeros(self, shape, dtype) -> np.ndarray:
        return np.zeros(math.prod(shape), dtype)

    def write(self, target: np.ndarray, values: np.ndarray) -> None:
        assert values.size <= target.size
        assert not values.size or values.dtype == target.dtype
        target[: values.size] = values.ravel()

    def read(self, source: np.ndarray) -> np.ndarray:
        return source.copy()

    def launch(self, kernel, grid, threads: int, *arguments, shared_bytes: int = 0, cooperative: bool = False) -> None:
        self.num_launches += 1
        simulate(kernel, grid, threads, *arguments, shared_bytes=shared_bytes, cooperative=cooperative)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1
        return run

    def synchronize(self) -> None:
        pass
