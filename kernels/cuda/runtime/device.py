"""Device: one NVIDIA GPU, a stream of work on it, and its memory. All that CUDA's driver is asked goes through it.

Arrays on the device are flat. Work is queued and done in order; `read` waits for it.
"""

import functools
import math
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinygpt.kernels.cuda.runtime.jit import need_driver


@functools.cache
def the_device() -> "Device":
    """The GPU that all models of this process share. DeviceError if there is none that will do."""
    return Device()


def check_device() -> None:
    """DeviceError unless there is a GPU that the kernels run on, and all that they need."""
    the_device()


class Device:
    """The first GPU that the driver shows. DeviceError if there is none, or no driver, or no numba-cuda."""

    def __init__(self):
        need_driver()
        from numba import cuda
        from numba.cuda.core import config

        config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # a step of one token has small grids, as it should

        self._cuda = cuda
        self._lock = threading.RLock()  # what one thread captures, another must not add to
        self._stream, self._reading = cuda.stream(), cuda.stream()
        self._granted: dict[Any, int] = {}  # bytes of a launch's shared memory, by kernel
        gpu = cuda.get_current_device()
        self.multiprocessors, self.name = (
            gpu.MULTIPROCESSOR_COUNT,
            gpu.name if isinstance(gpu.name, str) else gpu.name.decode(),
        )

    def free_bytes(self) -> int:
        return self._cuda.current_context().get_memory_info().free

    def array(self, values: np.ndarray) -> Any:
        """A flat copy on the device. An empty one has an element, as there are no pointers to nothing."""
        array = self.zeros((max(values.size, 1),), values.dtype)
        self.write(array, values)
        return array

    def zeros(self, shape: Sequence[int], dtype: Any) -> Any:
        """Zeros, flat. MemoryError if the GPU has no room for them."""
        from numba.cuda.cudadrv.driver import CudaAPIError, device_memset

        size = math.prod(shape)
        with self._lock:
            try:
                array = self._cuda.device_array(size, dtype, stream=self._stream)
            except CudaAPIError as error:
                raise MemoryError(f"the GPU cannot give {size * np.dtype(dtype).itemsize} bytes: {error}") from error
            device_memset(array, 0, array.nbytes, self._stream)
        return array

    def write(self, target: Any, values: np.ndarray) -> None:
        """Copy values to the front of an array; they may change as soon as this returns."""
        if values.size:
            with self._lock:
                target[: values.size].copy_to_device(np.ascontiguousarray(values).ravel(), self._stream)

    def read(self, source: Any) -> np.ndarray:
        with self._lock:
            values = source.copy_to_host(stream=self._stream)
            self._stream.synchronize()
        return values

    def read_at(self, mark: Any, source: Any) -> np.ndarray:
        """As `read`, without a wait for what was queued after a mark, which leaves `source` as it is."""
        with self._lock:
            mark.wait(self._reading)
            values = source.copy_to_host(stream=self._reading)
            self._reading.synchronize()
        return values

    def launch(
        self,
        kernel: Any,
        grid: int | Sequence[int],
        threads: int,
        *arguments: Any,
        shared_bytes: int = 0,
    ) -> None:
        """Queue a kernel. Python's numbers arrive as int32 and float32."""
        arguments = tuple(map(_narrowed, arguments))
        grid = (grid,) if isinstance(grid, int) else tuple(grid)
        with self._lock:
            if shared_bytes > self._granted.get(kernel, 0):
                self._grant(kernel, arguments, shared_bytes)
            kernel[grid, threads, self._stream, shared_bytes](*arguments)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """What `run` would queue, as a CUDA graph: a function that queues all of it at once.

        `run` launches kernels that have run before, and does nothing else. In the graph a kernel begins as soon as the
        one before lets it (`let_next_kernel_begin`), and has to wait for that one itself (`wait_for_kernel_before`).
        """
        from cuda.bindings import driver

        stream = driver.CUstream(int(self._stream))
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        # Numba may give memory back at any time, which a capture does not bear.
        with self._lock, self._cuda.defer_cleanup():
            _checked(driver.cuStreamBeginCapture(stream, mode))
            try:
                run()
            finally:
                graph = _checked(driver.cuStreamEndCapture(stream))
            let_kernels_begin_early(graph)
            executable = _checked(driver.cuGraphInstantiate(graph, 0))
            _checked(driver.cuGraphDestroy(graph))
        return CapturedWork(executable, stream, self._lock)

    def synchronize(self) -> None:
        with self._lock:
            self._stream.synchronize()

    def mark(self) -> Any:
        """A moment of the queue: when all that is in it now has been done."""
        with self._lock:
            event = self._cuda.event(timing=True)
            event.record(self._stream)
        return event

    def seconds(self, first: Any, last: Any) -> float:
        """Between two marks, by the GPU's clock. Waits for the last."""
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def _grant(self, kernel: Any, arguments: tuple, shared_bytes: int) -> None:
        """Let launches have so much. Without that it is 48 KiB less what the kernel has of its own."""
        from cuda.bindings import driver
        from numba import typeof

        function = kernel.compile(tuple(map(typeof, arguments)))._codelibrary.get_cufunc()
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = _checked(driver.cuCtxGetDevice())
        _checked(driver.cuKernelSetAttribute(attribute, shared_bytes, function.handle, device))
        self._granted[kernel] = shared_bytes


