"""LoRA adapters in PEFT's layout, added to a checkpoint's matrices as they are read.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), and PEFT's `LoraModel`: a matrix W
becomes W + scale * B @ A, where A is (r, in) and B is (out, r).
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tinygpt.errors import CheckpointError
from tinygpt.weights.adapters.files import AdapterFiles, read_adapter
from tinygpt.weights.adapters.lora_config import LoraConfig
from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.containers.container import StoredTensor
from tinygpt.weights.families import is_other_layout
from tinygpt.weights.families.hugging_face import canonical_name, is_ignored
from tinygpt.weights.messages import listed
from tinygpt.weights.parameters import EMBEDDING, HEAD, POSITIONS, is_transposed, parameter_shapes
from tinygpt.weights.stored.packed import PackedCheckpoint
from tinygpt.weights.tensor import Derived, Tensor

PREFIX = "base_model.model."  # what PEFT wraps the model in
EMBEDDINGS = (EMBEDDING, POSITIONS)
TIED = (EMBEDDING, HEAD)


@dataclass(frozen=True)
class AdaptedTensor:
    """A matrix with its update, W + scale * b @ a, where a is (r, in) and b is (out, r). It is added when it is read.

    is_transposed: the matrix is stored (in, out), and so is this one.
    """

    weight: Tensor
    a: Tensor
    b: Tensor
    scale: float
    is_transposed: bool

    def float32(self) -> np.ndarray:
        """A new array, summed in float32."""
        weight = self.weight.float32()
        # Not `@`: NumPy's BLAS rounds differently with its number of threads, and is no faster at such ranks.
        updated = np.einsum("or,ri->oi", self.b.float32(), self.a.float32())
        updated *= self.scale
        updated += weight.T if self.is_transposed else weight
        return updated.T if self.is_transposed else updated

    def release(self) -> None:
        for tensor in (self.weight, self.a, self.b):
            tensor.release()


def merge_lora(checkpoint: Checkpoint | PackedCheckpoint, adapter: str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint with the adapter in the folder `adapter` merged into it.

    It is tied unless the adapter changes the token embedding or the head alone, as in the model that was trained.
    Raises CheckpointError, with everything that is wrong, when the adapter cannot be read or belongs to another
    model, or when the checkpoint is converted.
    """
    if isinstance(checkpoint, PackedCheckpoint):
        raise CheckpointError(
            f"{checkpoint.path} is converted, and an adapter cannot be merged into packed weights: give the "
            "checkpoint that it was made from."
        )
    if checkpoint.config.structure or is_other_layout(checkpoint.family):
        raise CheckpointError(
            f"{checkpoint.path} is a {checkpoint.family}, and adapters are merged into GPT-2 alone: merge it with "
            "peft's merge_and_unload, and give the checkpoint that this saves."
        )
    files = read_adapter(adapter, ("LORA",))
    lora = LoraConfig.from_dict(files.path / "adapter_config.json", files.config)
    contents = _sort(files, lora, checkpoint)
    stored, replaced, tied = dict(checkpoint.stored), contents.replaced, checkpoint.tied
    if tied:
        stored[HEAD] = stored[EMBEDDING]
        replaced = _with_ties(replaced, contents.saved)
        tied = replaced.get(EMBEDDING) == replaced.get(HEAD) and not contents.factors.keys() & set(TIED)
    stored |= replaced
    for name, (a, b) in contents.factors.items():
        scale = lora.scale(contents.modules[name])
        stored[name] = AdaptedTensor(stored[name], a, b, scale, is_transposed(name))
    return replace(checkpoint, stored=stored, tied=tied, ignored=checkpoint.ignored + contents.ignored)


@dataclass(frozen=True)
class _Contents:
    """What an adapter's file holds, by canonical name.

    `modules` are the names that modules have in the adapted model, which the config refers to. `factors` are a and b of
    each matrix that is adapted, `replaced` the tensors that are there as a whole, and `saved` the names of those whose
    modules were trained as a whole.
    """

    modules: dict[str, str]
    factors: dict[str, tuple[Tensor, Tensor]]
    replaced: dict[str, StoredTensor]
    saved: frozenset[str]
    ignored: tuple[str, ...]


