"""LoRA adapters in PEFT's layout, added to a checkpoint's matrices at reading.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), and PEFT's `LoraModel`: a matrix W
becomes W + scale * B @ A, where A is (r, in) and B is (out, r).

An adapter goes by the modules of transformers, and so by the tensors of its files. A family's rules apply to the update
of a tensor as to the tensor.
"""

import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from operator import iadd
from pathlib import Path
from typing import Any

import numpy as np
import regex

from ..checkpoint import Checkpoint, PackedCheckpoint
from ..config import EMBEDDING, HEAD, POSITIONS, is_transposed
from ..convert.export import LayoutPart, can_be_written, layout_of, parts_of
from ..errors import CheckpointError, Checks, is_bool, is_number, is_whole, listed, shown, wrong_fields
from ..families.family import AS_IS, TRANSPOSED, Layout, TensorRule, matches
from ..families.gpt2 import IGNORED
from ..tensor import DefaultTensor, LazyTensor, Tensor, zeros
from .peft import CONFIG, AdapterFiles, read_adapter

BIASES = ("none", "all", "lora_only")
# Initializations that leave the base model's weights alone.
INITIALIZATIONS = ("gaussian", "eva", "orthogonal", "mica")
# Of training and origin. PEFT stores the factors in the same way for both values of fan_in_fan_out.
WITHOUT_EFFECT = {
    "base_model_name_or_path",
    "peft_type",
    "peft_version",
    "revision",
    "task_type",
    "auto_mapping",
    "corda_config",
    "eva_config",
    "loftq_config",
    "lora_ga_config",  # of initializations
    "lora_dropout",
    "inference_mode",
    "runtime_config",
    "megatron_core",
    "qalora_group_size",
    "fan_in_fan_out",
}
# Fields that PEFT fails on if they are null.
NEVER_NULL = ("r", "lora_alpha", "bias", "rank_pattern", "alpha_pattern")
MAX_SECONDS = 2.0  # for all regular expressions of a config: one such as (a+)+b can take for ever