def let_kernels_begin_early(graph: Any) -> None:
    """Make each kernel's dependence on the one before programmatic: what CUDA calls programmatic dependent launch."""
    from cuda.bindings import driver

    *_, count = _checked(driver.cuGraphGetEdges(graph))
    if not count:
        return
    before, after, plain, _ = _checked(driver.cuGraphGetEdges(graph, count))
    early = driver.CUgraphEdgeData()
    early.type = int(driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
    early.from_port = driver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
    _checked(driver.cuGraphRemoveDependencies(graph, before, after, plain, count))
    _checked(driver.cuGraphAddDependencies(graph, before, after, [early] * count, count))


class CapturedWork:
    """A CUDA graph; called, it is queued. It is given back with the last reference."""

    def __init__(self, executable: Any, stream: Any, lock: threading.RLock):
        from cuda.bindings import driver

        self._launch, self._executable, self._stream, self._lock = driver.cuGraphLaunch, executable, stream, lock
        weakref.finalize(self, driver.cuGraphExecDestroy, executable)

    def __call__(self) -> None:
        with self._lock:
            _checked(self._launch(self._executable, self._stream))


def _narrowed(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return type(argument)(*map(_narrowed, argument))
    if isinstance(argument, bool | np.generic):
        return argument
    if isinstance(argument, int):
        return np.int32(argument)
    return np.float32(argument) if isinstance(argument, float) else argument


def _checked(answer: tuple) -> Any:
    """The driver's answer, a tuple if it has several parts; what comes before it says whether it worked."""
    error, *values = answer
    if error.value:
        raise RuntimeError(f"CUDA's driver says {error.name}.")
    return tuple(values) if len(values) > 1 else values[0] if values else None


@dataclass(frozen=True)
class Parts:
    """Each part's length and dtype, by its name. Those of larger items come first, so that all lie on boundaries."""

    shapes: dict[str, tuple[int, Any]]

    @property
    def num_bytes(self) -> int:
        return sum(length * np.dtype(dtype).itemsize for length, dtype in self.shapes.values())

    def split(self, whole: Any) -> dict[str, Any]:
        """Views of an array of num_bytes uint8."""
        found, start = {}, 0
        for name, (length, dtype) in self.shapes.items():
            stop = start + length * np.dtype(dtype).itemsize
            found[name], start = whole[start:stop].view(dtype), stop
        return found

    def join(self, values: dict[str, np.ndarray]) -> np.ndarray:
        """The array of num_bytes uint8 in which each part begins with its values and goes on with zeros."""
        whole = np.zeros(self.num_bytes, np.uint8)
        for name, part in self.split(whole).items():
            given = np.ravel(values[name])
            part[: given.size] = given
        return whole


MAX_GRAPHS = 64  # each keeps some 100 kB of the GPU's memory


@dataclass
class Graphs:
    """The first step of a kind queues its kernels one by one, and so compiles them; the second is captured."""

    device: Any
    _captured: dict[Hashable, Callable[[], None] | None] = field(default_factory=dict)

    def run(self, kind: Hashable, step: Callable[[], None]) -> None:
        """Queue what `step` queues, which is the same for every step of this kind."""
        if kind not in self._captured:
            step()
            while len(self._captured) >= MAX_GRAPHS:
                del self._captured[next(iter(self._captured))]  # the oldest
            self._captured[kind] = None
            return
        if self._captured[kind] is None:
            self._captured[kind] = self.device.capture(step)
        self._captured[kind]()
