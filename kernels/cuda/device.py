"""One NVIDIA GPU, its memory and a stream of work that runs in order; and what kernels require of a machine.

Arrays on the device are flat. `read` waits for queued work.
"""

import functools
import math
import re
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import cuda

from ..backend import DeviceError
from .jit import HOPPER

INSTALL = 'pip install "tinygpt[cuda]"'  # as tinygpt.errors
OLDEST = 7, 5  # compute capability of a GPU, of CUDA 13
MAX_GRAPHS = 64  # each keeps some 100 kB of the GPU's memory


@functools.cache
def the_device() -> "Device":
    """Return the GPU that all models of this process share."""
    return Device()


def check_device(number: int = 0) -> None:
    """number: of this process on its host, whose processes share the GPUs."""
    if number:
        need_driver()
        cuda.select_device(number % len(cuda.gpus))
    the_device()


class NewKernel(Exception):
    """A kernel of a capture has not run: it would be compiled and loaded."""


class Device:
    def __init__(self):
        """Raise DeviceError if the GPU, its driver or numba-cuda is missing."""
        need_driver()
        from cuda.bindings import driver
        from numba.cuda.core import config

        config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # a step of one token has small grids

        self._driver = driver
        gpu = cuda.get_current_device()
        self._turn = Turn(gpu.id)
        self._stream = cuda.stream()
        self._stream_handle = int(self._stream)
        self._reading = cuda.stream()
        self._reading_handle = int(self._reading)
        self._granted: dict[Any, int] = {}  # bytes of a launch's shared memory, by kernel that has run
        self._is_capturing = False
        self.name = gpu.name
        self.uuid = gpu.uuid
        self.capability = tuple(gpu.compute_capability[:2])
        self.multiprocessors = gpu.MULTIPROCESSOR_COUNT
        self.shared_bytes = gpu.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        self._reads_the_host = bool(gpu.PAGEABLE_MEMORY_ACCESS or gpu.INTEGRATED)

    def free_bytes(self) -> int:
        with self._turn:
            context = cuda.current_context()
            context.memory_manager.deallocations.clear()  # Numba frees arrays in tens
            return context.get_memory_info().free

    def array(self, values: np.ndarray) -> Any:
        """Return a flat copy of at least one element: an empty array has no pointer."""
        array = self.zeros((max(values.size, 1),), values.dtype)
        self.write(array, values)
        return array

    def zeros(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return flat zeros. Raise MemoryError if the GPU has no room."""
        from numba.cuda.cudadrv.driver import CudaAPIError, device_memset

        size = math.prod(shape)
        with self._turn:
            try:
                array = cuda.device_array(size, dtype, stream=self._stream)
            except CudaAPIError as error:
                raise MemoryError(
                    f"the GPU cannot give {size * np.dtype(dtype).itemsize} bytes: {error}"
                ) from error
            device_memset(array, 0, array.nbytes, self._stream)
        weakref.finalize(array, self._turn.attach)  # the thread that frees it may have no context
        return array

    def write(self, target: Any, values: np.ndarray, at: int = 0) -> None:
        """Set target[at : at + values.size]. The values may change after the return."""
        values = np.ascontiguousarray(values, target.dtype)
        if values.size:
            places = self._address(target, at, values.size), values.ctypes.data
            with self._turn:
                _checked(self._driver.cuMemcpyHtoDAsync(*places, values.nbytes, self._stream_handle))
                if self._reads_the_host:  # else the driver has copied the values to memory of its own
                    self._stream.synchronize()

    def read(self, source: Any, count: int | None = None, at: int = 0) -> np.ndarray:
        with self._turn:
            return self._read(self._stream_handle, source, count, at)

    def read_at(self, mark: Any, source: Any, count: int | None = None, at: int = 0) -> np.ndarray:
        """Read after a mark. Work after the mark must not change what is read."""
        with self._turn:
            _checked(self._driver.cuStreamWaitEvent(self._reading_handle, mark.handle, 0))
            return self._read(self._reading_handle, source, count, at)

    def _read(self, stream: int, source: Any, count: int | None, at: int) -> np.ndarray:
        values = np.empty(source.size - at if count is None else count, source.dtype)
        places = values.ctypes.data, self._address(source, at, values.size)
        _checked(self._driver.cuMemcpyDtoHAsync(*places, values.nbytes, stream))
        _checked(self._driver.cuStreamSynchronize(stream))
        return values

    def _address(self, array: Any, at: int, count: int) -> int:
        if at + count > array.size:
            raise ValueError(f"an array of {array.size} has no {count} numbers from {at} on.")
        return array.device_ctypes_pointer.value + at * array.dtype.itemsize

    def launch(
        self, kernel: Any, grid: int | Sequence[int], threads: int, *arguments: Any, shared_bytes: int = 0
    ) -> None:
        arguments = tuple(map(_narrowed, arguments))
        grid = (grid,) if isinstance(grid, int) else tuple(grid)
        with self._turn:
            if shared_bytes > self._granted.get(kernel, -1):
                if self._is_capturing:
                    raise NewKernel
                if shared_bytes:
                    self._grant(kernel, arguments, shared_bytes)
            kernel[grid, threads, self._stream, shared_bytes](*arguments)
            self._granted[kernel] = max(self._granted.get(kernel, 0), shared_bytes)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that queues the launches of `run`. Raise NewKernel if a kernel has not run before."""
        driver = self._driver
        stream = driver.CUstream(self._stream_handle)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        # Numba may free memory at any time, which would break a capture.
        with self._turn, cuda.defer_cleanup(), ExitStack() as after:
            _checked(driver.cuStreamBeginCapture(stream, mode))
            self._is_capturing = True
            try:
                run()
            finally:
                self._is_capturing = False
                graph = _checked(driver.cuStreamEndCapture(stream))
                after.callback(driver.cuGraphDestroy, graph)
            if self.capability >= HOPPER:
                let_kernels_begin_early(graph)
            executable = _checked(driver.cuGraphInstantiate(graph, 0))
        return CapturedWork(executable, stream, self._turn)

    def synchronize(self) -> None:
        with self._turn:
            self._stream.synchronize()

    def mark(self, event: Any = None) -> Any:
        """Record an event, or a new one, after the work that is queued."""
        with self._turn:
            if event is None:
                event = cuda.event(timing=True)
                weakref.finalize(event, self._turn.attach)  # as of an array
            _checked(self._driver.cuEventRecord(event.handle, self._stream_handle))
        return event

    def seconds(self, first: Any, last: Any) -> float:
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def _grant(self, kernel: Any, arguments: tuple, shared_bytes: int) -> None:
        """Raise the limit of dynamic shared memory, 48 KiB minus the kernel's static shared memory."""
        from numba import typeof

        driver = self._driver
        function = kernel.compile(tuple(map(typeof, arguments)))._codelibrary.get_cufunc()
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = _checked(driver.cuCtxGetDevice())
        _checked(driver.cuKernelSetAttribute(attribute, shared_bytes, function.handle, device))


class Turn:
    """A GPU's lock, within which a thread has the GPU's context. Another thread must not add to a capture."""

    def __init__(self, gpu: int):
        self._gpu = gpu
        self._lock = threading.RLock()
        self._threads = threading.local()

    def __enter__(self) -> None:
        self.attach()
        self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self._lock.release()

    def attach(self) -> None:
        if not hasattr(self._threads, "gpu"):  # asking for it takes longer than a copy
            self._threads.gpu = cuda.select_device(self._gpu)


@dataclass
class Graphs:
    """Steps, captured at the first of a kind, or after it if it has kernels to compile."""

    device: Any
    _captured: dict[Hashable, Callable[[], None]] = field(default_factory=dict)

    def run(self, kind: Hashable, step: Callable[[], None], times: int = 1) -> None:
        """Queue the launches of `step` some times, the same in every step of this kind."""
        for _ in range(times):
            with suppress(NewKernel):
                self._captured[kind] = self._captured.pop(kind, None) or self.device.capture(step)
            self._captured.get(kind, step)()
            if len(self._captured) > MAX_GRAPHS:
                del self._captured[next(iter(self._captured))]  # used longest ago


def let_kernels_begin_early(graph: Any) -> None:
    """Let each kernel begin when the one before calls `let_next_kernel_begin`, unless the driver refuses."""
    from cuda.bindings import driver

    *_, count = _checked(driver.cuGraphGetEdges(graph))
    if not count:
        return
    before, after, plain, _ = _checked(driver.cuGraphGetEdges(graph, count))
    early = driver.CUgraphEdgeData()
    early.type = int(driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
    early.from_port = driver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
    _checked(driver.cuGraphRemoveDependencies(graph, before, after, plain, count))
    (refused,) = driver.cuGraphAddDependencies(graph, before, after, [early] * count, count)
    if refused.value:
        _checked(driver.cuGraphAddDependencies(graph, before, after, plain, count))


class CapturedWork:
    def __init__(self, executable: Any, stream: Any, turn: "Turn"):
        from cuda.bindings import driver

        self._launch = driver.cuGraphLaunch
        self._executable = executable
        self._stream = stream
        self._turn = turn
        weakref.finalize(self, driver.cuGraphExecDestroy, executable)

    def __call__(self) -> None:
        with self._turn:
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
    error, *values = answer
    if error.value:
        raise RuntimeError(f"CUDA's driver says {error.name}.")
    return tuple(values) if len(values) > 1 else values[0] if values else None


def need_driver() -> None:
    """Raise DeviceError, which names the missing part, if kernels cannot run here."""
    try:
        import numba_cuda  # noqa: F401 (numba's CUDA target lacks functions that the kernels use)
        from cuda.bindings import nvjitlink  # noqa: F401
    except ImportError:
        raise DeviceError(f"numba-cuda is not installed: {INSTALL}.") from None
    from numba.cuda.cudadrv import driver

    if not driver.driver.is_available or not len(cuda.gpus):
        raise DeviceError("CUDA finds no NVIDIA GPU with a driver of version 580 or later.")
    need_compilers()
    need_capability(cuda.get_current_device().compute_capability)


def need_capability(capability: tuple, oldest: tuple = OLDEST, dtype: str = "float32") -> None:
    """Raise DeviceError if a GPU is too old for the kernels of a dtype."""
    if tuple(capability[:2]) < oldest:
        found, needed = (".".join(map(str, pair[:2])) for pair in (capability, oldest))
        raise DeviceError(
            f"dtype {dtype!r} needs compute capability {needed} or more, and the GPU has {found}."
        )


def need_compilers() -> None:
    """Raise DeviceError if a library is missing, or the linker is older than libNVVM."""
    from cuda.bindings import nvjitlink
    from numba.cuda.cudadrv import libs, nvvm

    if not _answer_of(nvvm.is_available):
        # numba-cuda searches CUDA_HOME/nvvm/lib64 alone.
        elsewhere = "or name the folder of libnvvm.so in LD_LIBRARY_PATH"
        raise DeviceError(f"libNVVM, which compiles kernels, is not found: {INSTALL}, {elsewhere}.")
    if libs.get_libdevice() is None:
        elsewhere = "or set CUDA_HOME to a folder that has nvvm/libdevice"
        raise DeviceError(f"libdevice.10.bc, part of libNVVM, is not found: {INSTALL}, {elsewhere}.")
    linker = _answer_of(nvjitlink.version)
    if not linker:
        raise DeviceError(f"nvJitLink, which links kernels, is not found: {INSTALL}.")
    compiler = release_of_libnvvm()
    if compiler > linker:
        newer, older = (".".join(map(str, release)) for release in (compiler, linker))
        raise DeviceError(
            f"libNVVM is of CUDA {newer} and nvJitLink of {older}, which cannot link code of a later compiler: "
            f"pip install 'nvidia-nvvm=={older}.*'."
        )


def release_of_libnvvm() -> tuple[int, int]:
    """Return libNVVM's CUDA release, from compiled PTX: `nvvm.version` is its interface's."""
    from cuda.bindings import nvvm
    from numba.cuda.cudadrv.nvvm import NVVM

    version = ", ".join(f"i32 {number}" for number in nvvm.ir_version())
    target = f'target datalayout = "{NVVM().data_layout}"\ntarget triple = "nvptx64-nvidia-cuda"'
    text = f"{target}\n!nvvmir.version = !{{!0}}\n!0 = !{{{version}}}\n".encode()
    program = nvvm.create_program()
    try:
        nvvm.add_module_to_program(program, text, len(text), "empty")
        nvvm.compile_program(program, 0, [])
        ptx = bytearray(nvvm.get_compiled_result_size(program))
        nvvm.get_compiled_result(program, ptx)
    finally:
        nvvm.destroy_program(program)
    return tuple(map(int, re.search(rb"release (\d+)\.(\d+)", ptx).groups()))


def _answer_of(ask):
    try:
        return ask()
    except RuntimeError:  # the base class of cuda-pathfinder's error
        return None
