"""Parts of PEFT's adapters besides factors: DoRA's magnitudes, biases of B, rows of tokens, a larger vocabulary.

Sources: Liu et al., "DoRA" (2024), and PEFT's DoraLinearLayer and TrainableTokensLayer, which replaces rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ..checkpoint import Checkpoint
from ..config import EMBEDDING, HEAD, POSITIONS
from ..convert.export import LayoutPart, layout_of
from ..errors import CheckpointError, listed
from ..families.family import Layout, TensorRule
from ..tensor import LazyTensor, Tensor
from .peft import AdapterFiles

if TYPE_CHECKING:
    from .lora_config import LoraConfig

_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt")
PREFIX = "base_model.model."  # PEFT's wrapper of the model


@dataclass(frozen=True)
class Model:
    """A model by the tensors of transformers' files."""

    layout: Layout
    rules: Mapping[str, TensorRule]  # by parameter
    parts: dict[str, LayoutPart]  # by tensors' names without wrappers

    def is_embedding(self, name: str) -> bool:
        return self.parts[name].parameter in (EMBEDDING, POSITIONS)

    def modules(self, stored: Iterable[str]) -> dict[str, str]:
        """Return modules' names. In an adapter of a model without a head, `stored` may lack the prefix."""
        root = max((name.removesuffix(self.layout.short_name(name)) for name in stored), key=len, default="")
        return {
            name: ("" if part.name == name else root) + name.rpartition(".")[0]
            for name, part in self.parts.items()
        }


@dataclass(frozen=True)
class Extras:
    """Names in the adapter's file of all but factors, by names of the model's tensors."""

    magnitudes: dict[str, str] = field(default_factory=dict)  # (out,)
    shifts: dict[str, tuple[str, float]] = field(default_factory=dict)  # (out,), and a scale
    rows: dict[str, tuple[Sequence[int], str]] = field(
        default_factory=dict
    )  # token ids of N rows, and (N, E)
    wanted: dict[str, tuple[int, ...]] = field(default_factory=dict)  # shapes, by names in the file


def extras_of(
    lora: "LoraConfig",
    model: Model,
    modules: Mapping[str, str],
    targets: Sequence[str],
    stored: Mapping[str, Tensor],
) -> Extras:
    """Raise CheckpointError for a form that PEFT has and that is not implemented."""
    extras = Extras()
    if lora.use_dora or lora.lora_bias:
        _check_layers(lora, model, modules, targets)
    for name in targets:
        out = model.parts[name].shape[model.parts[name].out_axis]
        if lora.use_dora:
            extras.magnitudes[name] = f"{modules[name]}.lora_magnitude_vector"
            extras.wanted[extras.magnitudes[name]] = (out,)
        if lora.lora_bias:
            file_name = f"{modules[name]}.lora_B.bias"
            extras.shifts[_bias_of(name)] = file_name, lora.scale(modules[name])
            extras.wanted[file_name] = (out,)
    if lora.trainable_token_indices:
        _add_rows(extras, lora, model, modules, stored)
    return extras


def _bias_of(name: str) -> str:
    return f"{name.removesuffix('.weight')}.bias"


def _check_layers(
    lora: "LoraConfig", model: Model, modules: Mapping[str, str], targets: Sequence[str]
) -> None:
    others = [
        modules[name]
        for name in targets
        if model.is_embedding(name) or (lora.lora_bias and _bias_of(name) not in model.parts)
    ]
    if others or (lora.use_dora and lora.lora_bias):
        what = "use_dora" if lora.use_dora else "lora_bias"
        raise CheckpointError(
            f"adapter_config.json has {what} for {listed(others) or 'layers with lora_bias'}, which is not implemented."
        )


def _add_rows(
    extras: Extras,
    lora: "LoraConfig",
    model: Model,
    modules: Mapping[str, str],
    stored: Mapping[str, Tensor],
) -> None:
    indices = lora.trainable_token_indices
    of_table: Sequence[int] = ()
    used = 0
    for parameter in (EMBEDDING, HEAD):
        name = model.rules[parameter].sources[0]
        file_name = f"{modules[name]}.token_adapter.trainable_tokens_delta"
        if isinstance(indices, Mapping):
            ids = next((ids for key, ids in indices.items() if f".{modules[name]}".endswith(f".{key}")), ())
        else:
            ids = indices if parameter == EMBEDDING else ()
        used += bool(ids)
        of_table = of_table or ids
        if not ids and file_name in stored:  # of a head that is tied, in a file of its own
            ids = of_table
        if ids:
            V, E = model.parts[name].shape
            if max(ids) >= V:
                raise CheckpointError(
                    f"trainable_token_indices has the token {max(ids)}, and the model {V} rows."
                )
            extras.rows[name] = ids, file_name
            extras.wanted[file_name] = (len(ids), E)
    if used < (len(indices) if isinstance(indices, Mapping) else 1):
        raise CheckpointError(
            f"trainable_token_indices names modules that are no embedding: {listed(sorted(indices))}."
        )


def with_rows_of(checkpoint: Checkpoint, files: AdapterFiles) -> Checkpoint:
    """Return the checkpoint with as many rows as the adapter's embeddings have, if it holds them whole.

    A vocabulary that was resized, or trained, comes with the adapter's own tokenizer.
    """
    layout = layout_of(checkpoint)
    rules = layout.rules(checkpoint.config)
    names = {rules[parameter].sources[0]: parameter for parameter in (EMBEDDING, HEAD)}
    tables: dict[str, Tensor] = {}
    has_own_rows = False
    for file_name, tensor in files.tensors.items():
        name = file_name.removeprefix(PREFIX)
        has_own_rows |= ".token_adapter." in name or "lora_embedding" in name
        short = layout.short_name(plain_name(name))
        if short in names and len(tensor.shape) == 2 and tensor.shape[1] == checkpoint.config.embedding_size:
            tables[names[short]] = tensor
    changes = {}
    sizes = {tensor.shape[0] for tensor in tables.values()}
    V = next(iter(sizes), 0)
    is_whole = len(sizes) == 1 and (checkpoint.tied or len(tables) == 2)
    if is_whole and checkpoint.config.vocab_size != V:
        changes["config"] = replace(checkpoint.config, vocab_size=V)
        table = tables.get(EMBEDDING) or tables[HEAD]
        changes["stored"] = {**checkpoint.stored, EMBEDDING: table, HEAD: tables.get(HEAD, table)}
    if (tables or has_own_rows) and any((files.path / name).is_file() for name in _VOCABULARIES):
        changes["tokenizer_folder"] = files.path
    return replace(checkpoint, **changes)


def plain_name(name: str) -> str:
    """Return the name of a whole tensor of an adapted layer, which PEFT has wrapped."""
    for wrapper in (".token_adapter.", ".base_layer."):
        name = name.replace(wrapper, ".")
    return name


def with_magnitudes(
    out_axis: int, matrix: np.ndarray, update: np.ndarray, magnitude: np.ndarray
) -> np.ndarray:
    """Return the sum, of which each output's weights have a magnitude as their norm."""
    whole = matrix + update
    factor = magnitude / np.linalg.norm(whole, axis=1 - out_axis)
    return whole * np.expand_dims(factor, 1 - out_axis)


def with_rows(token_ids: Sequence[int], table: np.ndarray, rows: np.ndarray) -> np.ndarray:
    changed = table.copy()
    changed[list(token_ids)] = rows
    return changed


def scaled(tensor: Tensor, scale: float) -> Tensor:
    return LazyTensor(partial(np.multiply, np.float32(scale)), (tensor,))
