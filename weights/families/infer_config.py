"""What the tensors themselves say of a model, and what a config.json beside them may add to that."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tinygpt.weights.config import ModelConfig
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.families.family import NamedTensor, Source

# What no tensor shows. Where a file does not say it either, it is taken from a config.json beside the file.
UNSEEN = ("n_head", "activation_function", "layer_norm_epsilon", "bos_token_id", "eos_token_id")
GPT2_END = ModelConfig.bos_token_id  # the id of <|endoftext|>, which begins and ends texts


def from_config_json(source: Source) -> dict[str, Any]:
    """Fields of a config.json beside the file that say what no tensor shows."""
    return {name: value for name, value in (source.config_json or {}).items() if name in UNSEEN}


def ends_of(vocab_size: Any) -> dict[str, Any]:
    """The ids that begin and end a text where nothing says them: GPT-2's, if the vocabulary has them."""
    end = GPT2_END if isinstance(vocab_size, int) and vocab_size > GPT2_END else None
    return {"bos_token_id": end, "eos_token_id": end}


class Shapes:
    """The shapes of tensors by name, of the first part of each, for what is asked of them before they are matched."""

    def __init__(self, source: Source, placed: Iterable[NamedTensor]):
        self._path, self._shapes = source.path, {one.name: one.tensor.shape for one in placed if one.part == 0}

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def size(self, name: str, axis: int) -> int:
        """One size of a tensor. CheckpointError where it is not there or has no such axis."""
        if name not in self._shapes or len(self._shapes[name]) <= axis:
            raise CheckpointError(
                f"{self._path} holds no tensor {name} of {axis + 1} dimensions or more, from which the model's sizes "
                "are seen: give the whole checkpoint."
            )
        return self._shapes[name][axis]

    def layers(self, pattern: str) -> int:
        """How many layers there are: `pattern` finds a layer's number in a name."""
        numbers = [int(found[1]) for name in self._shapes if (found := re.match(pattern, name))]
        return 1 + max(numbers, default=-1)


def need_heads(source: Source, values: Mapping[str, Any]) -> None:
    """CheckpointError if nothing says how many heads there are: no tensor shows it."""
    if values.get("n_head") is None:
        raise CheckpointError(
            f"{source.path} does not say how many heads its model has, which no tensor shows: write them into a file "
            f'{source.folder / "config.json"}, such as {{"n_head": 12}}.'
        )
