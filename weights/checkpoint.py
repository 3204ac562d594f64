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

    path: of the folder or file; container, family: for messages; stored: in the form of `parameters.py`; tied: the head
    is the token embedding; ignored: known, unused names; quirks: what was evened out; files: all with tensors.
    read_tokenizer: returns the content of a tokenizer.json, or None if it lies in `folder`; may raise CheckpointError.
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
        """Return a float32 parameter, a view if the file holds float32; every matrix is (out, in)."""
        return self._parameter(name).float32()

    def release(self, name: str) -> None:
        """Let the file's pages of a parameter leave memory."""
        self._parameter(name).release()

    def _parameter(self, name: str) -> Tensor:
        tensor = self.stored[EMBEDDING if self.tied and name == HEAD else name]
        return LazyTensor(np.transpose, (tensor,)) if is_transposed(name) else tensor

    def begin_checksum(self) -> Future[str]:
        """Return the CRC-32s of all files, computed in a thread. The future may raise CheckpointError.

        Files are read, not mapped: unused pages would count as this process's memory.
        """
        return in_a_thread(lambda: " ".join(sorted(map(_checksum, self.files))))


def _checksum(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return crc32_of(iter(partial(file.read, READ_SIZE), b""))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
