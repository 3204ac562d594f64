"""LoRA adapters in PEFT's layout, added to a checkpoint's matrices as they are read.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), and PEFT's `LoraModel`: a matrix W
becomes W + scale * B @ A, where A is (r, in) and B is (out, r).
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tinygpt.config import ModelConfig
from tinygpt.errors import CheckpointError
from tinygpt.weights.adapters.files import AdapterFiles, listed, read_adapter
from tinygpt.weights.adapters.lora_config import LoraConfig
from tinygpt.weights.architectures.gpt2 import canonical_name, is_ignored, is_transposed, stored_shapes
from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.containers.mapped_file import StoredTensor
from tinygpt.weights.stored.packed import PackedCheckpoint

PREFIX = "base_model.model."  # what PEFT wraps the model in
EMBEDDINGS = ("wte.weight", "wpe.weight")
TIED = ("wte.weight", "lm_head.weight")


@dataclass(frozen=True)
class LowRankUpdate:
    """What is added to one matrix: scale * b @ a, with a (r, in) and b (out, r)."""

    a: StoredTensor
    b: StoredTensor
    scale: float

    def added_to(self, weight: np.ndarray) -> np.ndarray:
        """A new array, summed in float32. `weight` is (out, in)."""
        # Not `@`: NumPy's BLAS rounds differently with its number of threads, and is no faster at such ranks.
        updated = np.einsum("or,ri->oi", self.b.float32(), self.a.float32())
        updated *= self.scale
        updated += weight
        return updated


@dataclass(frozen=True)
class LoraCheckpoint:
    """A checkpoint with an adapter merged into it: the same interface, and memory only for the tensor being read.

    `replaced` are parameters that the adapter holds as a whole, `updates` what is added, both by canonical name.
    `tied` is false where the adapter changes the token embedding or the head alone, as in the model that was trained.
    """

    checkpoint: Checkpoint
    ignored: tuple[str, ...]
    tied: bool
    replaced: dict[str, StoredTensor]
    updates: dict[str, LowRankUpdate]

    @classmethod
    def open(cls, checkpoint: Checkpoint | PackedCheckpoint, adapter: str | os.PathLike[str]) -> "LoraCheckpoint":
        """Merge the adapter in the folder `adapter`.

        Raises CheckpointError, with everything that is wrong, when the adapter cannot be read or belongs to another
        model, or when the checkpoint is converted.
        """
        if isinstance(checkpoint, PackedCheckpoint):
            raise CheckpointError(
                f"{checkpoint.path} is converted, and an adapter cannot be merged into packed weights: give the "
                "checkpoint that it was made from."
            )
        files = read_adapter(adapter, ("LORA",))
        lora = LoraConfig.from_dict(files.path / "adapter_config.json", files.config)
        contents = _sort(files, lora, checkpoint.config)
        replaced = _with_ties(contents.replaced, contents.saved) if checkpoint.tied else contents.replaced
        tied = (
            checkpoint.tied
            and not any(name in contents.updates for name in TIED)
            and replaced.get("wte.weight") == replaced.get("lm_head.weight")
        )
        return cls(checkpoint, checkpoint.ignored + contents.ignored, tied, replaced, contents.updates)

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    def tensor(self, name: str) -> np.ndarray:
        """The float32 parameter `name`, such as "h.3.attn.c_attn.weight"; every matrix is (out, in)."""
        if name in self.replaced:
            array = self.replaced[name].float32()
            array = array.T if is_transposed(name) else array
        else:
            array = self.checkpoint.tensor(name)
        return self.updates[name].added_to(array) if name in self.updates else array

    def release(self, name: str) -> None:
        """Let the file's pages behind a parameter leave memory; they are read again when they are touched."""
        if name in self.replaced:
            self.replaced[name].release()
        else:
            self.checkpoint.release(name)


@dataclass(frozen=True)
class _Contents:
    """What an adapter's file holds, by canonical name; `saved` are the parameters of modules trained as a whole."""

    updates: dict[str, LowRankUpdate]
    replaced: dict[str, StoredTensor]
    saved: frozenset[str]
    ignored: tuple[str, ...]


@dataclass(frozen=True)
class _Target:
    """A matrix that is adapted: its two factors' names and shapes in the file, and the scale of their product."""

    a: str
    b: str
    a_shape: tuple[int, int]
    b_shape: tuple[int, int]
    scale: float
    is_embedding: bool

    @property
    def factors(self) -> tuple[tuple[str, tuple[int, int]], ...]:
        return (self.a, self.a_shape), (self.b, self.b_shape)

    def update(self, stored: dict[str, StoredTensor]) -> LowRankUpdate:
        a, b = stored[self.a], stored[self.b]
        return LowRankUpdate(*((_transposed(a), _transposed(b)) if self.is_embedding else (a, b)), self.scale)


