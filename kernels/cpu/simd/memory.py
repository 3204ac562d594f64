"""Arrays that start on a vector's boundary, which the tiles' loads rely on."""

import contextlib
import math
import mmap

import numpy as np

from tinygpt.kernels.cpu.simd.vector_ir import VECTOR_BYTES


def zeros(shape: tuple[int, ...], dtype=np.float32) -> np.ndarray:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + VECTOR_BYTES, np.uint8)
    start = -raw.ctypes.data % VECTOR_BYTES
    return raw[start : start + size].view(dtype).reshape(shape)


def untouched(shape: tuple[int, ...], dtype, huge_pages: bool = False) -> np.ndarray:
    """Zeros that arrive in pages of 4 KB, or of 2 MB, as they are touched. MemoryError where they cannot be reserved.

    NumPy always asks Linux for huge pages of its own large arrays: a hardly begun KV cache then takes several of them
    for each layer, 80 MB for one sequence of GPT-2 124M, and clearing them delays the first token.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    try:
        pages = mmap.mmap(-1, size, **private)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size} bytes cannot be reserved") from error
    with contextlib.suppress(AttributeError, OSError):  # a system, or a kernel, that has no huge pages
        pages.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(shape)
