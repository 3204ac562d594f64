"""Checkpoint: a model's configuration and parameters, from any format."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tinygpt.weights.config import ModelConfig
from tinygpt.weights.containers.float8 import NAME as FLOAT8
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.files import crc32_of, in_a_thread, open_regular
from tinygpt.weights.parameters import EMBEDDING, HEAD, is_transposed
from tinygpt.weights.tensor import LazyTensor, Tensor

READ_SIZE = 2**20  # bytes


@dataclass(frozen=True)
class Checkpoint:
    """A model to load. Its tensors stay in their files until they are asked for.

    path: the folder or file that it was opened from; container, family: its format and names, for messages.
    stored: its parameters in the form of `parameters.py`; tied: the head is the token embedding.
    ignored: names in the files that are known and unused; quirks: what was evened out; files: all with tensors.
    read_tokenizer: returns the tokenizer in the weights' files, in the form of a tokenizer.json, or None if its files
        lie in `folder`. It may raise CheckpointError.
    """

    path: Path
    container: str
    family: str
    config: ModelConfig
    stored: Mapping[str, Tensor]
    tied: bool
    ignored: tuple[str, ...] = ()
    quirks: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    read_tokenizer: Callable[[], dict[str, Any] | None] = lambda: None

    @property
    def folder(self) -> Path:
        return self.path.parent if self.path.is_file() else self.path

    @property
    def is_float8(self) -> bool:
        """Whether `convert --dtype float8` wrote it."""
        return any(getattr(tensor, "dtype", None) == FLOAT8 for tensor in self.stored.values())

    @property
    def auto_dtype(self) -> str:
        """The dtype of "auto": bfloat16 loses little of float8 with its scales."""
        return "bfloat16" if self.is_float8 else "float32"

    def tensor(self, name: str) -> np.ndarray:
        """Return the float32 parameter `name`, such as "h.3.attn.c_attn.weight"; every matrix is (out, in).

        A view into the file if that holds float32, otherwise a copy.
        """
        return self._parameter(name).float32()

    def release(self, name: str) -> None:
        """Let the file's pages of a parameter leave memory; they are read again when they are touched."""
        self._parameter(name).release()

    def _parameter(self, name: str) -> Tensor:
        tensor = self.stored[EMBEDDING if self.tied and name == HEAD else name]
        return LazyTensor(np.transpose, (tensor,)) if is_transposed(name) else tensor

    def begin_checksum(self) -> Future[str]:
        """Return the CRC-32s of all files, computed in a thread; random weights have none, and an empty text.

        Files are read, not mapped: unused pages would count as this process's memory. The future raises
        CheckpointError if a file cannot be read. A gigabyte takes a quarter of a second, once it is in memory.
        """
        return in_a_thread(lambda: " ".join(sorted(map(_checksum, self.files))))


def _checksum(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return crc32_of(iter(partial(file.read, READ_SIZE), b""))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
