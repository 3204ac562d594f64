"""Compilation of CUDA kernels, their files on disk, and a machine's requirements.

Three modules use what numba-cuda does not promise: this one the dispatcher's `_cache`, `_Kernel._rebuild` and
`_reduce_states`, `serialize`, `cudadrv.libs` and `cudadrv.nvvm`; ptx.py `intrinsic`, llvmlite's builder, `cgutils` and
`ConfigStack`; device.py `compile`, `_codelibrary.get_cufunc`, `device_memset` and `config`.
"""

import functools
import hashlib
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from numba import cuda

from ...backend import DeviceError
from ...kernel_cache import KernelCache, fingerprint, open_cache

INSTALL = 'pip install "tinygpt[cuda]"'  # as tinygpt.errors
# Compute capability: the oldest of CUDA 13; the first with mma of bfloat16 and cp.async.
OLDEST = {"float32": (7, 5), "bfloat16": (8, 0), "int8": (8, 0)}
SOURCES = Path(__file__).resolve().parents[1]
COMPILERS = ("numba", "numba-cuda", "llvmlite", "cuda-bindings", "cuda-core")


def kernel(function, threads=None):
    """Compile a kernel, once on a machine. It may fuse a product and a sum: to agree to the bit, call `cuda.fma`.

    threads: of a block, if the compiler would otherwise give each too many registers.
    """
    compiled = cuda.jit(launch_bounds=threads)(function)
    compiled._cache = DiskCache(function)
    return compiled


def device_function(function):
    return cuda.jit(function, device=True, forceinline=True)


def unrolled(step: Callable, count: int, first: int = 0):
    """Return a device function that calls step(i, ...) for `count` i: LLVM leaves long loops, and arrays in memory."""
    if count == 1:
        return device_function(lambda *arguments: step(first, *arguments))
    low = unrolled(step, count // 2, first)
    high = unrolled(step, count - count // 2, first + count // 2)

    def call(*arguments):
        low(*arguments)
        high(*arguments)

    return device_function(call)


class DiskCache:
    """numba-cuda's interface to saved kernels. A file's name covers the values that a kernel closes over."""

    def __init__(self, function: Callable):
        self._function = function

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        from numba.cuda.dispatcher import _Kernel

        kernel = kernel_cache().load(self._name(signature), lambda states: _Kernel._rebuild(**states))
        if kernel is None:
            kernel_cache().announce(self._function.__name__)
        return kernel

    def save_overload(self, signature: Any, kernel: Any) -> None:
        from numba.cuda.serialize import dumps

        kernel_cache().save(self._name(signature), lambda: dumps(kernel._reduce_states()))

    def flush(self) -> None:
        """Do nothing: an existing file is valid."""

    def _name(self, signature: Any) -> str:
        capability = cuda.get_current_device().compute_capability
        known = f"{describe(self._function)} {signature} {tuple(capability)}"
        digest = hashlib.sha256(known.encode()).hexdigest()[:32]
        return f"{self._function.__name__}-{digest}.kernel"


def describe(function: Callable) -> str:
    """Return a function's name and place, and its closure in brackets."""
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    held = [describe(value.py_func) if hasattr(value, "py_func") else repr(value) for value in values]
    place = f"{function.__module__}.{function.__qualname__}:{function.__code__.co_firstlineno}"
    return f"{place}({', '.join(held)})"


@functools.cache
def kernel_cache() -> KernelCache:
    build = [metadata.version(name) for name in COMPILERS], sys.version, __debug__
    return open_cache(f"cuda-{fingerprint(SOURCES, build)}")


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


def need_capability(capability: tuple, dtype: str = "float32") -> None:
    """Raise DeviceError if a GPU is too old for the kernels of a dtype."""
    if tuple(capability[:2]) < OLDEST[dtype]:
        found, needed = (".".join(map(str, pair[:2])) for pair in (capability, OLDEST[dtype]))
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
