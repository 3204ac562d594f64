"""Tensors that lie in mapped files, or are computed or drawn when they are asked for, and containers of them."""

import math
import mmap
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..kernels.numbers import from_bfloat16
from .config import is_transposed
from .errors import MAX_SHOWN, CheckpointError, LostFileError
from .files import open_regular

STD = np.float32(0.02)
ROWS = 256  # of a tensor, that are compared together


class Tensor(Protocol):
    """float32: a view of memory if possible, otherwise a copy."""

    def float32(self) -> np.ndarray: ...

    def release(self) -> None:
        """Let the file's pages leave memory; they are read again when they are touched."""


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that `make` computes from the arrays of `sources`."""

    make: Callable[..., np.ndarray]
    sources: tuple[Tensor, ...]

    def float32(self) -> np.ndarray:
        return self.make(*(source.float32() for source in self.sources))

    def release(self) -> None:
        for source in self.sources:
            source.release()


@dataclass(frozen=True)
class DefaultTensor:
    shape: tuple[int, ...]
    make: Callable[[tuple[int, ...]], np.ndarray]

    def float32(self) -> np.ndarray:
        return self.make(self.shape)

    def release(self) -> None: ...


def have_equal_values(one: Tensor, other: Tensor) -> bool:
    a, b = np.atleast_1d(one.float32(), other.float32())
    # By a few rows: one may lie transposed, and most that differ do so at once.
    equal = all(np.array_equal(a[i : i + ROWS], b[i : i + ROWS]) for i in range(0, len(a), ROWS))
    one.release()
    other.release()
    return equal


zeros = partial(np.zeros, dtype=np.float32)
ones = partial(np.ones, dtype=np.float32)


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draw a parameter from its name, with the same bits every time, in GPT-2's own layout.

    The mean is 1 for weights of layer norms, otherwise 0, of biases too, so that a lost bias shows in the logits.
    """
    is_in_out = is_transposed(name)
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    array = generator.standard_normal(shape[::-1] if is_in_out else shape, np.float32)
    array *= STD
    if ".ln_" in f".{name}" and name.endswith(".weight"):
        array += 1
    return array.T if is_in_out else array


def shortest(number: float) -> float:
    """Return the shortest decimal of a file's float32: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(number)))


# Hugging Face's file of each format, in transformers' order of search.
FILES = ("model.safetensors", "pytorch_model.bin")
# How floats lie in a file; bfloat16, unknown to NumPy, as its bits.
STORED_AS = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "float64": "<f8"}
ITEMSIZE = {name: np.dtype(stored).itemsize for name, stored in STORED_AS.items()}
# Bits of an element, by the names of dtypes in all formats.
_BITS = re.compile(r"(?:bfloat|float|uint|int|I|U)(\d+)")
# Of a believable shape: beyond these bounds, products of sizes could take for ever.
MAX_DIMENSIONS, MAX_SIZE = 8, 2**48
PEEK_HEAD, PEEK_TAIL = 512, 48  # bytes


@contextmanager
def parsing(path: Path, kind: str, *damage: type[Exception]) -> Iterator[None]:
    """Raise CheckpointErrors, which name the file, for errors of reading and parsing, and a library's own `damage`."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, OverflowError, struct.error, *damage) as error:
        raise CheckpointError(
            f"{path} is a damaged {kind} ({str(error)[:MAX_SHOWN]}): download it again."
        ) from error


@dataclass(frozen=True)
class Peek:
    """The first and last bytes of a file, which tell the format."""

    head: bytes
    tail: bytes

    @classmethod
    def into(cls, path: Path) -> "Peek":
        with parsing(path, "file"), open_regular(path, is_weights=True) as file:
            head = file.read(PEEK_HEAD)
            file.seek(max(os.fstat(file.fileno()).st_size - PEEK_TAIL, 0))
            return cls(head, file.read(PEEK_TAIL))


