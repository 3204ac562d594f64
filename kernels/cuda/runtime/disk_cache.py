"""Compiled kernels on disk, so that only the first process on a machine compiles.

numba-cuda's own cache looks at a kernel's file alone and would keep stale callees; and what closes over another
function misses it in every process. Here a kernel is known by its name and all that its factory made it of, in a folder
that is named by all sources.
"""

import functools
import hashlib
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from tinygpt.kernels.kernel_cache import KernelCache, fingerprint, open_cache

SOURCES = Path(__file__).resolve().parents[1]
COMPILERS = ("numba", "numba-cuda", "llvmlite", "cuda-bindings", "cuda-core")


class DiskCache:
    """What numba-cuda asks before it compiles a kernel, and tells when it has."""

    def __init__(self, function: Callable):
        self._function = function

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The compiled kernel for arguments of these types, or None."""
        from numba.cuda.dispatcher import _Kernel

        kernel = kernel_cache().load(self._name(signature), lambda states: _Kernel._rebuild(**states))
        if kernel is None:
            kernel_cache().announce(self._function.__name__)
        return kernel

    def save_overload(self, signature: Any, kernel: Any) -> None:
        from numba.cuda.serialize import dumps

        kernel_cache().save(self._name(signature), lambda: dumps(kernel._reduce_states()))

    def flush(self) -> None:
        """There is nothing to forget: a file that is there is right."""

    def _name(self, signature: Any) -> str:
        from numba import cuda

        capability = cuda.get_current_device().compute_capability
        known = f"{describe(self._function)} {signature} {tuple(capability)}"
        digest = hashlib.sha256(known.encode()).hexdigest()[:32]
        return f"{self._function.__name__}-{digest}.kernel"


def describe(function: Callable) -> str:
    """A function's name and place, and in brackets the constants and functions that it closes over."""
    held = [_describe_value(cell.cell_contents) for cell in function.__closure__ or ()]
    place = f"{function.__module__}.{function.__qualname__}:{function.__code__.co_firstlineno}"
    return f"{place}({', '.join(held)})"


def _describe_value(value: Any) -> str:
    return describe(value.py_func) if hasattr(value, "py_func") else repr(value)


@functools.cache
def kernel_cache() -> KernelCache:
    """Return the cache of this build's kernels."""
    build = [metadata.version(name) for name in COMPILERS], sys.version, __debug__
    return open_cache(f"cuda-{fingerprint(SOURCES, build)}")