def _sort(files: AdapterFiles, lora: LoraConfig, config: ModelConfig) -> _Contents:
    """Total, as for a checkpoint: every tensor is used or ignored by name, and every one that is asked for is there."""
    stored = {name.removeprefix(PREFIX): tensor for name, tensor in files.tensors.items() if name.startswith(PREFIX)}
    shapes = stored_shapes(config)
    modules = _modules(stored, shapes)
    targets = _targets(shapes, modules, lora)
    factors = {name: shape for target in targets.values() for name, shape in target.factors}
    file_names, ignored, unexpected = _parameters(stored.keys() - factors.keys(), shapes)
    saved = frozenset(name for name in shapes if lora.is_saved(modules[name]))
    required = saved | _trained_biases(shapes, modules, targets, lora.bias)

    wanted = factors | {file_name: shapes[name] for name, file_name in file_names.items()}
    problems = {
        "missing": [name for name in factors if name not in stored] + sorted(required - file_names.keys()),
        "unexpected": [name for name in files.tensors if not name.startswith(PREFIX)] + unexpected,
        "misshapen": [
            f"{name} is {stored[name].shape} and should be {shape}"
            for name, shape in wanted.items()
            if name in stored and stored[name].shape != shape
        ],
    }
    if any(problems.values()) or not stored:
        raise CheckpointError(_explain(files.path, problems))
    updates = {name: target.update(stored) for name, target in targets.items()}
    return _Contents(updates, {name: stored[file_names[name]] for name in file_names}, saved, tuple(ignored))


def _modules(stored: Iterable[str], shapes: Iterable[str]) -> dict[str, str]:
    """The name that each parameter's module has in the adapted model, which patterns in the config refer to."""
    # GPT2LMHeadModel has its layers in `transformer`; a GPT2Model, which has no head, has them at the top.
    root = max((name.removesuffix(canonical_name(name)) for name in stored), key=len, default="")
    paths = {name: name.rpartition(".")[0] for name in shapes}
    return {name: path if path == "lm_head" else root + path for name, path in paths.items()}


def _targets(shapes: dict[str, tuple[int, ...]], modules: dict[str, str], lora: LoraConfig) -> dict[str, _Target]:
    """What is adapted, by canonical name: of GPT-2's modules, PEFT adapts linear layers and embeddings alone."""
    return {
        name: _target(name, modules[name], shape, lora)
        for name, shape in shapes.items()
        if (is_transposed(name) or name in (*EMBEDDINGS, *TIED)) and lora.is_target(modules[name])
    }


def _target(name: str, module: str, shape: tuple[int, ...], lora: LoraConfig) -> _Target:
    out, inner = shape[::-1] if is_transposed(name) else shape
    r, scale = lora.rank(module), lora.scale(module)
    if name in EMBEDDINGS:  # PEFT takes an embedding for a layer from V to C, which is wte's transpose
        return _Target(f"{module}.lora_embedding_B", f"{module}.lora_embedding_A", (inner, r), (r, out), scale, True)
    return _Target(f"{module}.lora_A.weight", f"{module}.lora_B.weight", (r, inner), (out, r), scale, False)


def _parameters(
    names: Iterable[str], shapes: dict[str, tuple[int, ...]]
) -> tuple[dict[str, str], list[str], list[str]]:
    """The names in the file of parameters by canonical name, of what is ignored, and of what is unexpected."""
    file_names, ignored, unexpected = {}, [], []
    for name in sorted(names):
        canonical = canonical_name(name.replace(".base_layer.", "."))  # the adapted layer itself, beside its factors
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
    biases = frozenset(name for name in shapes if name.endswith(".bias"))
    adapted = {modules[name] for name in targets}
    return {"all": biases, "lora_only": frozenset(name for name in biases if modules[name] in adapted)}.get(
        bias, frozenset()
    )


def _with_ties(replaced: dict[str, StoredTensor], saved: frozenset[str]) -> dict[str, StoredTensor]:
    """A tied matrix that came along under one of its names is the other one too, unless that was trained apart."""
    shared = [replaced[name] for name in TIED if name in replaced and name not in saved]
    return replaced | {name: shared[0] for name in TIED if shared and name not in saved}


def _transposed(tensor: StoredTensor) -> StoredTensor:
    return replace(tensor, shape=tensor.shape[::-1], strides=tensor.strides[::-1])


def _explain(path: Path, problems: dict[str, list[str]]) -> str:
    lines = [f"  {kind}: {listed(names)}" for kind, names in problems.items() if names]
    return "\n".join(
        [
            f"{path} does not hold the adapter that its adapter_config.json describes for this model.",
            *lines,
            "Give the model that the adapter was trained for, or download the adapter again, all of it.",
        ]
    )