@dataclass(frozen=True)
class LoraConfig:
    """The adapted modules and the size of their updates, with the names and defaults of PEFT's `LoraConfig`.

    A list matches the ends of modules' names, such as transformer.h.0.attn.c_attn. A string is a regular expression
    for the whole name. Methods raise CheckpointError if expressions take too long.
    """

    target_modules: frozenset[str] | str
    exclude_modules: frozenset[str] | str = frozenset()
    layers_to_transform: frozenset[int] = frozenset()
    layers_pattern: Sequence[str] = ()
    modules_to_save: Sequence[str] = ()
    r: int = 8
    rank_pattern: dict[str, int] = field(default_factory=dict)
    lora_alpha: float = 8
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    bias: str = "none"
    deadline: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS, compare=False)

    @classmethod
    def from_dict(cls, path: Path, fields: dict[str, Any]) -> "LoraConfig":
        """Raise one CheckpointError for all impossible or unknown fields of `path`."""
        values = {name: value for name, value in fields.items() if value is not None or name in NEVER_NULL}
        for name in ("layers_to_transform", "layers_pattern"):
            if isinstance(values.get(name), (int, str)):  # PEFT takes one as well as a list
                values[name] = [values[name]]
        problems = [*_not_implemented(values), *wrong_fields(values, CHECKS)]
        if not values.get("target_modules"):
            problems.append("target_modules is empty and must name the modules that are adapted")
        if isinstance(values.get("target_modules"), str) and values.get("layers_to_transform"):
            problems.append(
                "layers_to_transform needs a list of names as target_modules, not a regular expression"
            )
        if problems:
            raise CheckpointError(f"{path} cannot be used: {'; '.join(problems)}.")
        known: dict[str, Any] = {name: values[name] for name in CHECKS if name in values}
        for name in known.keys() & {"target_modules", "exclude_modules", "layers_to_transform"}:
            known[name] = known[name] if isinstance(known[name], str) else frozenset(known[name])
        return cls(**known)

    def is_target(self, module: str) -> bool:
        excluded = self._is_selected(self.exclude_modules, module) or any(
            self._matches(rf"(^|.*\.){saved}($|\..*)", module) for saved in self.modules_to_save
        )
        return not excluded and self._is_selected(self.target_modules, module) and self._is_in_layers(module)

    def is_saved(self, module: str) -> bool:
        """Return whether the module, or a parent, was trained as a whole."""
        saved = tuple(self.modules_to_save)
        return any(name.endswith(saved) for name in accumulate(module.split("."), "{}.{}".format))

    def rank(self, module: str) -> int:
        return self._first_match(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        alpha = self._first_match(self.alpha_pattern, module, self.lora_alpha)
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def _is_in_layers(self, module: str) -> bool:
        if not self.layers_to_transform:
            return True
        parts = module.split(".")
        for i in range(1, len(parts) - 1):
            path = ".".join(parts[:i])
            is_before_layers = "." in path
            if self.layers_pattern:
                patterns = (rf"(?:^|.*?\.)(?:{pattern})\Z" for pattern in self.layers_pattern)
                is_before_layers = any(self._matches(pattern, path) for pattern in patterns)
            if parts[i].isdecimal() and is_before_layers:
                return int(parts[i]) in self.layers_to_transform
        return False

    def _is_selected(self, wanted: frozenset[str] | str, module: str) -> bool:
        if isinstance(wanted, str):
            return self._matches(rf"(?:{wanted})\Z", module)
        parts = module.split(".")
        return any(".".join(parts[i:]) in wanted for i in range(len(parts)))

    def _first_match(self, values: dict[str, Any], module: str, default: Any) -> Any:
        found = (value for key, value in values.items() if self._matches(rf"(.*\.)?({key})$", module))
        return next(found, default)

    def _matches(self, pattern: str, name: str) -> bool:
        try:
            return regex.match(pattern, name, timeout=max(self.deadline - time.monotonic(), 1e-3)) is not None
        except TimeoutError:
            text = f"take more than {MAX_SECONDS:.0f} seconds: name the modules in lists."
            raise CheckpointError(f"the regular expressions in adapter_config.json {text}") from None


def _not_implemented(values: dict[str, Any]) -> list[str]:
    known = WITHOUT_EFFECT | CHECKS.keys() | {"init_lora_weights"}
    problems = [
        f"{name} is {shown(value)} and not implemented"
        for name, value in values.items()
        if name not in known and value
    ]
    start = values.get("init_lora_weights", True)
    if not isinstance(start, bool) and start not in INITIALIZATIONS:
        problems.append(
            f"init_lora_weights is {shown(start)}, which changes the base model's weights: save the adapter again with "
            "PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    return problems


def _is_pattern(value: Any) -> bool:
    """Refuse flags, which cannot stand within an expression."""
    try:
        return isinstance(value, str) and all(re.compile(pattern) for pattern in (value, f"({value})"))
    except (re.error, RecursionError, OverflowError):
        return False


def _is_list_of(is_possible: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_possible, value))


def _is_rank(value: Any) -> bool:
    return is_whole(value) and 0 < value < 2**31


def _is_number(value: Any) -> bool:
    return is_number(value) and abs(value) < 2**31  # and no NaN


def _table_of(is_possible: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, dict) and all(map(is_possible, value.values())) and all(map(_is_pattern, value))
    )


_are_patterns = _is_list_of(_is_pattern)
_SELECTION = (
    lambda value: _is_pattern(value) or _is_list_of(lambda name: isinstance(name, str))(value),
    "a list of names or a regular expression without flags",
)
CHECKS: Checks = {
    "target_modules": _SELECTION,
    "exclude_modules": _SELECTION,
    "layers_to_transform": (_is_list_of(is_whole), "layers' numbers"),
    "layers_pattern": (_are_patterns, "a list of regular expressions"),
    "modules_to_save": (_are_patterns, "a list of names"),
    "r": (_is_rank, "a whole number from 1 up"),
    "rank_pattern": (_table_of(_is_rank), "whole numbers from 1 up by regular expressions"),
    "lora_alpha": (_is_number, "a number"),
    "alpha_pattern": (_table_of(_is_number), "numbers by regular expressions"),
    "use_rslora": (is_bool, "true or false"),
    "bias": (lambda value: value in BIASES, f"one of {', '.join(BIASES)}"),
}


PREFIX = "base_model.model."  # PEFT's wrapper of the model
MAX_RANK = 1024  # of an adapter that is not merged


