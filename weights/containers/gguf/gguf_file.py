"""GGUF: ggml's file of keys and values, tensors' names and places, and their data.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tinygpt.weights.containers.container import Container, StoredTensor
from tinygpt.weights.containers.gguf.ggml_blocks import BLOCKS, NOT_IMPLEMENTED
from tinygpt.weights.containers.gguf.ggml_tensors import BlockTensor, UnreadableTensor
from tinygpt.weights.containers.mapped_file import MAX_SIZE, MappedFile, MappedTensor, contiguous_strides, do_overlap
from tinygpt.weights.containers.peek import Peek
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.messages import shown
from tinygpt.weights.tensor import shortest

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT, MAX_ALIGNMENT = 32, 2**16  # of the data, where the file does not say it; and at most
MAX_DIMENSIONS = 4  # as ggml has it
PLAIN = {0: "float32", 1: "float16", 30: "bfloat16", 28: "float64"}
BLOCK_NAMES = {block.id: name for name, block in BLOCKS.items()}
# Of values, by their numbers in the file: struct's formats of those that are numbers.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
FLOAT32, STRING, ARRAY = 6, 8, 9


def is_gguf(peek: Peek) -> bool:
    return peek.head.startswith(MAGIC)


def read_gguf(path: Path) -> Container:
    """The tensors of a GGUF file; its metadata are the file's keys. CheckpointError when it is damaged."""
    file = MappedFile(path)
    try:
        return _Reader(file).container()
    except CheckpointError:
        raise
    except (struct.error, UnicodeDecodeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path} is a damaged GGUF file ({error}): download it again.") from error


class _Reader:
    """Goes through a file once, and never further than what is left of it."""

    def __init__(self, file: MappedFile):
        self.file, self.place = file, 0

    def container(self) -> Container:
        self._check_version()
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        self._need(num_keys, 13)  # the least that a key and its value take: lengths, a type and a byte
        metadata = dict(self._named(num_keys, lambda: self._value(self._number("I"))))
        if metadata.get("split.count", 0) not in (0, 1):
            self._refuse(f"one of {shown(metadata['split.count'])} parts: join them with `llama-gguf-split --merge`")
        self._need(num_tensors, 24)
        places = dict(self._named(num_tensors, self._place_of_tensor))
        start = self._start_of_data(metadata.get("general.alignment", ALIGNMENT))
        lying = {name: self._tensor(name, start, *place) for name, place in places.items()}
        self._check_places([data for _, data in lying.values()])
        tensors = {name: tensor for name, (tensor, _) in lying.items()}
        return Container("GGUF", tensors, metadata)

    def _check_version(self) -> None:
        self._take(len(MAGIC))
        version = self._number("I")
        if version & 0xFFFF == 0:
            self._refuse("a big-endian file: convert it to a little-endian one")
        if version not in VERSIONS:
            self._refuse(f"of version {version}, and only {' and '.join(map(str, VERSIONS))} are implemented")

    def _named(self, count: int, read: Callable[[], Any]) -> Any:
        """`count` names, each with what `read` finds behind it."""
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
        kind, count = self._number("I"), self._number("Q")
        if kind == STRING:
            self._need(count, 8)
            return [self._string() for _ in range(count)]
        if kind not in NUMBERS:
            raise ValueError(f"an array of type {kind}")
        size = struct.calcsize(NUMBERS[kind])
        self._need(count, size)
        return np.frombuffer(self._take(count * size), np.dtype(f"<{NUMBERS[kind]}")).tolist()

    def _place_of_tensor(self) -> tuple[tuple[int, ...], int, int]:
        """Shape, type and offset. Sizes stand innermost first."""
        dimensions = self._number("I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        if any(size > MAX_SIZE for size in shape):
            raise ValueError("a tensor of an impossible shape")
        return shape, self._number("I"), self._number("Q")

    def _start_of_data(self, alignment: Any) -> int:
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(f"an alignment of {shown(alignment)}")
        return -(-self.place // alignment) * alignment

    def _tensor(
        self, name: str, start: int, shape: tuple[int, ...], kind: int, offset: int
    ) -> tuple[StoredTensor, range]:
        """The tensor, and the bytes of the file that it lies in."""
        count, begin = math.prod(shape), start + offset
        if kind in PLAIN:
            size = count * {"float32": 4, "float64": 8}.get(PLAIN[kind], 2)
            tensor = MappedTensor(self.file, PLAIN[kind], shape, contiguous_strides(shape), begin)
            return tensor, range(begin, begin + size)
        if kind not in BLOCK_NAMES:
            return UnreadableTensor(self.file.path, NOT_IMPLEMENTED.get(kind, f"ggml type {kind}"), shape), range(0)
        block = BLOCKS[BLOCK_NAMES[kind]]
        if not shape or shape[-1] % block.values:
            raise ValueError(f"{shown(name)}, whose rows of {shape[-1:]} are no whole blocks of {block.values}")
        tensor = BlockTensor(self.file, BLOCK_NAMES[kind], shape, begin)
        return tensor, range(begin, begin + count // block.values * block.bytes)

    def _check_places(self, lying: list[range]) -> None:
        for data in lying:
            if data.stop > len(self.file):
                raise ValueError(f"a tensor reaches to byte {data.stop} of {len(self.file)}")
        if do_overlap(lying):
            raise ValueError("tensors are laid over one another")

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
