"""GPT-2's shapes with random weights, made in memory: to measure speed with nothing to download."""

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinygpt.config import ModelConfig
from tinygpt.errors import CheckpointError
from tinygpt.weights.architectures.gpt2 import is_transposed, stored_shapes

PREFIX = "random:"
SHAPES = {
    "tiny": ModelConfig(n_layer=2, n_embd=64, n_head=2),
    "124M": ModelConfig(),
    "355M": ModelConfig(n_layer=24, n_embd=1024, n_head=16),
    "774M": ModelConfig(n_layer=36, n_embd=1280, n_head=20),
    "1.5B": ModelConfig(n_layer=48, n_embd=1600, n_head=25),
}
STD = np.float32(0.02)


@dataclass(frozen=True)
class RandomCheckpoint:
    """A checkpoint whose tensors are drawn when they are asked for, each from its name: the same bits every time.

    All have std 0.02, around 1 for gains and 0 for the others. So biases and gains are random as well: one that is
    forgotten shows in the logits. `path` names the checkpoint in messages: there is no such folder, and so no
    tokenizer.
    """

    path: Path
    config: ModelConfig
    tied = True

    @classmethod
    def open(cls, model: str) -> "RandomCheckpoint":
        """Open "random:SHAPE". CheckpointError for a shape that is not one of SHAPES."""
        shape = model.removeprefix(PREFIX)
        if shape not in SHAPES:
            raise CheckpointError(
                f"{model} is no random checkpoint: give one of {', '.join(map(PREFIX.__add__, SHAPES))}."
            )
        return cls(Path(model), SHAPES[shape])

    @property
    def names(self) -> list[str]:
        """Of all parameters; the head is the token embedding."""
        return [name for name in stored_shapes(self.config) if name != "lm_head.weight"]

    def tensor(self, name: str) -> np.ndarray:
        """The float32 parameter `name`, such as "h.3.attn.c_attn.weight"; every matrix is (out, in)."""
        array = self.stored(name)
        return array.T if is_transposed(name) else array

    def stored(self, name: str) -> np.ndarray:
        """As `tensor`, in the layout that Hugging Face's files have."""
        name = "wte.weight" if name == "lm_head.weight" else name
        generator = np.random.default_rng(zlib.crc32(name.encode()))
        array = generator.standard_normal(stored_shapes(self.config)[name], np.float32)
        array *= STD
        if ".ln_" in f".{name}" and name.endswith(".weight"):
            array += 1
        return array

    def release(self, name: str) -> None:
        """Nothing is held."""


def is_random(model: object) -> bool:
    """Whether `model` names a random checkpoint."""
    return isinstance(model, str) and model.startswith(PREFIX)
