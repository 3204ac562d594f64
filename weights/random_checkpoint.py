"""GPT-2's shapes with random weights, made in memory, to measure speed without a download."""

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.config import ModelConfig
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.parameters import HEAD, parameter_shapes

PREFIX = "random:"
SHAPES = {
    "tiny": ModelConfig(n_layer=2, n_embd=64, n_head=2),
    "124M": ModelConfig(),
    "355M": ModelConfig(n_layer=24, n_embd=1024, n_head=16),
    "774M": ModelConfig(n_layer=36, n_embd=1280, n_head=20),
    "1.5B": ModelConfig(n_layer=48, n_embd=1600, n_head=25),
}
SHAPE_OF = {shape.lower(): shape for shape in SHAPES}  # 124m is 124M
STD = np.float32(0.02)


@dataclass(frozen=True)
class RandomTensor:
    """A tensor that is drawn from its name at each read, with the same bits every time.

    All have std 0.02, around 1 for the weights of layer norms and 0 for all else. Random biases show in the logits if
    they are forgotten.
    """

    name: str
    shape: tuple[int, ...]

    def float32(self) -> np.ndarray:
        generator = np.random.default_rng(zlib.crc32(self.name.encode()))
        array = generator.standard_normal(self.shape, np.float32)
        array *= STD
        if ".ln_" in f".{self.name}" and self.name.endswith(".weight"):
            array += 1
        return array

    def release(self) -> None:
        """Hold nothing."""


def open_random(model: str) -> Checkpoint:
    """Open "random:SHAPE". Raise CheckpointError for a shape that is not one of SHAPES."""
    shape = SHAPE_OF.get(model.removeprefix(PREFIX).lower())
    if shape is None:
        raise CheckpointError(f"{model} is no random checkpoint: give one of {', '.join(map(PREFIX.__add__, SHAPES))}.")
    return random_checkpoint(model, SHAPES[shape])


def random_checkpoint(name: str, config: ModelConfig) -> Checkpoint:
    """Return a checkpoint of any sizes. Its path is `name`, for messages: there is no such folder."""
    shapes = parameter_shapes(config)
    stored = {name: RandomTensor(name, shapes[name]) for name in shapes if name != HEAD}
    return Checkpoint(Path(name), "random weights", "GPT-2", config, stored, tied=True)


def is_random(model: object) -> bool:
    return isinstance(model, str) and model.startswith(PREFIX)
