"""The one place that declares how CUDA kernels are compiled, and that asks whether they can run."""

import numpy as np

if not hasattr(np, "row_stack"):  # numba-cuda asks NumPy 2.5 for a name that is gone
    np.row_stack = np.vstack

from numba import cuda

from tinygpt.kernels.cuda.runtime.disk_cache import DiskCache
from tinygpt.kernels.errors import DeviceError

OLDEST = (9, 0)  # compute capability: cp.async.bulk; and no older card was ever tried


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
        raise DeviceError("numba-cuda is not installed: pip install 'tinygpt[cuda]'.") from None
    from numba.cuda.cudadrv import driver, nvvm

    if not driver.driver.is_available or not len(cuda.gpus):
        raise DeviceError("CUDA finds no NVIDIA card with a driver of version 580 or later.")
    if not nvvm.is_available():
        raise DeviceError("libNVVM, which compiles, is not found: pip install 'tinygpt[cuda]', or set CUDA_HOME.")
    capability = cuda.get_current_device().compute_capability
    if tuple(capability[:2]) < OLDEST:
        found, needed = (".".join(map(str, pair[:2])) for pair in (capability, OLDEST))
        raise DeviceError(f"the card has compute capability {found} and the kernels need {needed} or more.")
