"""Checkpoint: a model's configuration and its parameters, wherever they come from."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from tinygpt.config import ModelConfig
from tinygpt.errors import CheckpointError
from tinygpt.weights.architectures import Architecture, architecture_of
from tinygpt.weights.containers import read_weights
from tinygpt.weights.containers.container import StoredTensor
from tinygpt.weights.containers.float8 import NAME as FLOAT8
from tinygpt.weights.containers.mapped_file import STORED_AS
from tinygpt.weights.json_file import read_json_object
from tinygpt.weights.tensor import Tensor

MAX_GROUPS = 50  # of names in a message; GPT-2 has 17
EMBEDDING, HEAD = "wte.weight", "lm_head.weight"
Tensors = Mapping[str, StoredTensor]


@dataclass(frozen=True)
class Checkpoint:
    """A model to load. Its tensors stay where they are until they are asked for.

    `path` is its folder. `stored` are its tensors by canonical name, laid out as in files, `tied` says that the head is
    the token embedding, and `ignored` are the names in the files that are knowingly not used.
    """

    path: Path
    architecture: Architecture
    config: ModelConfig
    stored: Mapping[str, Tensor]
    tied: bool
    ignored: tuple[str, ...] = ()

    @property
    def auto_dtype(self) -> str:
        """The precision that dtype "auto" stands for: bfloat16 loses little of float8 with its scales."""
        is_float8 = any(getattr(tensor, "dtype", None) == FLOAT8 for tensor in self.stored.values())
        return "bfloat16" if is_float8 else "float32"

    def tensor(self, name: str) -> np.ndarray:
        """The float32 parameter `name`, such as "h.3.attn.c_attn.weight"; every matrix is (out, in).

        A view into the file where that holds float32, otherwise a copy.
        """
        return self._parameter(name).float32()

    def release(self, name: str) -> None:
        """Let the file's pages behind a parameter leave memory; they are read again when they are touched."""
        self._parameter(name).release()

    def _parameter(self, name: str) -> Tensor:
        return self.architecture.parameter(EMBEDDING if self.tied and name == HEAD else name, self.stored)


def read_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder. CheckpointError, with all that is wrong, when it cannot be read or used."""
    architecture, config = read_config(folder)
    return match(folder, architecture, config, read_weights(folder).tensors)


def read_config(folder: Path) -> tuple[Architecture, ModelConfig]:
    """What config.json says, and generation_config.json where there is one."""
    fields, generation = read_json_object(folder / "config.json"), folder / "generation_config.json"
    architecture = architecture_of(fields)
    return architecture, architecture.model_config(
        fields, read_json_object(generation) if generation.exists() else None
    )


def match(folder: Path, architecture: Architecture, config: ModelConfig, tensors: Tensors) -> Checkpoint:
    """The checkpoint whose files hold `tensors`. Total: each is used, or ignored by name, and none is absent.

    Raises one CheckpointError that lists everything missing, unexpected, misshapen or of a dtype that cannot be
    used. Ties are transformers' own: a tied checkpoint may keep the matrix under either name, and a head that is
    there and differs from the embedding is used whatever `tie_word_embeddings` says.
    """
    names: dict[str, list[str]] = {}  # in the files, by canonical name
    for name in tensors:
        names.setdefault(architecture.canonical_name(name), []).append(name)
    ignored = {name: found for name, found in names.items() if architecture.is_ignored(name)}
    stored = {name: tensors[found[0]] for name, found in names.items() if name not in ignored}
    shapes = architecture.stored_shapes(config)
    if config.tie_word_embeddings and HEAD not in stored:
        del shapes[HEAD]
    unexpected = [(found, "") for name in stored if name not in shapes for found in names[name]]
    unexpected += [(found, f" (a second {name})") for name in stored for found in names[name][1:]]
    if config.tie_word_embeddings and HEAD in stored:
        stored.setdefault(EMBEDDING, stored[HEAD])
    problems = {
        "missing": [(name, "") for name in shapes if name not in stored],
        "unexpected": unexpected,
        "misshapen": [
            (name, f" is {stored[name].shape} and config.json asks for {shape}")
            for name, shape in shapes.items()
            if name in stored and stored[name].shape != shape
        ],
        "not floating-point": [
            (name, f" is {tensor.dtype} and only {', '.join(STORED_AS)} are implemented")
            for name, tensor in stored.items()
            if name in shapes and not tensor.is_floating
        ],
    }
    if any(problems.values()):
        raise CheckpointError(_explain(folder, architecture.NAME, problems))
    tied = config.tie_word_embeddings and _head_is_embedding(stored)
    return Checkpoint(folder, architecture, config, stored, tied, tuple(chain(*ignored.values())))


def _head_is_embedding(stored: Tensors) -> bool:
    head, embedding = stored.get(HEAD), stored[EMBEDDING]
    if head is None or head == embedding:  # the same bytes of the same file
        return True
    equal = np.array_equal(head.float32(), embedding.float32())
    head.release()
    embedding.release()
    return equal


def _explain(folder: Path, architecture: str, problems: dict[str, list[tuple[str, str]]]) -> str:
    lines = [f"  {kind}: {'; '.join(_grouped(found))}" for kind, found in problems.items() if found]
    return "\n".join(
        [
            f"{folder} does not hold the {architecture} that its config.json describes.",
            *lines,
            "Download config.json and the weights again, from one place; if they belong together, the model is not a "
            f"plain {architecture} and cannot be loaded.",
        ]
    )


def _grouped(found: list[tuple[str, str]]) -> list[str]:
    """One text for what many layers share, because a wrong config.json misshapes hundreds of tensors at once."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, remark in found:
        groups.setdefault((re.sub(r"\bh\.\d+\.", "", name), remark), []).append(name)
    texts = [
        (", ".join(names) if len(names) <= 3 else f"{names[0]} to {names[-1]} ({len(names)} layers)") + remark
        for (_, remark), names in groups.items()
    ]
    return texts[:MAX_GROUPS] + [f"and {len(texts) - MAX_GROUPS} more"] * (len(texts) > MAX_GROUPS)