@dataclass(frozen=True)
class _Model:
    """A model by the tensors of transformers' files. parts: by their names without wrappers; rules: by parameter."""

    layout: Layout
    rules: Mapping[str, TensorRule]
    parts: dict[str, LayoutPart]

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
class _Contents:
    """An adapter by the names of tensors. factors: A, B and scale; saved: of modules that were trained as a whole."""

    factors: dict[str, tuple[Tensor, Tensor, float]]
    replaced: dict[str, Tensor]
    saved: frozenset[str]
    ignored: tuple[str, ...]


def merge_lora(checkpoint: Checkpoint | PackedCheckpoint, adapter: str | os.PathLike[str]) -> Checkpoint:
    """Return the checkpoint with the adapter in a folder merged into it.

    It is tied unless the adapter changes the token embedding or the head alone. Raise one CheckpointError for an
    adapter that cannot be read or fits another model, and for a checkpoint that is converted or not transformers'.
    """
    model, files, contents = _read(checkpoint, adapter)
    parts = model.parts
    stored = dict(checkpoint.stored)
    tied = checkpoint.tied
    replaced = contents.replaced
    updates = {name: _update(name, *factors, model) for name, factors in contents.factors.items()}
    if tied:
        stored[HEAD] = stored[EMBEDDING]
        names = tuple(model.rules[parameter].sources[0] for parameter in (EMBEDDING, HEAD))
        shared = [name for name in names if name not in contents.saved]
        replaced = replaced | {
            name: replaced[one] for one in shared[::-1] if one in replaced for name in shared
        }
        one, other = map(replaced.get, names)
        tied = one == other and updates.keys().isdisjoint(names)
    for parameter in {parts[name].parameter for name in (*replaced, *updates)}:
        stored[parameter] = _changed(stored[parameter], model.rules[parameter], replaced, updates, parts)
    ignored = checkpoint.ignored + contents.ignored
    held = checkpoint.files + files.files
    return replace(checkpoint, stored=stored, tied=tied, ignored=ignored, files=held)


def read_lora(checkpoint: Checkpoint | PackedCheckpoint, adapter: str | os.PathLike[str]) -> dict[str, tuple]:
    """Return an adapter that is not merged: {linear layer: (A (r, in), scale * B (out, r))}, float32.

    Raise as `merge_lora` does, and for an adapter that changes more than the matrices of layers.
    """
    model, files, contents = _read(checkpoint, adapter)
    others = [name for name in (*contents.replaced, *contents.factors) if not _is_plain(name, model)]
    if others or any(a.shape[0] > MAX_RANK for a, _, _ in contents.factors.values()):
        what = f"changes {listed(others)}" if others else f"has a rank above {MAX_RANK}"
        raise CheckpointError(
            f"{files.path} {what}: in lora_modules, only GPT-2's c_attn, c_proj and c_fc may differ. Merge it: lora."
        )
    return {
        model.parts[name].parameter.removesuffix(".weight"): (a.float32(), b.float32() * np.float32(scale))
        for name, (a, b, scale) in contents.factors.items()
    }


def _is_plain(name: str, model: _Model) -> bool:
    parameter = model.parts[name].parameter
    is_one = (
        model.rules[parameter].transform in (AS_IS, TRANSPOSED) and len(model.rules[parameter].sources) == 1
    )
    return is_one and is_transposed(parameter) and ".experts." not in parameter


def _read(
    checkpoint: Checkpoint | PackedCheckpoint, adapter: str | os.PathLike[str]
) -> tuple[_Model, AdapterFiles, _Contents]:
    if isinstance(checkpoint, PackedCheckpoint):
        raise CheckpointError(f"{checkpoint.path} is converted, and takes no adapter: give its original.")
    if not can_be_written(checkpoint):
        raise CheckpointError(f"{checkpoint.path} is a {checkpoint.family}, for which PEFT has no adapters.")
    files = read_adapter(adapter, ("LORA",))
    lora = LoraConfig.from_dict(files.path / CONFIG, files.config)
    stored = dict(checkpoint.stored)
    if checkpoint.tied:
        stored[HEAD] = stored[EMBEDDING]
    layout = layout_of(checkpoint)
    parts = {part.short_name: part for part in parts_of(replace(checkpoint, stored=stored, tied=False))}
    model = _Model(layout, layout.rules(checkpoint.config), parts)
    return model, files, _sort(files, lora, model)


