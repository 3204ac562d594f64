"""Checkpoint: a model's configuration and its parameters, wherever they come from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinygpt.weights.config import ModelConfig
from tinygpt.weights.containers.float8 import NAME as FLOAT8
from tinygpt.weights.parameters import EMBEDDING, HEAD, is_transposed
from tinygpt.weights.tensor import LazyTensor, Tensor


@dataclass(frozen=True)
class Checkpoint:
    """A model to load. Its tensors stay where they are until they are asked for.

    `path` is what it was opened from, a folder or a file; `container` and `family` say in which format and by whose
    names. `stored` are its parameters in the form of `parameters.py`, `tied` says that the head is the token embedding.
    `ignored` are the names in the files that are knowingly not used, `quirks` what was evened out, `files` all that
    tensors lie in. `read_tokenizer` gives the tokenizer that came with the weights, in the form of a tokenizer.json, or
    None where its files lie in `folder`; it may raise CheckpointError.
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
        """Where files that belong to the weights lie beside them."""
        return self.path.parent if self.path.is_file() else self.path

    @property
    def is_float8(self) -> bool:
        """Whether `convert --dtype float8` has written it."""
        return any(getattr(tensor, "dtype", None) == FLOAT8 for tensor in self.stored.values())

    @property
    def auto_dtype(self) -> str:
        """The precision that dtype "auto" stands for: bfloat16 loses little of float8 with its scales."""
        return "bfloat16" if self.is_float8 else "float32"

    def tensor(self, name: str) -> np.ndarray:
        """The float32 parameter `name`, such as "h.3.attn.c_attn.weight"; every matrix is (out, in).

        A view into the file where that holds float32, otherwise a copy.
        """
        return self._parameter(name).float32()

    def release(self, name: str) -> None:
        """Let the file's pages behind a parameter leave memory; they are read again when they are touched."""
        self._parameter(name).release()

    def _parameter(self, name: str) -> Tensor:
        tensor = self.stored[EMBEDDING if self.tied and name == HEAD else name]
        return LazyTensor(np.transpose, (tensor,)) if is_transposed(name) else tensor
