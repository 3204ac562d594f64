"""The tensors of ONNX: in the file itself, raw or number by number, or in a file beside it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np

from tinygpt.weights.containers.container import StoredTensor
from tinygpt.weights.containers.mapped_file import (
    MAX_DIMENSIONS,
    MAX_SIZE,
    MappedFile,
    MappedTensor,
    contiguous_strides,
)
from tinygpt.weights.containers.protobuf import Message, message, number, numbers_of
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.messages import shown

# ONNX's numbers of the dtypes that can be read, with their sizes in bytes.
DTYPES = {1: ("float32", 4), 10: ("float16", 2), 11: ("float64", 8), 16: ("bfloat16", 2)}
FLOATS, INT32S, DOUBLES = 4, 5, 10  # fields of a tensor for elements one by one; halves are bits among INT32S
MAX_SHARING = 100  # of a file's bytes, by all tensors in it: several may be one
EXTERNAL = 1


@dataclass(frozen=True, slots=True)
class ListedTensor:
    """A StoredTensor whose elements stand one by one in a message."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    elements: tuple[Message | int, ...]
    is_floating = True

    @property
    def nbytes(self) -> int:
        return sum(len(element) if isinstance(element, Message) else 1 for element in self.elements)

    def float32(self) -> np.ndarray:
        """Of floats, packed; or of bits of halves, which are numbers."""
        if self.dtype in ("float32", "float64"):
            kind = np.dtype(self.dtype).newbyteorder("<")
            data = b"".join(element.bytes() for element in self.elements)
            return np.frombuffer(data, kind).astype(np.float32).reshape(self.shape)
        bits = _bits(self.elements)
        if self.dtype == "float16":
            return bits.astype(np.uint16).view(np.float16).astype(np.float32).reshape(self.shape)
        return (bits.astype(np.uint32) << 16).view(np.float32).reshape(self.shape)

    def release(self) -> None:
        """They are in a copy."""


def _bits(elements: Sequence[Message | int]) -> np.ndarray:
    """Numbers one by one, or packed, or both."""
    arrays = [element.varint_array() if isinstance(element, Message) else [element] for element in elements]
    return np.concatenate([np.empty(0, np.uint64), *(np.array(array, np.uint64) for array in arrays)])


def entry_of(pair: Message) -> dict[str, str]:
    """A StringStringEntryProto, as one item of a dictionary."""
    entry = {field_number: message(part).text() for field_number, part in pair.fields()}
    return {entry.get(1, ""): entry.get(2, "")}


class TensorReader:
    """Finds where the tensors of `file` lie, and counts what they claim of each file."""

    def __init__(self, file: MappedFile):
        self.file = file
        self.files: dict[str, MappedFile] = {}
        self.claimed: dict[str, tuple[MappedFile, int]] = {}  # bytes of all tensors in each file

    def check_total(self) -> None:
        """ValueError where tensors that share bytes are beyond reason."""
        for file, claimed in self.claimed.values():
            if claimed > MAX_SHARING * len(file):
                raise ValueError(f"its tensors claim {claimed} bytes of {len(file)}")

    def read(self, tensor: Message) -> tuple[str, StoredTensor]:
        """Name and tensor of a TensorProto. ValueError where it is damaged."""
        shape: list[int] = []
        name, kind, raw, external, is_external = "", 0, None, {}, False
        elements: dict[int, list[Message | int]] = {}
        for field_number, value in tensor.fields():
            if field_number == 1:
                shape += numbers_of(value)
            elif field_number == 2:
                kind = number(value)
            elif field_number in (FLOATS, INT32S, DOUBLES):
                elements.setdefault(field_number, []).append(value)
            elif field_number == 8:
                name = message(value).text()
            elif field_number == 9:
                raw = message(value)
            elif field_number == 13:
                external |= entry_of(message(value))
            elif field_number == 14:
                is_external = number(value) == EXTERNAL
        if len(shape) > MAX_DIMENSIONS or any(size > MAX_SIZE for size in shape):
            raise ValueError(f"an impossible shape of {shown(name)}")
        return name, self._place(name, kind, tuple(shape), raw, external if is_external else None, elements)

    def _place(
        self,
        name: str,
        kind: int,
        shape: tuple[int, ...],
        raw: Message | None,
        external: dict[str, str] | None,
        elements: dict[int, list],
    ) -> StoredTensor:
        dtype, itemsize = DTYPES.get(kind, (f"ONNX type {kind}", 0))
        if not itemsize:
            return MappedTensor(self.file, dtype, shape, contiguous_strides(shape), 0)  # which nobody reads
        size = math.prod(shape) * itemsize
        if external is not None:
            file, start, there = self._external(name, external, size)
        elif raw is not None:
            file, start, there = self.file, raw.start, len(raw)
        else:
            return self._listed(name, dtype, shape, elements)
        if there != size:
            raise ValueError(f"{shown(name)} of shape {shape} has {there} bytes and needs {size}")
        _, claimed = self.claimed.get(str(file.path), (file, 0))
        self.claimed[str(file.path)] = file, claimed + size
        return MappedTensor(file, dtype, shape, contiguous_strides(shape), start)

    def _listed(self, name: str, dtype: str, shape: tuple[int, ...], elements: dict[int, list]) -> ListedTensor:
        kind = {"float32": FLOATS, "float64": DOUBLES}.get(dtype, INT32S)
        values = elements.get(kind, [])
        is_half = True
        if kind == INT32S:
            bits = _bits(values)
            count, is_half = len(bits), not (bits > 0xFFFF).any()
        else:  # floats are packed; one by one they are numbers, which exporters do not write
            count = sum(len(message(value)) for value in values) // (4 if kind == FLOATS else 8)
        if count != math.prod(shape) or not is_half:
            raise ValueError(f"{shown(name)} of shape {shape} has {count} elements")
        return ListedTensor(self.file.path, dtype, shape, tuple(values))

    def _external(self, name: str, external: dict[str, str], size: int) -> tuple[MappedFile, int, int]:
        """The file beside this one, and where in it a tensor lies."""
        location = external.get("location", "")
        path = PurePosixPath(location)
        is_relative = location and not (path.is_absolute() or PureWindowsPath(location).drive or "\\" in location)
        if not is_relative or ".." in path.parts:
            raise CheckpointError(
                f"{self.file.path} keeps weights in {shown(location)}, which is no file of its folder: refused. Export "
                "it again."
            )
        if location not in self.files:
            folder = self.file.path.parent
            target = folder / path
            if not any(target.resolve().is_relative_to(place) for place in _places(folder)):
                raise CheckpointError(f"{target}, where {self.file.path} keeps weights, is a link: refused.")
            self.files[location] = MappedFile(target)
        file, begin = self.files[location], _decimal(external.get("offset", "0"))
        there = _decimal(external["length"]) if "length" in external else size
        if begin + there > len(file):
            raise CheckpointError(
                f"{file.path} has {len(file)} bytes, and {shown(name)} reaches to byte {begin + there}: copy it again."
            )
        return file, begin, there


def _places(folder: Path) -> list[Path]:
    """Where what lies in a folder may be: there, or among the blobs to which the Hub's cache links from snapshots."""
    folder = folder.absolute()
    blobs = [parent.parent / "blobs" for parent in folder.parents if parent.name == "snapshots"]
    return [place.resolve() for place in (folder, *blobs)]


def _decimal(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise ValueError(f"a place {shown(text)}")
    return int(text)
