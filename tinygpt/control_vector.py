"""Control vectors: directions that are added to the residual stream after layers, and their GGUF files of llama.cpp."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinygpt.edits import Edit
from tinygpt.errors import CheckpointError
from tinygpt.weights.containers.gguf import read_gguf
from tinygpt.weights.families.gguf import ARCHITECTURE
from tinygpt.weights.files import followed
from tinygpt.weights.stored.gguf_out import write_tensors

KIND = "controlvector"  # the file's architecture
DIRECTION = re.compile(r"direction\.([1-9]\d{0,5})")


@dataclass(frozen=True, eq=False, repr=False)
class ControlVector:
    """Directions (C,) by layer, from 1, that are added to blocks.N.hook_resid_post: direction.N of llama.cpp's file."""

    directions: Mapping[int, np.ndarray]

    def __repr__(self) -> str:
        size = next(iter(self.directions.values())).size
        return f"ControlVector({len(self.directions)} layers, {min(self.directions)} to {max(self.directions)}, {size})"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ControlVector":
        """Read a GGUF file, as llama.cpp's cvector-generator and repeng write it. Raise CheckpointError."""
        file = followed(Path(path))
        container = read_gguf(file)
        if container.metadata.get(ARCHITECTURE) != KIND:
            raise CheckpointError(f"{file} holds {container.metadata.get(ARCHITECTURE)!r} and must hold {KIND!r}.")
        found = {}
        for name, tensor in container.tensors.items():
            match = DIRECTION.fullmatch(name)
            if match is None or len(tensor.shape) != 1 or not tensor.is_floating:
                raise CheckpointError(f"{file} holds {name} {tensor.shape} and must hold vectors direction.1, ...")
            found[int(match[1])] = tensor.float32().copy()
        if len({vector.size for vector in found.values()}) != 1:
            raise CheckpointError(f"{file} must hold vectors of one length, and at least one.")
        return cls(found)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a GGUF file for llama.cpp's --control-vector. Raise CheckpointError for a layer 0, which it lacks."""
        if min(self.directions) < 1:
            raise CheckpointError("a control vector's file has directions from layer 1 on, and none of layer 0.")
        keys = {ARCHITECTURE: KIND, f"{KIND}.model_hint": "gpt2", f"{KIND}.layer_count": len(self.directions)}
        return write_tensors(Path(path), keys, {f"direction.{i}": vector for i, vector in self.directions.items()})

    def edits(self, alpha: float = 1.0, layers: Iterable[int] | None = None) -> list[Edit]:
        """Return edits that add alpha times the directions, of these layers alone, to all positions."""
        chosen = self.directions if layers is None else set(layers) & set(self.directions)
        return [Edit(f"blocks.{i}.hook_resid_post", value=alpha * self.directions[i]) for i in sorted(chosen)]
