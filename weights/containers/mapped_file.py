"""A file mapped into memory, and the arrays that lie in it."""

import math
import mmap
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tinygpt.regular_file import open_regular
from tinygpt.weights.errors import CheckpointError, LostFileError

# How each floating-point dtype lies in a file: little-endian, and bfloat16, unknown to NumPy, as its bits.
STORED_AS = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "float64": "<f8"}
# Bits of an element by its dtype's name, which safetensors writes short where a tensor cannot be a weight.
_BITS = re.compile(r"(?:bfloat|float|uint|int|I|U)(\d+)")
# What a tensor's sizes are believed to be, and how many it has: beyond, their products alone could take for ever.
MAX_DIMENSIONS, MAX_SIZE = 8, 2**48


class Mapping(mmap.mmap):
    """A mapping that zipfile takes for a file; mmap has this method from Python 3.13 on."""

    def seekable(self) -> bool:
        return True


class MappedFile:
    """The bytes of a checkpoint file, read by the operating system when they are touched.

    The file is opened once; `check`, which may raise, is called with it after it is mapped. Raises CheckpointError when
    the file cannot be opened, is not regular, is empty, or is a Git LFS pointer.

    part: the bytes to map, where a file lies in an archive. They begin at `begin` of the mapping, which begins with a
    page.
    """

    def __init__(self, path: Path, check: Callable[[BinaryIO], None] = lambda file: None, part: range | None = None):
        self.path = path
        first = part.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY if part else 0
        self.begin = part.start - first if part else 0
        try:
            with open_regular(path) as file:
                if not os.fstat(file.fileno()).st_size or part == range(0):
                    raise CheckpointError(f"{path} is empty: download it again.")
                # Copy on write, because Numba compiles a kernel once more for arrays that are read-only.
                size = part.stop - first if part else 0
                self.data = Mapping(file.fileno(), size, access=mmap.ACCESS_COPY, offset=first)
                self._refuse_pointer()
                check(file)
                self.release()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error

    def _refuse_pointer(self) -> None:
        if self.data[:24] == b"version https://git-lfs.":
            raise CheckpointError(
                f"{self.path} is a Git LFS pointer, not the weights themselves: run `git lfs pull` in its folder."
            )

    def __len__(self) -> int:
        return len(self.data)

    def release(self) -> None:
        """Let all of it leave memory: where a few bytes were touched, systems may have put whole megabytes there."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self.data.madvise(mmap.MADV_DONTNEED)

    def check_whole(self) -> None:
        """LostFileError if the file is shorter than it was: to touch what is gone would end the process."""
        if self.data.size() < len(self.data):
            raise LostFileError(
                f"{self.path} was cut short while it was in use: restore it and load the model again. Replace a file "
                "that may be in use by renaming another to its name."
            )


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A StoredTensor that lies in a file as an array: `strides` in elements, `offset` in bytes from its start."""

    file: MappedFile
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def nbytes(self) -> int:
        bits = _BITS.fullmatch(self.dtype)  # none in bool, and in kinds of float8
        return math.prod(self.shape) * (int(bits[1]) // 8 if bits else 1)

    @property
    def is_floating(self) -> bool:
        return self.dtype in STORED_AS

    def array(self, dtype: np.dtype | str) -> np.ndarray:
        """A view of the file, whose elements lie as `dtype`."""
        dtype = np.dtype(dtype)
        strides = tuple(stride * dtype.itemsize for stride in self.strides)
        return np.ndarray(self.shape, dtype, self.file.data, self.offset, strides)

    def float32(self) -> np.ndarray:
        """A view of the file where it holds aligned float32, otherwise a copy."""
        array = self.array(STORED_AS[self.dtype])
        if self.dtype != "bfloat16":
            return np.require(array, np.float32, "A")
        bits = array.astype(np.uint32)
        bits <<= 16  # bfloat16 is the upper half of a float32
        return bits.view(np.float32)

    def release(self) -> None:
        """Tell the operating system that the pages that hold nothing but this tensor may leave memory."""
        if not hasattr(mmap, "MADV_DONTNEED"):  # Windows
            return
        extent = element_extent(self.shape, self.strides) * np.dtype(STORED_AS[self.dtype]).itemsize
        start = -(-self.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (self.offset + extent) // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start:
            self.file.data.madvise(mmap.MADV_DONTNEED, start, stop - start)


@dataclass(frozen=True, slots=True)
class VerifiedTensor(MappedTensor):
    """A MappedTensor whose bytes are verified whenever it is read."""

    verify: Callable[[], None] = field(compare=False)

    def float32(self) -> np.ndarray:
        self.verify()
        return MappedTensor.float32(self)


def do_overlap(places: Iterable[range]) -> bool:
    """Whether any of them lies over another: together they would be more than their file accounts for."""
    end = 0
    for data in sorted(filter(None, places), key=lambda data: data.start):
        if data.start < end:
            return True
        end = data.stop
    return False


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a C-ordered tensor."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()


def element_extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """How many elements of storage a strided tensor spans, from its first element to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
