"""LoRA adapters in PEFT's layout, added to a checkpoint's matrices at reading.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), and PEFT's `LoraModel`: a matrix W
becomes W + scale * B @ A, where A is (r, in) and B is (out, r).

An adapter goes by the modules of transformers, and so by the tensors of its files: three of them may be one parameter
here, or have their rows in another order. A family's rules apply to the update of a matrix as to the matrix.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from tinygpt.weights.adapters.files import AdapterFiles, read_adapter
from tinygpt.weights.adapters.lora_config import LoraConfig
from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.config import EMBEDDING, HEAD, POSITIONS, is_transposed, parameter_shapes
from tinygpt.weights.errors import CheckpointError, listed
from tinygpt.weights.families.family import AS_IS, Layout, Rule, Transform
from tinygpt.weights.families.gpt2 import is_ignored
from tinygpt.weights.stored.export import can_be_written, layout_of
from tinygpt.weights.stored.packed import PackedCheckpoint
from tinygpt.weights.tensor import DefaultTensor, LazyTensor, Tensor, zeros

PREFIX = "base_model.model."  # what PEFT wraps the model in
TIED, EMBEDDINGS = (EMBEDDING, HEAD), (EMBEDDING, POSITIONS)


@dataclass(frozen=True)
class ModelInFiles:
    """A model by the tensors of transformers' files, whatever it was opened from.

    rules: by parameter. parameters, shapes: by the names of tensors in the files, without wrappers.
    """

    layout: Layout
    rules: dict[str, Rule]
    parameters: dict[str, str]
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "ModelInFiles":
        layout, shapes = layout_of(checkpoint), parameter_shapes(checkpoint.config)
        rules = {
            name: rule
            for name, rule in layout.rules(checkpoint.config).items()
            if not (layout.has_defaults and isinstance(checkpoint.stored.get(name), DefaultTensor))
        }
        parameters = {source: name for name, rule in rules.items() for source in rule.sources}
        stored_shapes = {
            source: rules[name].transform.stored_shape(shapes[name], len(rules[name].sources))
            for source, name in parameters.items()
        }
        return cls(layout, rules, parameters, stored_shapes)

    def is_in_out(self, name: str) -> bool:
        return self.layout.is_in_out and is_transposed(self.parameters[name])

    def is_embedding(self, name: str) -> bool:
        return self.parameters[name] in EMBEDDINGS

    def has_own_positions(self, name: str) -> bool:
        parameter = self.parameters[name]
        return parameter == POSITIONS and self.rules[parameter].transform is not AS_IS

    def modules(self, stored: Iterable[str]) -> dict[str, str]:
        """Return the names of modules in an adapted model whose tensors are `stored`.

        A model with a head has its layers in `transformer`, for example; one without may have them at the top.
        """
        root = max((name.removesuffix(self.layout.short_name(name)) for name in stored), key=len, default="")
        return {
            name: ("" if self.layout.file_name(name) == name else root) + name.rpartition(".")[0]
            for name in self.shapes
        }


def _product(scale: float, is_in_out: bool, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return scale * b @ a, where a is (r, in) and b is (out, r), transposed for a matrix that is (in, out)."""
    # Not `@`: NumPy's BLAS rounds differently with its number of threads, and is no faster at such ranks.
    update = np.einsum("or,ri->oi", b, a)
    update *= scale
    return update.T if is_in_out else update


def _sum(update: np.ndarray, weight: np.ndarray) -> np.ndarray:
    update += weight
    return update


def merge_lora(checkpoint: Checkpoint | PackedCheckpoint, adapter: str | os.PathLike[str]) -> Checkpoint:
    """Return the checkpoint with the adapter in the folder `adapter` merged into it.

    It is tied unless the adapter changes the token embedding or the head alone, as in the trained model. Raises one
    CheckpointError for an adapter that cannot be read or belongs to another model, and for a checkpoint that is
    converted or of a family that transformers does not have.
    """
    if isinstance(checkpoint, PackedCheckpoint):
        raise CheckpointError(
            f"{checkpoint.path} is converted, and an adapter cannot be merged into packed weights: give the "
            "checkpoint that it was made from."
        )
    if not can_be_written(checkpoint):
        raise CheckpointError(
            f"{checkpoint.path} is a {checkpoint.family}, for which PEFT has no adapters, because transformers has no "
            "such models: leave lora out."
        )
    files = read_adapter(adapter, ("LORA",))
    lora, model = LoraConfig.from_dict(files.path / "adapter_config.json", files.config), ModelInFiles.of(checkpoint)
    contents = _sort(files, lora, model)
    stored, replaced, tied = dict(checkpoint.stored), contents.replaced, checkpoint.tied
    if tied:
        stored[HEAD] = stored[EMBEDDING]
        names = tuple(model.rules[parameter].sources[0] for parameter in TIED)
        replaced = _with_ties(replaced, contents.saved, names)
        one, other = map(replaced.get, names)
        tied = one == other and contents.updates.keys().isdisjoint(names)
    for name in {model.parameters[name] for name in (*replaced, *contents.updates)}:
        stored[name] = _changed(stored[name], model.rules[name], replaced, contents.updates, model.shapes)
    ignored, held = checkpoint.ignored + contents.ignored, checkpoint.files + files.files
    return replace(checkpoint, stored=stored, tied=tied, ignored=ignored, files=held)


