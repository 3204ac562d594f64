"""Fields of a configuration that tensors show, and those that a config.json next to them may add."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.families.family import NamedTensor, Source

# No tensor shows these. If a file does not say them either, they come from a config.json next to it.
UNSEEN = ("n_head", "activation_function", "layer_norm_epsilon", "bos_token_id", "eos_token_id")
GPT2_END = 50256  # the id of <|endoftext|>, which begins and ends texts


def from_config_json(source: Source) -> dict[str, Any]:
    return {name: value for name, value in (source.config_json or {}).items() if name in UNSEEN}


def ends_of(vocab_size: Any) -> dict[str, Any]:
    """Return GPT-2's ids that begin and end a text, if the vocabulary has them."""
    end = GPT2_END if isinstance(vocab_size, int) and vocab_size > GPT2_END else None
    return {"bos_token_id": end, "eos_token_id": end}


class Shapes:
    """The shapes of tensors by name, of the first part of each, before they are matched."""

    def __init__(self, source: Source, tensors: Iterable[NamedTensor]):
        self._path, self._shapes = source.path, {one.name: one.tensor.shape for one in tensors if one.part == 0}

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def size(self, name: str, axis: int) -> int:
        """Return one size of a tensor. Raise CheckpointError if the tensor or the axis is absent."""
        if name not in self._shapes or len(self._shapes[name]) <= axis:
            raise CheckpointError(
                f"{self._path} holds no tensor {name} of {axis + 1} dimensions or more, from which the model's sizes "
                "are seen: give the whole checkpoint."
            )
        return self._shapes[name][axis]

    def layers(self, pattern: str) -> int:
        numbers = [int(found[1]) for name in self._shapes if (found := re.match(pattern, name))]
        return 1 + max(numbers, default=-1)


def need_heads(source: Source, values: Mapping[str, Any]) -> None:
    if values.get("n_head") is None:
        raise CheckpointError(
            f"{source.path} does not say how many heads its model has, which no tensor shows: write them into a file "
            f'{source.folder / "config.json"}, such as {{"n_head": 12}}.'
        )
