"""A device without a GPU: the CUDA backend's kernels run in the simulator, and its memory is the host's."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from support.cuda_simulator import Touched, simulate
from tinygpt.kernels.cuda.runtime.jit import DeviceError, need_driver


def why_no_gpu() -> str:
    try:
        need_driver()
    except DeviceError as error:
        return str(error)
    return ""


on_a_gpu = pytest.mark.skipif(bool(why_no_gpu()), reason=why_no_gpu())


class SimulatedDevice:
    """As kernels/cuda/runtime/device.py's Device, and as strict: no empty arrays, and a graph is what was captured."""

    multiprocessors, name = 2, "a simulated GPU"

    def __init__(self, free: int = 1 << 30):
        self._free = free
        self._captured: list[tuple] | None = None  # while a capture is under way
        self.num_captured = self.now = 0  # a launch takes a second, and of a graph each of its own

    def free_bytes(self) -> int:
        return self._free

    def array(self, values: np.ndarray) -> np.ndarray:
        array = self.zeros((max(values.size, 1),), values.dtype)
        self.write(array, values)
        return array

    def zeros(self, shape, dtype) -> np.ndarray:
        assert self._captured is None, "memory cannot be had during a capture"
        return np.zeros(math.prod(shape), dtype)

    def write(self, target: np.ndarray, values: np.ndarray) -> None:
        assert self._captured is None, "nothing can be copied during a capture"
        assert values.size <= target.size
        assert not values.size or values.dtype == target.dtype
        target[: values.size] = values.ravel()

    def read(self, source: np.ndarray) -> np.ndarray:
        assert self._captured is None, "nothing can be copied during a capture"
        return source.copy()

    def read_at(self, mark: int, source: np.ndarray) -> np.ndarray:
        assert mark <= self.now
        return self.read(source)

    def launch(self, kernel, grid, threads: int, *arguments, shared_bytes: int = 0) -> None:
        grid = (grid,) if isinstance(grid, int) else tuple(grid)
        assert min(grid) > 0
        assert max(grid[1:], default=1) < 1 << 16
        for argument in arguments:
            _check_not_empty(argument)
        launch = kernel, grid, threads, arguments, shared_bytes
        if self._captured is None:
            _run(*launch)
            self.now += 1
        else:
            self._captured.append(launch)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1
        self._captured = []
        run()
        launches, self._captured = self._captured, None
        return lambda: self._replay(launches)

    def _replay(self, launches: list[tuple]) -> None:
        """In order; no kernel may rely on that before it has waited for the one before it."""
        written: set[int] = set()
        for number, launch in enumerate(launches):
            touched, name = Touched(is_first=not number), launch[0].py_func.__name__
            _run(*launch, touched)
            assert touched.has_waited, f"{name} ends before the kernels before it do"
            assert not touched.read_early & written, f"{name} reads, before it waits, what a kernel before it writes"
            written |= touched.written
            self.now += 1

    def synchronize(self) -> None:
        assert self._captured is None

    def mark(self) -> int:
        assert self._captured is None, "an event would be part of the graph"
        return self.now

    def seconds(self, first: int, last: int) -> float:
        return float(last - first)


def _run(kernel, grid, threads, arguments, shared_bytes, touched=None) -> None:
    how = {"shared_bytes": shared_bytes, "touched": touched}
    simulate(kernel, grid, threads, *arguments, **how)


def _check_not_empty(argument) -> None:
    for part in argument if isinstance(argument, tuple) else (argument,):
        assert not isinstance(part, np.ndarray) or part.size, "a GPU has no pointers to nothing"