def _changed(
    tensor: Tensor,
    rule: Rule,
    replaced: Mapping[str, Tensor],
    updates: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
) -> Tensor:
    names, count = rule.sources, len(rule.sources)
    if not replaced.keys().isdisjoint(names):
        own = [LazyTensor(partial(_part, rule.transform, i, count), (tensor,)) for i in range(count)]
        tensor = rule.transform.of(tuple(replaced.get(name, part) for name, part in zip(names, own, strict=True)))
    if not updates.keys().isdisjoint(names):
        parts = (updates.get(name, DefaultTensor(shapes[name], zeros)) for name in names)
        tensor = LazyTensor(_sum, (rule.transform.of(tuple(parts)), tensor))
    return tensor


def _part(transform: Transform, i: int, count: int, array: np.ndarray) -> np.ndarray:
    return transform.to_parts(array, count)[i]


@dataclass(frozen=True)
class _Contents:
    """The content of an adapter's file, by the names of tensors.

    updates: of matrices. replaced: whole tensors. saved: names of tensors whose modules were trained as a whole.
    """

    updates: dict[str, Tensor]
    replaced: dict[str, Tensor]
    saved: frozenset[str]
    ignored: tuple[str, ...]


def _sort(files: AdapterFiles, lora: LoraConfig, model: ModelInFiles) -> _Contents:
    stored = {name.removeprefix(PREFIX): tensor for name, tensor in files.tensors.items() if name.startswith(PREFIX)}
    modules, shapes = model.modules(stored), model.shapes
    # PEFT adapts linear layers and embeddings alone: what has two dimensions.
    targets = [name for name, shape in shapes.items() if len(shape) == 2 and lora.is_target(modules[name])]
    if positions := [modules[name] for name in targets if model.has_own_positions(name)]:
        raise CheckpointError(
            f"{files.path} adapts {listed(positions)}, whose rows PEFT looks up by the attention mask and not by their "
            "positions, so that merged it is another model: train an adapter without."
        )
    factors = {name: _factors(name, modules[name], model, lora) for name in targets}
    wanted = {file_name: shape for pair in factors.values() for file_name, shape in pair.items()}
    whole, ignored, unexpected = _whole_tensors(stored.keys() - wanted.keys(), model)
    saved = frozenset(name for name in shapes if lora.is_saved(modules[name]))
    required = saved | _trained_biases(modules, targets, lora.bias)
    missing = [name for name in wanted if name not in stored] + sorted(required - whole.keys())
    wanted |= {file_name: shapes[name] for name, file_name in whole.items()}
    problems = {
        "missing": missing,
        "unexpected": [name for name in files.tensors if not name.startswith(PREFIX)] + unexpected,
        "misshapen": [
            f"{name} is {stored[name].shape} and should be {shape}"
            for name, shape in wanted.items()
            if name in stored and stored[name].shape != shape
        ],
    }
    if any(problems.values()) or not stored:
        raise CheckpointError(_explain(files.path, problems))
    return _Contents(
        {
            name: _update(name, stored[a], stored[b], lora.scale(modules[name]), model)
            for name, (a, b) in factors.items()
        },
        {name: stored[file_name] for name, file_name in whole.items()},
        saved,
        tuple(ignored),
    )


def _factors(name: str, module: str, model: ModelInFiles, lora: LoraConfig) -> dict[str, tuple[int, int]]:
    shape, r = model.shapes[name], lora.rank(module)
    out, inner = shape[::-1] if model.is_in_out(name) else shape
    if model.is_embedding(name):  # PEFT takes an embedding for a layer from V to C, which is wte's transpose
        return {f"{module}.lora_embedding_B": (inner, r), f"{module}.lora_embedding_A": (r, out)}
    return {f"{module}.lora_A.weight": (r, inner), f"{module}.lora_B.weight": (out, r)}


def _update(name: str, a: Tensor, b: Tensor, scale: float, model: ModelInFiles) -> Tensor:
    if model.is_embedding(name):
        a, b = LazyTensor(np.transpose, (a,)), LazyTensor(np.transpose, (b,))
    return LazyTensor(partial(_product, scale, model.is_in_out(name)), (a, b))


def _whole_tensors(names: Iterable[str], model: ModelInFiles) -> tuple[dict[str, str], list[str], list[str]]:
    file_names, ignored, unexpected = {}, [], []
    for name in sorted(names):
        # ".base_layer." is the adapted layer itself, next to its factors.
        short = model.layout.short_name(name.replace(".base_layer.", "."))
        if short in model.shapes and short not in file_names:
            file_names[short] = name
        elif is_ignored(short):
            ignored.append(name)
        else:
            unexpected.append(name)
    return file_names, ignored, unexpected


def _trained_biases(modules: Mapping[str, str], targets: Iterable[str], bias: str) -> frozenset[str]:
    adapted = {"all": set(modules.values()), "lora_only": {modules[name] for name in targets}, "none": set()}[bias]
    return frozenset(name for name, module in modules.items() if name.endswith(".bias") and module in adapted)


def _with_ties(replaced: dict[str, Tensor], saved: frozenset[str], tied: tuple[str, ...]) -> dict[str, Tensor]:
    shared = [replaced[name] for name in tied if name in replaced and name not in saved]
    return replaced | {name: shared[0] for name in tied if shared and name not in saved}


def _explain(path: Path, problems: dict[str, list[str]]) -> str:
    lines = [f"  {kind}: {listed(names)}" for kind, names in problems.items() if names]
    return "\n".join(
        [
            f"{path} does not hold the adapter that its adapter_config.json describes for this model.",
            *lines,
            "Give the model that the adapter was trained for, or download the adapter again, all of it.",
        ]
    )