def _changed(
    tensor: Tensor,
    rule: TensorRule,
    replaced: Mapping[str, Tensor],
    updates: Mapping[str, Tensor],
    parts: Mapping[str, LayoutPart],
) -> Tensor:
    names = rule.sources
    if not replaced.keys().isdisjoint(names):
        tensor = rule.transform.of(
            tuple(replaced.get(name) or LazyTensor(parts[name].array, ()) for name in names)
        )
    if not updates.keys().isdisjoint(names):
        found = (updates.get(name) or DefaultTensor(parts[name].shape, zeros) for name in names)
        tensor = LazyTensor(iadd, (rule.transform.of(tuple(found)), tensor))
    return tensor


def _sort(files: AdapterFiles, lora: LoraConfig, model: _Model) -> _Contents:
    stored = {
        name.removeprefix(PREFIX): tensor for name, tensor in files.tensors.items() if name.startswith(PREFIX)
    }
    modules = model.modules(stored)
    shapes = {name: part.shape for name, part in model.parts.items()}
    # PEFT adapts linear layers and embeddings alone.
    targets = [name for name, shape in shapes.items() if len(shape) == 2 and lora.is_target(modules[name])]
    has_own_rows = POSITIONS in model.rules and model.rules[POSITIONS].transform is not AS_IS
    if has_own_rows and (
        own := [modules[name] for name in targets if model.parts[name].parameter == POSITIONS]
    ):
        raise CheckpointError(
            f"{files.path} adapts {listed(own)}, whose rows PEFT looks up by the attention mask and not by their "
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
        lines = "".join(f"\n  {kind}: {listed(names)}" for kind, names in problems.items() if names)
        raise CheckpointError(
            f"{files.path} does not hold the adapter that its {CONFIG} describes for this model.{lines}\n"
            "Give the model that the adapter was trained for, or download the adapter again, all of it."
        )
    return _Contents(
        {name: (stored[a], stored[b], lora.scale(modules[name])) for name, (a, b) in factors.items()},
        {name: stored[file_name] for name, file_name in whole.items()},
        saved,
        tuple(ignored),
    )


def _factors(name: str, module: str, model: _Model, lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """Return the names and shapes of the factors (r, in) and (out, r)."""
    part, r = model.parts[name], lora.rank(module)
    out = part.shape[part.out_axis]
    inner = part.shape[1 - part.out_axis]
    if model.is_embedding(name):  # for PEFT a layer from V to C, which is wte's transpose
        return {f"{module}.lora_embedding_B": (inner, r), f"{module}.lora_embedding_A": (r, out)}
    return {f"{module}.lora_A.weight": (r, inner), f"{module}.lora_B.weight": (out, r)}


def _update(name: str, a: Tensor, b: Tensor, scale: float, model: _Model) -> Tensor:
    if model.is_embedding(name):
        a = LazyTensor(np.transpose, (a,))
        b = LazyTensor(np.transpose, (b,))
    return LazyTensor(partial(_product, scale, model.parts[name].out_axis == 1), (a, b))


def _product(scale: float, is_in_out: bool, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return scale * b @ a, of a (r, in) and b (out, r)."""
    # Not `@`: NumPy's BLAS rounds differently with its number of threads, and is no faster at such ranks.
    update = np.einsum("or,ri->oi", b, a)
    update *= scale
    return update.T if is_in_out else update


def _whole_tensors(names: Iterable[str], model: _Model) -> tuple[dict[str, str], list[str], list[str]]:
    """Return file names of whole tensors by name, and names that are ignored and unexpected."""
    file_names = {}
    ignored = []
    unexpected = []
    for name in sorted(names):
        # ".base_layer." is the adapted layer itself, next to its factors.
        short = model.layout.short_name(name.replace(".base_layer.", "."))
        if short in model.parts and short not in file_names:
            file_names[short] = name
        else:
            (ignored if matches(short, IGNORED) else unexpected).append(name)
    return file_names, ignored, unexpected


def _trained_biases(modules: Mapping[str, str], targets: Iterable[str], bias: str) -> frozenset[str]:
    adapted = {"all": set(modules.values()), "lora_only": {modules[name] for name in targets}, "none": set()}[
        bias
    ]
    return frozenset(name for name, module in modules.items() if name.endswith(".bias") and module in adapted)
