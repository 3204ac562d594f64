"""GGUF: ggml's file of keys and values, names and places of tensors, and their data.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package `gguf` decodes blocks; its own reader is
15 times as slow and does not bound a damaged header's claims.
"""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, how_to_install, shown
from ..tensor import (
    MAX_SIZE,
    Container,
    MappedFile,
    StoredTensor,
    check_places,
    contiguous_strides,
    parsing,
    shortest,
)

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT, MAX_ALIGNMENT = 32, 2**16  # of the data: default and largest
MAX_DIMENSIONS = 4
MAX_DEPTH = 8  # of arrays in arrays
PLAIN = {0: "float32", 1: "float16", 30: "bfloat16", 28: "float64"}
# struct's formats by ggml's numbers of types of values.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
FLOAT32 = 6
STRING = 8
ARRAY = 9
AT_ONCE = 2**12  # blocks decoded together: intermediate arrays fit in a cache
Q8_0, Q8_0_VALUES = 8, 32  # ggml's number, and the values of a block: a float16 scale, then int8s


@dataclass(frozen=True, slots=True)
class BlockTensor(StoredTensor):
    """A tensor in ggml's block format `kind`: a row's blocks lie end to end."""

    kind: int
    block_values: int
    block_bytes: int
    is_floating = property(lambda self: True)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.block_values * self.block_bytes

    def float32(self) -> np.ndarray:
        values = np.empty(self.shape, np.float32)
        blocks = np.ndarray(
            (values.size // self.block_values, self.block_bytes), np.uint8, self.file.data, self.offset
        )
        flat = values.reshape(-1, self.block_values)  # (blocks, values of a block)
        for start in range(0, len(blocks), AT_ONCE):
            flat[start : start + AT_ONCE] = decode(self.kind, blocks[start : start + AT_ONCE])
        return values

    def release(self) -> None:
        self.file.release(self.offset, self.offset + self.nbytes)


def decode(kind: int, blocks: np.ndarray) -> np.ndarray:
    """Return values (N, values of a block) float32 of blocks (N, bytes) uint8."""
    if kind == Q8_0:  # common enough to need no package
        return blocks[:, 2:].view(np.int8) * blocks[:, :2].copy().view(np.float16).astype(np.float32)
    from gguf import GGMLQuantizationType, quants

    return quants.dequantize(np.ascontiguousarray(blocks), GGMLQuantizationType(kind))


def read_gguf(path: Path) -> Container:
    """Return the tensors, and the keys as metadata. Raise CheckpointError if the file is damaged."""
    with parsing(path, "GGUF file"):
        return _Reader(MappedFile(path)).container()


class _Reader:
    def __init__(self, file: MappedFile):
        self.file, self.place = file, len(MAGIC)

    def container(self) -> Container:
        version = self._number("I")
        if version & 0xFFFF == 0:
            self._refuse("a big-endian file: convert it to a little-endian one")
        if version not in VERSIONS:
            self._refuse(f"of version {version}, and only {' and '.join(map(str, VERSIONS))} are implemented")
        num_tensors = self._number("Q")
        num_keys = self._number("Q")
        self._need(num_keys, 13)  # bytes at least: lengths, a type and a byte
        metadata = dict(self._named(num_keys, lambda: self._value(self._number("I"))))
        if metadata.get("split.count", 0) not in (0, 1):
            self._refuse(
                f"one of {shown(metadata['split.count'])} parts: join them with `llama-gguf-split --merge`"
            )
        self._need(num_tensors, 24)
        places = dict(self._named(num_tensors, self._place_of_tensor))
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(f"an alignment of {shown(alignment)}")
        start = -(-self.place // alignment) * alignment
        tensors = {name: self._tensor(name, start, *place) for name, place in places.items()}
        lying = [range(t.offset, t.offset + t.nbytes) for t in tensors.values() if t.is_floating]
        check_places(lying, len(self.file))
        return Container("GGUF", tensors, metadata)

    def _named(self, count: int, read: Callable[[], Any]) -> Any:
        names = set()
        for _ in range(count):
            name = self._string()
            if name in names:
                raise ValueError(f"two of the name {shown(name)}")
            names.add(name)
            yield name, read()

    def _value(self, kind: int) -> Any:
        if kind == FLOAT32:
            return shortest(self._number(NUMBERS[kind]))
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise ValueError(f"a value of type {kind}")
        return self._array(MAX_DEPTH)

    def _array(self, depth: int) -> list[Any]:
        kind = self._number("I")
        count = self._number("Q")
        if kind == ARRAY and depth > 1:
            self._need(count, 12)  # bytes at least: a type and a length
            return [self._array(depth - 1) for _ in range(count)]
        if kind == STRING:
            self._need(count, 8)
            return [self._string() for _ in range(count)]
        if kind not in NUMBERS:
            raise ValueError(f"an array of type {kind}")
        size = struct.calcsize(NUMBERS[kind])
        self._need(count, size)
        return np.frombuffer(self._take(count * size), np.dtype(f"<{NUMBERS[kind]}")).tolist()

    def _place_of_tensor(self) -> tuple[tuple[int, ...], int, int]:
        """Read shape, type and offset, the innermost size first."""
        dimensions = self._number("I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        if any(size > MAX_SIZE for size in shape):
            raise ValueError("a tensor of an impossible shape")
        return shape, self._number("I"), self._number("Q")

    def _tensor(self, name: str, start: int, shape: tuple[int, ...], kind: int, offset: int) -> StoredTensor:
        strides = contiguous_strides(shape)
        begin = start + offset
        if kind in PLAIN or (known := self._block_format(kind)) is None:
            return StoredTensor(self.file, PLAIN.get(kind, f"ggml type {kind}"), shape, strides, begin)
        dtype, values, size = known
        if not shape or shape[-1] % values:
            raise ValueError(f"{shown(name)}, whose rows of {shape[-1:]} are no whole blocks of {values}")
        return BlockTensor(self.file, dtype, shape, strides, begin, kind, values, size)

    def _block_format(self, kind: int) -> tuple[str, int, int] | None:
        """Return name, values and bytes of a block, or None for an unknown format."""
        if kind == Q8_0:
            return "Q8_0", Q8_0_VALUES, 34
        if find_spec("gguf") is None:
            self._refuse(f"in ggml's block format {kind}, which needs gguf: {how_to_install('gguf')}")
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

        names = {one.value: one.name for one in GGMLQuantizationType}
        if not hasattr(quants, names.get(kind, "")):  # integers, and formats that the package does not decode
            return None
        return names[kind], *GGML_QUANT_SIZES[GGMLQuantizationType(kind)]

    def _string(self) -> str:
        return str(self._take(self._number("Q")), "utf-8")

    def _number(self, format: str) -> Any:
        (number,) = struct.unpack(f"<{format}", self._take(struct.calcsize(format)))
        return number

    def _take(self, size: int) -> bytes:
        self._need(size, 1)
        self.place += size
        return self.file.data[self.place - size : self.place]

    def _need(self, count: int, size: int) -> None:
        if count * size > len(self.file) - self.place:
            raise ValueError(f"{count} entries where {len(self.file) - self.place} bytes are left")

    def _refuse(self, what: str) -> None:
        raise CheckpointError(f"{self.file.path} is {what}.")