class MappedFile:
    """The bytes of a checkpoint file, or of its `part`, a file in an archive, which starts at `begin` of the mapping.

    Raises CheckpointError for a file that `open_regular` refuses, or is empty.
    """

    def __init__(self, path: Path, part: range | None = None):
        self.path = path
        first = part.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY if part else 0
        self.begin = part.start - first if part else 0
        with parsing(path, "file"), open_regular(path, is_weights=True) as file:
            if not os.fstat(file.fileno()).st_size or part == range(0):
                raise CheckpointError(f"{path} is empty: download it again.")
            # Copy on write, because Numba compiles a kernel once more for arrays that are read-only.
            size = part.stop - first if part else 0
            self.data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY, offset=first)
        self.release()

    def __len__(self) -> int:
        return len(self.data)

    def release(self, start: int = 0, stop: int | None = None) -> None:
        """Let pages leave memory: systems read megabytes for a few touched bytes."""
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = len(self) if stop is None else stop // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start and hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self.data.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def check_whole(self) -> None:
        """Raise LostFileError if the file was cut: touching lost pages would end the process."""
        if self.data.size() < len(self.data):
            raise LostFileError(
                f"{self.path} was cut short while it was in use: restore it and load the model again. Replace a file "
                "that may be in use by renaming another to its name."
            )


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that lies in a file as an array: `strides` in elements, `offset` in bytes.

    dtype: NumPy's name or "bfloat16", or the format's of a tensor that cannot be read. verify: raises CheckpointError.
    """

    file: MappedFile
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    verify: Callable[[], None] | None = field(default=None, compare=False, kw_only=True)

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def nbytes(self) -> int:
        bits = _BITS.fullmatch(self.dtype)  # none in bool, and in F8_E4M3
        return math.prod(self.shape) * (int(bits[1]) // 8 if bits else 1)

    @property
    def is_floating(self) -> bool:
        return self.dtype in STORED_AS

    def array(self, dtype: np.dtype | str) -> np.ndarray:
        dtype = np.dtype(dtype)
        strides = tuple(stride * dtype.itemsize for stride in self.strides)
        return np.ndarray(self.shape, dtype, self.file.data, self.offset, strides)

    def float32(self) -> np.ndarray:
        if self.verify:
            self.verify()
        array = self.array(STORED_AS[self.dtype])
        if self.dtype != "bfloat16":
            return np.require(array, np.float32, "A")
        return from_bfloat16(array)

    def release(self) -> None:
        extent = element_extent(self.shape, self.strides) * ITEMSIZE.get(self.dtype, 1)
        self.file.release(self.offset, self.offset + extent)


@dataclass(frozen=True)
class Container:
    """The content of a file, or of files that belong together.

    archive_members: NeMo's other files. dicts: of a training checkpoint, the dictionary of each tensor.
    """

    format: str
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    archive_members: Mapping[str, Any] = field(default_factory=dict)
    rank_metadata: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    dicts: Mapping[str, str] = field(default_factory=dict)
    graph: Any = None


@dataclass(frozen=True)
class ArchiveMember:
    """An archive's entry or a variable, and its checksum if it is known."""

    file: MappedFile
    name: str
    data: range
    checksum: int | None = None
    checksum_of: Callable[[Any], int] = zlib.crc32

    def read(self) -> bytes:
        self.verify()
        return self.file.data[self.data.start : self.data.stop]

    def verify(self) -> None:
        data = np.asarray(memoryview(self.file.data)[self.data.start : self.data.stop])
        if self.checksum is not None and self.checksum_of(data) != self.checksum:
            raise CheckpointError(
                f"{self.file.path} is damaged, its part {self.name!r} does not have its checksum: download it again."
            )


def check_places(places: Iterable[range], size: int) -> None:
    """Raise ValueError if a part reaches outside the file's bytes, or parts are laid over one another."""
    end = 0
    for data in sorted(places, key=lambda data: data.start):
        if data.start < 0 or data.stop > size:
            raise ValueError(f"a part reaches to byte {data.stop} of {size}")
        if data and data.start < end:
            raise ValueError("parts are laid over one another")
        end = max(end, data.stop)


def is_possible_shape(shape: Iterable[Any]) -> bool:
    sizes = tuple(shape)
    return len(sizes) <= MAX_DIMENSIONS and all(type(size) is int and 0 <= size <= MAX_SIZE for size in sizes)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()


def element_extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the elements of storage from a tensor's first to its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
