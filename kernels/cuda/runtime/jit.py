"""The one place that declares how CUDA kernels are compiled, and that asks whether they can run."""

import re

import numpy as np

if not hasattr(np, "row_stack"):  # numba-cuda asks NumPy 2.5 for a name that is gone
    np.row_stack = np.vstack

from numba import cuda

from tinygpt.kernels.backend import DeviceError
from tinygpt.kernels.cuda.runtime.disk_cache import DiskCache

INSTALL = 'pip install "tinygpt[cuda]" (or pip install ".[cuda]" in a clone)'  # as tinygpt.errors
OLDEST = (9, 0)  # compute capability: cp.async.bulk; and no older GPU was ever tried


def kernel(function):
    """A function that a grid of blocks runs; compiled for the types of its arguments, once on a machine.

    Arithmetic is strict but for what the compiler always does: it may fuse a product and the sum that takes it. Where
    two kernels must agree to the bit, both say `cuda.fma` themselves.
    """
    compiled = cuda.jit(function)
    compiled._cache = DiskCache(function)
    return compiled


def device_function(function):
    """A function that kernels call, and that becomes part of them."""
    return cuda.jit(function, device=True, forceinline=True)


def need_driver() -> None:
    """DeviceError, saying what is missing, unless kernels can be compiled and run here."""
    try:
        import numba_cuda  # noqa: F401 (numba's own CUDA target lacks what the kernels use)
        from cuda.bindings import nvjitlink  # noqa: F401
    except ImportError:
        raise DeviceError(f"numba-cuda is not installed: {INSTALL}.") from None
    from numba.cuda.cudadrv import driver

    if not driver.driver.is_available or not len(cuda.gpus):
        raise DeviceError("CUDA finds no NVIDIA GPU with a driver of version 580 or later.")
    need_compilers()
    capability = cuda.get_current_device().compute_capability
    if tuple(capability[:2]) < OLDEST:
        found, needed = (".".join(map(str, pair[:2])) for pair in (capability, OLDEST))
        raise DeviceError(f"the GPU has compute capability {found} and the kernels need {needed} or more.")


def need_compilers() -> None:
    """DeviceError unless what compiles kernels is found, and what links them, which must not be older."""
    from cuda.bindings import nvjitlink
    from numba.cuda.cudadrv import libs, nvvm

    if not _answer_of(nvvm.is_available):
        # numba-cuda looks for CUDA_HOME/nvvm/lib64 alone, whatever a toolkit's layout.
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
            f"libNVVM is of CUDA {newer} and nvJitLink of {older}, which cannot link what a later one has compiled: "
            f"pip install 'nvidia-nvvm=={older}.*'."
        )


def release_of_libnvvm() -> tuple[int, int]:
    """The release of CUDA that libNVVM is of. It tells in what it compiles alone; `nvvm.version` is its interface's."""
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
    """What a function of a library answers; None where the library is not found."""
    try:
        return ask()
    except RuntimeError:  # cuda-pathfinder's error, which is a kind of it
        return None
