"""Tensors of GGUF files that are no plain arrays: decoded block by block, or not implemented."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinygpt.weights.containers.gguf.ggml_blocks import BLOCKS
from tinygpt.weights.containers.mapped_file import MappedFile, MappedTensor
from tinygpt.weights.errors import CheckpointError

AT_ONCE = 2**12  # blocks that are decoded together: what lies between fits in a cache


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A StoredTensor in one of ggml's block formats; a row's blocks lie end to end."""

    file: MappedFile
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // BLOCKS[self.dtype].values * BLOCKS[self.dtype].bytes

    @property
    def is_floating(self) -> bool:
        return True

    def float32(self) -> np.ndarray:
        format, values = BLOCKS[self.dtype], np.empty(self.shape, np.float32)
        blocks = np.ndarray((values.size // format.values, format.bytes), np.uint8, self.file.data, self.offset)
        flat = values.reshape(-1, format.values)
        for start in range(0, len(blocks), AT_ONCE):
            flat[start : start + AT_ONCE] = format.decode(blocks[start : start + AT_ONCE])
        return values

    def release(self) -> None:
        MappedTensor(self.file, "float32", (self.nbytes // 4,), (1,), self.offset).release()


@dataclass(frozen=True, slots=True)
class UnreadableTensor:
    """A StoredTensor of a type that is not implemented."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes = 0
    is_floating = False

    def float32(self) -> np.ndarray:
        raise CheckpointError(f"{self.path} holds a tensor of type {self.dtype}, which is not implemented.")

    def release(self) -> None:
        """Nothing is held."""
