"""Loading is total: every tensor of the files is used or ignored by name, and every parameter is there."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinygpt.config import ModelConfig
from tinygpt.errors import CheckpointError
from tinygpt.weights.architectures.gpt2 import canonical_name, is_ignored, stored_shapes
from tinygpt.weights.containers.mapped_file import STORED_AS, StoredTensor


@dataclass(frozen=True)
class Inventory:
    """A checkpoint's parameters by canonical name, and the names in its files that are knowingly not used."""

    parameters: dict[str, StoredTensor]
    ignored: tuple[str, ...]
    tied: bool


def take_inventory(path: Path, stored: dict[str, StoredTensor], config: ModelConfig) -> Inventory:
    """Match the tensors in the files of `path` to the parameters that `config` asks for.

    Raises one CheckpointError that lists everything missing, unexpected, misshapen or of a dtype that cannot be
    used. Ties are transformers' own: a tied checkpoint may keep the matrix under either name, and a head that is
    there and differs from the embedding is used whatever `tie_word_embeddings` says.
    """
    parameters, ignored, repeated = _sort_names(stored)
    if config.tie_word_embeddings and "wte.weight" not in parameters and "lm_head.weight" in parameters:
        parameters["wte.weight"] = parameters["lm_head.weight"]
    shapes = stored_shapes(config)
    if config.tie_word_embeddings and "lm_head.weight" not in parameters:
        del shapes["lm_head.weight"]

    problems = {
        "missing": [(name, "") for name in shapes if name not in parameters],
        "unexpected": [(name, "") for name in stored if _is_unexpected(name, shapes)] + repeated,
        "misshapen": _misshapen(parameters, shapes),
        "not floating-point": _not_floating(parameters, shapes),
    }
    if any(problems.values()):
        raise CheckpointError(_explain(path, problems))
    tied = config.tie_word_embeddings and _head_is_embedding(parameters)
    return Inventory(parameters, ignored, tied)


def _sort_names(
    stored: dict[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], tuple[str, ...], list[tuple[str, str]]]:
    """Parameters by canonical name, ignored names, and names that stand for a parameter that is already there."""
    parameters, ignored, repeated = {}, [], []
    for name, tensor in stored.items():
        canonical = canonical_name(name)
        if is_ignored(canonical):
            ignored.append(name)
        elif canonical in parameters:
            repeated.append((name, f" (a second {canonical})"))
        else:
            parameters[canonical] = tensor
    return parameters, tuple(ignored), repeated


def _is_unexpected(name: str, shapes: dict[str, tuple[int, ...]]) -> bool:
    canonical = canonical_name(name)
    return canonical not in shapes and not is_ignored(canonical)


def _misshapen(parameters: dict[str, StoredTensor], shapes: dict[str, tuple[int, ...]]) -> list[tuple[str, str]]:
    return [
        (name, f" is {parameters[name].shape} and config.json asks for {shape}")
        for name, shape in shapes.items()
        if name in parameters and parameters[name].shape != shape
    ]


def _not_floating(parameters: dict[str, StoredTensor], shapes: dict[str, tuple[int, ...]]) -> list[tuple[str, str]]:
    return [
        (name, f" is {tensor.dtype} and only {', '.join(STORED_AS)} are implemented")
        for name, tensor in parameters.items()
        if name in shapes and tensor.dtype not in STORED_AS
    ]


def _head_is_embedding(parameters: dict[str, StoredTensor]) -> bool:
    head, embedding = parameters.get("lm_head.weight"), parameters["wte.weight"]
    if head is None or head == embedding:  # the same bytes of the same file
        return True
    equal = np.array_equal(head.float32(), embedding.float32())
    head.release()
    embedding.release()
    return equal


def _explain(path: Path, problems: dict[str, list[tuple[str, str]]]) -> str:
    lines = [f"  {kind}: {'; '.join(_grouped(found))}" for kind, found in problems.items() if found]
    return "\n".join(
        [
            f"{path} does not hold the GPT-2 that its config.json describes.",
            *lines,
            "Download config.json and the weights again, from one place; if they belong together, the model is not a "
            "plain GPT-2 and cannot be loaded.",
        ]
    )


def _grouped(found: list[tuple[str, str]]) -> list[str]:
    """One text for what many layers share, because a wrong config.json misshapes hundreds of tensors at once."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, remark in found:
        groups.setdefault((re.sub(r"\bh\.\d+\.", "", name), remark), []).append(name)
    texts = []
    for (_, remark), names in groups.items():
        texts.append(
            f"{', '.join(names)}{remark}"
            if len(names) <= 3
            else f"{names[0]} to {names[-1]} ({len(names)} layers){remark}"
        )
    return texts
