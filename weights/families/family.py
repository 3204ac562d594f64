"""What a family of checkpoints is: names in files, what they stand for, and where its configuration is found."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tinygpt.weights.config import ModelConfig
from tinygpt.weights.containers.container import Container, StoredTensor
from tinygpt.weights.families.transforms import AS_IS, Shape, Transform
from tinygpt.weights.json_file import read_json_object
from tinygpt.weights.tensor import zeros


@dataclass(frozen=True)
class Source:
    """What a model is made of: a container, and the JSON files beside it. `path` is what the user named."""

    path: Path
    container: Container

    @property
    def folder(self) -> Path:
        return self.path.parent if self.path.is_file() else self.path

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the folder, or None where there is none. CheckpointError for one that is damaged."""
        return read_json_object(self.folder / name) if (self.folder / name).exists() else None

    @cached_property
    def config_json(self) -> dict[str, Any] | None:
        """Hugging Face's file. A container of another kind may have one beside it, for what its file does not say."""
        return self.json("config.json")


@dataclass(frozen=True)
class Placed:
    """A tensor by its name in the family's tables, without wrappers; `file_name` is the one that the file gives it.

    part: of a tensor that lies in several files, which one it is.
    """

    name: str
    file_name: str
    tensor: StoredTensor
    part: int = 0


def placed_by(name_of: Callable[[str], str], source: Source) -> Iterable[Placed]:
    """Every tensor by what `name_of` makes of its name in the files."""
    return (Placed(name_of(name), name, tensor) for name, tensor in source.container.tensors.items())


def as_named(source: Source) -> Iterable[Placed]:
    """Where the names in files are those in the tables."""
    return placed_by(lambda name: name, source)


@dataclass(frozen=True)
class Rule:
    """The tensors, by their names in a family's files, that a parameter is made of, and how.

    default: what makes a parameter that files leave out, such as zeros for a bias; None: they may not.
    """

    sources: tuple[str, ...]
    transform: Transform = AS_IS
    default: Callable[[Shape], np.ndarray] | None = None


# Of a model that was trained without biases: one that is there after all is unexpected.
NO_BIAS = Rule((), default=zeros)


@dataclass(frozen=True)
class Layout:
    """How transformers keeps the models of a family, which `convert` writes.

    rules: as Family's, without a source; every rule's transform has a way back. file_name: what a tensor of the rules
    is called in the files, and `short_name` the way back, whatever the model was wrapped in. is_in_out: whether
    matrices of layers are (in, out) in them. has_defaults: whether models of the family may be trained without a
    parameter, which its files then leave out. config_json: the fields of one, for a model that came without.
    """

    rules: Callable[[ModelConfig], Mapping[str, Rule]]
    file_name: Callable[[str], str]
    short_name: Callable[[str], str]
    is_in_out: bool = False
    has_defaults: bool = True
    config_json: Callable[[ModelConfig], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Family:
    """One way in which files name and lay out a model.

    name: of the model in messages, and `described_by` where its configuration stands.
    detect: whether a source is of this family, by names and what the container says of itself.
    config: the model's configuration. One CheckpointError names every field that is impossible or not implemented.
    rules: for every parameter, by name, what it is made of.
    place: every tensor by its name in the rules, whatever wrappers the model was saved in.
    is_ignored: whether a tensor, by that name, is known and of no use here.
    parts: into how many parts tensors are divided whose transform has an axis.
    quirks: what loading evens out, for the reader of a report.
    advice: where something does not fit, what may be the reason beside damage.
    tokenizer: the tokenizer that comes with the weights, in the form of a tokenizer.json, or None where its files lie
        beside them. CheckpointError if it cannot be used.
    layout: of a family that transformers has, beside GPT-2.
    """

    name: str
    described_by: str
    detect: Callable[[Source], bool]
    config: Callable[[Source], ModelConfig]
    rules: Callable[[Source, ModelConfig], Mapping[str, Rule]]
    place: Callable[[Source], Iterable[Placed]] = as_named
    is_ignored: Callable[[str], bool] = lambda name: False
    parts: Callable[[Source], int] = lambda source: 1
    quirks: Callable[[Source, ModelConfig], Iterable[str]] = lambda source, config: ()
    advice: str = ""
    tokenizer: Callable[[Source], dict[str, Any] | None] = lambda source: None
    layout: Layout | None = None
