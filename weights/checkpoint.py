"""A model's configuration and parameters, from files of any format or drawn at random to measure speed."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .config import EMBEDDING, HEAD, ModelConfig, parameter_shapes
from .containers.safetensors import NAME as FLOAT8
from .errors import CheckpointError
from .families import gpt2
from .families.family import Layout
from .files import crc32_of, in_a_thread, open_regular, read_json_object
from .tensor import RandomTensor, Tensor, parsing

READ_SIZE = 2**20  # bytes


@dataclass(frozen=True)
class Checkpoint:
    """A model to load. Its tensors stay in their files until they are asked for.

    container, family: for messages; stored: by the names and shapes of `config.py`; tied: the head is the token
    embedding; ignored: known, unused names; heads: of other tasks, by GPT-2's names; quirks: what was evened out;
    files: all with tensors.
    layout: transformers', None for GPT-2's.
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
    heads: Mapping[str, Tensor] = field(default_factory=dict)
    layout: Layout | None = None

    @property
    def folder(self) -> Path:
        return self.path.parent if self.path.is_file() else self.path

    @property
    def is_float8(self) -> bool:
        return any(getattr(tensor, "dtype", None) == FLOAT8 for tensor in self.stored.values())

    @property
    def auto_dtype(self) -> str:
        """Return the dtype of "auto": bfloat16 loses little of float8 with its scales."""
        return "bfloat16" if self.is_float8 else "float32"

    def tensor(self, name: str) -> np.ndarray:
        """Return a float32 parameter, a view if the file holds float32; every matrix is (out, in)."""
        return self._parameter(name).float32()

    def release(self, name: str) -> None:
        self._parameter(name).release()

    def _parameter(self, name: str) -> Tensor:
        return self.stored[EMBEDDING if self.tied and name == HEAD else name]

    def begin_checksum(self) -> Future[str]:
        """Return the CRC-32s of all files, computed in a thread. The future may raise CheckpointError.

        Files are read, not mapped: unused pages would count as this process's memory.
        """
        return in_a_thread(lambda: " ".join(sorted(map(_checksum, self.files))))


def _checksum(path: Path) -> str:
    with parsing(path, "file"), open_regular(path) as file:
        return crc32_of(iter(partial(file.read, READ_SIZE), b""))


def read_config(folder: Path) -> ModelConfig:
    """Return the configuration of a folder. Raise one CheckpointError for all that is wrong."""
    generation = folder / "generation_config.json"
    fields = read_json_object(folder / "config.json")
    return model_config(fields, read_json_object(generation) if generation.exists() else None)


def model_config(fields: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    if gpt2.is_gpt2(fields):
        return gpt2.model_config(fields, generation)
    from .families.transformers import model_type_of  # rarely needed

    return model_type_of(fields).model_config(fields, generation)


PREFIX = "random:"
SHAPES = {
    "tiny": ModelConfig(n_layer=2, n_embd=64, n_head=2),
    "124M": ModelConfig(),
    "355M": ModelConfig(n_layer=24, n_embd=1024, n_head=16),
    "774M": ModelConfig(n_layer=36, n_embd=1280, n_head=20),
    "1.5B": ModelConfig(n_layer=48, n_embd=1600, n_head=25),
}
SHAPE_OF = {shape.lower(): shape for shape in SHAPES}  # 124m is 124M


def open_random(model: str) -> Checkpoint:
    """Open "random:SHAPE". Raise CheckpointError for an unknown shape."""
    shape = SHAPE_OF.get(model.removeprefix(PREFIX).lower())
    if shape is None:
        raise CheckpointError(
            f"{model} is no random checkpoint: give one of {', '.join(map(PREFIX.__add__, SHAPES))}."
        )
    return random_checkpoint(model, SHAPES[shape])


def random_checkpoint(name: str, config: ModelConfig) -> Checkpoint:
    """Return a checkpoint of any sizes, whose path is `name`, for messages."""
    shapes = parameter_shapes(config)
    stored = {name: RandomTensor(name, shapes[name]) for name in shapes if name != HEAD}
    return Checkpoint(Path(name), "random weights", "GPT-2", config, stored, tied=True)


def is_random(model: object) -> bool:
    return isinstance(model, str) and model.startswith(PREFIX)