def _sort(files: AdapterFiles, lora: LoraConfig, checkpoint: Checkpoint) -> _Contents:
    """Total, as for a checkpoint: every tensor is used or ignored by name, and every one that is asked for is there."""
    stored = {name.removeprefix(PREFIX): tensor for name, tensor in files.tensors.items() if name.startswith(PREFIX)}
    shapes = parameter_shapes(checkpoint.config)
    modules = _modules(stored, shapes)
    factors = {  # PEFT adapts linear layers and embeddings alone: what has two dimensions
        name: _factors(name, modules[name], shape[::-1] if is_transposed(name) else shape, lora)
        for name, shape in shapes.items()
        if len(shape) == 2 and lora.is_target(modules[name])
    }
    wanted = {file_name: shape for pair in factors.values() for file_name, shape in pair.items()}
    parameters, ignored, unexpected = _parameters(stored.keys() - wanted.keys(), shapes)
    saved = frozenset(name for name in shapes if lora.is_saved(modules[name]))
    required = saved | _trained_biases(shapes, modules, factors, lora.bias)
    missing = [name for name in wanted if name not in stored] + sorted(required - parameters.keys())
    wanted |= {file_name: shapes[name] for name, file_name in parameters.items()}
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
        modules,
        {name: _oriented(name, *(stored[file_name] for file_name in pair)) for name, pair in factors.items()},
        {name: stored[file_name] for name, file_name in parameters.items()},
        saved,
        tuple(ignored),
    )


def _modules(stored: Iterable[str], shapes: Iterable[str]) -> dict[str, str]:
    # GPT2LMHeadModel has its layers in `transformer`; a GPT2Model, which has no head, has them at the top.
    root = max((name.removesuffix(canonical_name(name)) for name in stored), key=len, default="")
    paths = {name: name.rpartition(".")[0] for name in shapes}
    return {name: path if path == "lm_head" else root + path for name, path in paths.items()}


def _factors(name: str, module: str, shape: tuple[int, ...], lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """The names and shapes in the file of a and b, the factors of an (out, in) matrix of `shape`."""
    (out, inner), r = shape, lora.rank(module)
    if name in EMBEDDINGS:  # PEFT takes an embedding for a layer from V to C, which is wte's transpose
        return {f"{module}.lora_embedding_B": (inner, r), f"{module}.lora_embedding_A": (r, out)}
    return {f"{module}.lora_A.weight": (r, inner), f"{module}.lora_B.weight": (out, r)}


def _oriented(name: str, a: StoredTensor, b: StoredTensor) -> tuple[Tensor, Tensor]:
    return (Derived(np.transpose, (a,)), Derived(np.transpose, (b,))) if name in EMBEDDINGS else (a, b)


def _parameters(names: Iterable[str], shapes: Iterable[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """The names in the file of parameters by canonical name, of what is ignored, and of what is unexpected."""
    file_names, ignored, unexpected = {}, [], []
    for name in sorted(names):
        # ".base_layer." is the adapted layer itself, beside its factors.
        canonical = canonical_name(name.replace(".base_layer.", "."))
        if canonical in shapes and canonical not in file_names:
            file_names[canonical] = name
        elif is_ignored(canonical):
            ignored.append(name)
        else:
            unexpected.append(name)
    return file_names, ignored, unexpected


def _trained_biases(
    shapes: Iterable[str], modules: dict[str, str], targets: Iterable[str], bias: str
) -> frozenset[str]:
    adapted = {"all": set(modules.values()), "lora_only": {modules[name] for name in targets}, "none": set()}[bias]
    return frozenset(name for name in shapes if name.endswith(".bias") and modules[name] in adapted)


def _with_ties(replaced: dict[str, StoredTensor], saved: frozenset[str]) -> dict[str, StoredTensor]:
    """A tied matrix that came along under one of its names is the other one too, unless that was trained apart."""
    shared = [replaced[name] for name in TIED if name in replaced and name not in saved]
    return replaced | {name: shared[0] for name in TIED if shared and name not in saved}


def _explain(path: Path, problems: dict[str, list[str]]) -> str:
    lines = [f"  {kind}: {listed(names)}" for kind, names in problems.items() if names]
    return "\n".join(
        [
            f"{path} does not hold the adapter that its adapter_config.json describes for this model.",
            *lines,
            "Give the model that the adapter was trained for, or download the adapter again, all of it.",
        ]
    )
