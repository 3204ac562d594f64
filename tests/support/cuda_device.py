"""A device without a GPU, whose kernels' PTX runs in memory of the host. Arguments of its linear layers."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from support import cuda_compile
from support.ptx_machine import Touched, simulate
from tinygpt.kernels.backend import DeviceError
from tinygpt.kernels.cuda.device import NewKernel, need_driver
from tinygpt.kernels.cuda.jit import HOPPER
from tinygpt.kernels.cuda.layers.epilogue import ADD, LOGITS, QKV, Heads
from tinygpt.kernels.cuda.layers.linear import LINEAR_THREADS, linear_kernel, max_octets, steps_ahead
from tinygpt.kernels.cuda.params import DTYPES, STEP, Weights, pack, panel_count, step_count


def why_no_gpu() -> str:
    try:
        need_driver()
    except DeviceError as error:
        return str(error)
    return ""


on_a_gpu = pytest.mark.skipif(bool(why_no_gpu()), reason=why_no_gpu())


class SimulatedDevice:
    """As kernels/cuda/device.py's Device, and as strict: no empty arrays, and a graph is what was captured."""

    multiprocessors, name = 2, "a simulated GPU"

    def __init__(self, free: int = 1 << 30):
        self._free, self.uuid = free, id(self)
        self.capability = cuda_compile.ARCHITECTURE[:2]
        self.shared_bytes = (227 if self.capability == HOPPER else 99) << 10
        self._captured: list[partial] | None = None  # while a capture is under way
        self._known: dict = {}  # kernels that have run, and for which arguments
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

    def write(self, target: np.ndarray, values: np.ndarray, at: int = 0) -> None:
        assert self._captured is None, "nothing can be copied during a capture"
        assert at + values.size <= target.size
        assert not values.size or values.dtype == target.dtype
        target[at : at + values.size] = values.ravel()

    def read(self, source: np.ndarray, count: int | None = None, at: int = 0) -> np.ndarray:
        assert self._captured is None, "nothing can be copied during a capture"
        stop = source.size if count is None else at + count
        assert stop <= source.size
        return source[at:stop].copy()

    def read_at(self, mark: list[int], source: np.ndarray, *part: int) -> np.ndarray:
        assert mark[0] <= self.now
        return self.read(source, *part)

    def launch(self, kernel, grid, threads: int, *arguments, shared_bytes: int = 0) -> None:
        grid = (grid,) if isinstance(grid, int) else tuple(grid)
        assert min(grid) > 0
        assert max(grid[1:], default=1) < 1 << 16
        for argument in arguments:
            for part in argument if isinstance(argument, tuple) else (argument,):
                assert not isinstance(part, np.ndarray) or part.size, "a GPU has no pointers to nothing"
        launch = partial(simulate, kernel, grid, threads, *arguments, shared_bytes=shared_bytes)
        if self._captured is None:
            launch()
            signature = cuda_compile.signature_of(arguments)
            known = self._known.setdefault(kernel, signature)
            assert known == signature, "for other arguments it would be compiled during a capture"
            self.now += 1
        elif kernel not in self._known:
            raise NewKernel
        else:
            self._captured.append(launch)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        launches = self._captured = []
        try:
            run()
        finally:
            self._captured = None
        self.num_captured += 1
        return lambda: self._replay(launches)

    def _replay(self, launches: list[partial]) -> None:
        """In order; no kernel may rely on that before it has waited for the one before it."""
        written: set[int] = set()
        for number, launch in enumerate(launches):
            is_alone = not number or self.capability < HOPPER  # no kernel before it is under way
            touched = Touched(is_alone)
            name = launch.args[0].py_func.__name__
            launch(touched=touched)
            assert touched.has_waited, f"{name} ends before the kernels before it do"
            assert not touched.read_early & written, (
                f"{name} reads, before it waits, what a kernel before it writes"
            )
            written |= touched.written
            self.now += 1

    def synchronize(self) -> None:
        assert self._captured is None

    def mark(self, event: list[int] | None = None) -> list[int]:
        assert self._captured is None, "an event would be part of the graph"
        event = [0] if event is None else event
        event[0] = self.now
        return event

    def seconds(self, first: list[int], last: list[int]) -> float:
        return float(last[0] - first[0])


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Activations (n, K) as the kernels of a dtype keep them, K filled up with zeros; flat."""
    padded = np.zeros((len(values), step_count(values.shape[1]) * STEP), np.float32)
    padded[:, : values.shape[1]] = values
    return DTYPES[dtype].numbers.encode(padded).ravel()


def packed(weight: np.ndarray, bias: np.ndarray, dtype: str) -> Weights:
    """weight (L, features, K)."""
    parts = [pack(of_layer, dtype) for of_layer in weight]
    panels, scales = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    _, features, k = weight.shape
    return Weights(panels, scales, bias.ravel(), panel_count(features), step_count(k), features)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def run_linear(target, inputs, weights, layer, width, count, dtype, octets, epilogue):
    octets = min(octets, max_octets(dtype))
    grid = (weights.num_panels, math.ceil(count / (8 * octets)))
    sizes = np.array([0, count], np.int32)
    kernel = linear_kernel(dtype, octets, epilogue, steps_ahead(dtype, octets, weights.num_steps))
    simulate(kernel, grid, LINEAR_THREADS, target, inputs, weights, layer, width, sizes, 1)


def heads_of(
    dtype: str, count: int, slots: int, length: int, heads: int, size: int, positions, token_slots
) -> Heads:
    padded = -(-size // 32) * 32
    kind = DTYPES[dtype].numbers.array_type
    q = np.zeros(count * heads * padded, kind)
    cache = 2 * slots * heads * length * padded
    places = np.array(positions, np.int32), np.array(token_slots, np.int32)
    return Heads(q, np.zeros(cache, kind), np.zeros(cache, kind), *places, slots, length, heads, size, padded)


FLOATS = np.zeros(8, np.float32)
INTS = np.zeros(8, np.int32)


def sample_arguments(dtype: str, epilogue: str):
    activations = np.zeros(8, DTYPES[dtype].numbers.array_type)
    heads = Heads(activations, activations, activations, INTS, INTS, 1, 1, 1, 1, 1)
    target = {ADD: FLOATS, LOGITS: FLOATS, QKV: heads}.get(epilogue, activations)
    panels = np.zeros(8, DTYPES[dtype].array_type)
    return target, activations, Weights(panels, FLOATS, FLOATS, 1, 1, 1)
