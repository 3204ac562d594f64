"""Checkpoint: a GPT-2's configuration and parameters, from whatever files they are in."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinygpt.config import ModelConfig
from tinygpt.weights.architectures.gpt2 import is_transposed
from tinygpt.weights.containers.mapped_file import StoredTensor
from tinygpt.weights.containers.weight_files import read_weights
from tinygpt.weights.inventory import take_inventory
from tinygpt.weights.json_file import read_json_object
from tinygpt.weights.open import resolve


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint. Its tensors stay in their files, mapped into memory, until they are asked for.

    `path` is the local folder, `ignored` the names in the files that are knowingly not used, and `tied` says that
    the head is the token embedding.
    """

    path: Path
    config: ModelConfig
    ignored: tuple[str, ...]
    tied: bool
    parameters: dict[str, StoredTensor]

    @classmethod
    def open(cls, model: str | os.PathLike[str] = "demo") -> "Checkpoint":
        """Open "demo", a local folder or a Hub id.

        Raises CheckpointError, with everything that is wrong, when it cannot be found, read or used.
        """
        path = resolve(model)
        config = read_config(path)
        inventory = take_inventory(path, read_weights(path), config)
        return cls(path, config, inventory.ignored, inventory.tied, inventory.parameters)

    def tensor(self, name: str) -> np.ndarray:
        """The float32 parameter `name`, such as "h.3.attn.c_attn.weight"; every matrix is (out, in).

        A view into the file where that holds float32, otherwise a copy.
        """
        array = self._stored(name).float32()
        return array.T if is_transposed(name) else array

    def release(self, name: str) -> None:
        """Let the file's pages behind a parameter leave memory; they are read again when they are touched."""
        self._stored(name).release()

    def _stored(self, name: str) -> StoredTensor:
        return self.parameters["wte.weight" if self.tied and name == "lm_head.weight" else name]


def read_config(folder: Path) -> ModelConfig:
    generation = folder / "generation_config.json"
    return ModelConfig.from_dict(
        read_json_object(folder / "config.json"),
        read_json_object(generation) if generation.exists() else None,
    )
