"""LoRA adapters in PEFT's layout, added to a checkpoint's matrices at reading.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021), and PEFT's `LoraModel`: a matrix W
becomes W + scale * B @ A, where A is (r, in) and B is (out, r).

An adapter goes by the modules of transformers, and so by the tensors of its files. A family's rules apply to the update
of a tensor as to the tensor.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import iadd
from typing import NamedTuple

import numpy as np

from ..checkpoint import Checkpoint
from ..config import EMBEDDING, HEAD, POSITIONS, is_transposed
from ..convert.export import LayoutPart, can_be_written, layout_of, parts_of
from ..errors import CheckpointError, listed
from ..families.family import AS_IS, TRANSPOSED, TensorRule, matches
from ..families.gpt2 import IGNORED
from ..tensor import DefaultTensor, LazyTensor, Tensor, zeros
from .forms import (
    PREFIX,
    Extras,
    Model,
    extras_of,
    plain_name,
    scaled,
    with_magnitudes,
    with_rows,
    with_rows_of,
)
from .lora_config import LoraConfig
from .peft import CONFIG, AdapterFiles, read_adapter

MAX_RANK = 1024  # of an adapter that is not merged


@dataclass(frozen=True)
class _Contents:
    """An adapter's tensors, by names of the model's."""

    factors: dict[str, tuple[Tensor, Tensor, float]]  # A (r, in), B (out, r) and scale
    replaced: dict[str, Tensor]  # trained as a whole
    saved: frozenset[str]  # of modules_to_save
    ignored: tuple[str, ...]  # by names in the adapter's file
    extras: Extras
    stored: Mapping[str, Tensor]  # all tensors, by names in the adapter's file


def merge_lora(checkpoint: Checkpoint, adapter: str | os.PathLike[str]) -> Checkpoint:
    """Return the checkpoint with the adapter in a folder merged into it.

    It is tied unless the adapter changes the token embedding or the head alone. Raise one CheckpointError for an
    adapter that cannot be read or fits another model, and for a checkpoint that is converted or not transformers'.
    """
    checkpoint, model, files, contents = _read(checkpoint, adapter)
    parts = model.parts
    stored = dict(checkpoint.stored)
    tied = checkpoint.tied
    names = tuple(model.rules[parameter].sources[0] for parameter in (EMBEDDING, HEAD))
    replaced = contents.replaced
    updates = {name: _update(name, *factors, model) for name, factors in contents.factors.items()}
    if tied:
        stored[HEAD] = stored[EMBEDDING]
        shared = [name for name in names if name not in contents.saved]
        replaced = replaced | {
            name: replaced[one] for one in shared[::-1] if one in replaced for name in shared
        }
    replaced, updates = _with_extras(contents, model, names if tied else (), replaced, updates)
    if tied:
        one, other = map(replaced.get, names)
        tied = one == other and updates.keys().isdisjoint(names)
    for parameter in {parts[name].parameter for name in (*replaced, *updates)}:
        stored[parameter] = _changed(stored[parameter], model.rules[parameter], replaced, updates, parts)
    ignored = checkpoint.ignored + contents.ignored
    held = checkpoint.files + files.files
    return replace(checkpoint, stored=stored, tied=tied, ignored=ignored, files=held)


def _with_extras(
    contents: _Contents,
    model: Model,
    tied: tuple[str, ...],
    replaced: Mapping[str, Tensor],
    updates: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors that are replaced and updated. tied: the names of an embedding that is its head."""
    replaced, updates = dict(replaced), dict(updates)
    extras, stored = contents.extras, contents.stored

    def present(name: str) -> Tensor:
        return replaced.get(name) or LazyTensor(model.parts[name].array, ())

    for name, file_name in extras.magnitudes.items():
        make = partial(with_magnitudes, model.parts[name].out_axis)
        replaced[name] = LazyTensor(make, (present(name), updates.pop(name), stored[file_name]))
    for name, (token_ids, file_name) in extras.rows.items():
        there = present(name)
        changed = LazyTensor(partial(with_rows, token_ids), (there, stored[file_name]))
        alike = [
            other for other in tied if other not in extras.rows and replaced.get(other) == replaced.get(name)
        ]
        replaced |= dict.fromkeys([name, *alike], changed)
    updates |= {name: scaled(stored[file_name], scale) for name, (file_name, scale) in extras.shifts.items()}
    return replaced, updates


def read_lora(checkpoint: Checkpoint, adapter: str | os.PathLike[str]) -> dict[str, tuple]:
    """Return an adapter that is not merged: {linear layer: (A (r, in), scale * B (out, r))}, float32.

    Raise as `merge_lora` does, and for an adapter that changes more than the matrices of layers.
    """
    _, model, files, contents = _read(checkpoint, adapter)
    others = [*contents.replaced, *contents.extras.wanted]
    others += [name for name in contents.factors if not _is_linear(model.parts[name].parameter)]
    layers = {} if others else _layer_factors(contents, model)
    if others or any(len(a) > MAX_RANK for a, _ in layers.values()):
        what = f"changes {listed(others)}" if others else f"has a rank above {MAX_RANK}"
        raise CheckpointError(
            f"{files.path} {what}: in lora_modules, only attention's and MLPs' matrices may differ. Merge it: lora."
        )
    return layers


def _layer_factors(contents: _Contents, model: Model) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return (A (r, in), scale * B (out, r)) by linear layer: of q_proj and v_proj one A of both ranks, for c_attn."""
    downs: dict[str, list[np.ndarray]] = {}
    ups: dict[str, list[np.ndarray]] = {}
    for name, (a, b, scale) in contents.factors.items():
        parameter = model.parts[name].parameter
        rule = model.rules[parameter]
        up = b.float32() * np.float32(scale)  # (out, r), also of a matrix that is stored as (in, out)
        if rule.transform != TRANSPOSED:
            zero = np.zeros_like(up)
            up = rule.transform.of_arrays(*(up if source == name else zero for source in rule.sources))
        layer = parameter.removesuffix(".weight")
        downs.setdefault(layer, []).append(a.float32())
        ups.setdefault(layer, []).append(up)
    return {layer: (np.concatenate(downs[layer]), np.concatenate(ups[layer], axis=1)) for layer in downs}


def _is_linear(parameter: str) -> bool:
    return is_transposed(parameter) and ".experts." not in parameter


def _read(
    checkpoint: Checkpoint, adapter: str | os.PathLike[str]
) -> tuple[Checkpoint, Model, AdapterFiles, _Contents]:
    if checkpoint.converted_to:
        raise CheckpointError(f"{checkpoint.path} is converted, and takes no adapter: give its original.")
    if not can_be_written(checkpoint):
        raise CheckpointError(f"{checkpoint.path} is a {checkpoint.family}, for which PEFT has no adapters.")
    files = read_adapter(adapter, ("LORA",))
    lora = LoraConfig.from_dict(files.path / CONFIG, files.config)
    checkpoint = with_rows_of(checkpoint, files)
    stored = dict(checkpoint.stored)
    if checkpoint.tied:
        stored[HEAD] = stored[EMBEDDING]
    layout = layout_of(checkpoint)
    parts = {part.short_name: part for part in parts_of(replace(checkpoint, stored=stored, tied=False))}
    model = Model(layout, layout.rules(checkpoint.config), parts)
    return checkpoint, model, files, _contents_of(files, lora, model)


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
        update_parts = (updates.get(name) or DefaultTensor(parts[name].shape, zeros) for name in names)
        tensor = LazyTensor(iadd, (rule.transform.of(tuple(update_parts)), tensor))
    return tensor


def _contents_of(files: AdapterFiles, lora: LoraConfig, model: Model) -> _Contents:
    stored = {
        name.removeprefix(PREFIX): tensor for name, tensor in files.tensors.items() if name.startswith(PREFIX)
    }
    modules = model.modules(stored)
    targets = _targets(files, lora, model, modules)
    extras = extras_of(lora, model, modules, targets, stored)
    factors = {name: _factors(name, modules[name], model, lora) for name in targets}
    expected = {file_name: shape for pair in factors.values() for file_name, shape in pair.items()}
    expected |= extras.wanted
    whole = _whole_tensors(stored.keys() - expected.keys(), model)
    saved = frozenset(name for name in model.parts if lora.is_saved(modules[name]))
    required = saved | _trained_biases(modules, targets, lora.bias)
    missing = [name for name in expected if name not in stored]
    missing += sorted(required - whole.file_names.keys())
    foreign = [name for name in files.tensors if not name.startswith(PREFIX)]
    expected |= {file_name: model.parts[name].shape for name, file_name in whole.file_names.items()}
    _refuse_unlike(files, stored, expected, missing, foreign + whole.unexpected)
    return _Contents(
        {name: (stored[a], stored[b], lora.scale(modules[name])) for name, (a, b) in factors.items()},
        {name: stored[file_name] for name, file_name in whole.file_names.items()},
        saved,
        tuple(whole.ignored),
        extras,
        stored,
    )


def _targets(files: AdapterFiles, lora: LoraConfig, model: Model, modules: Mapping[str, str]) -> list[str]:
    """Return the adapted tensors: PEFT adapts linear layers and embeddings alone."""
    targets = [
        name for name, part in model.parts.items() if len(part.shape) == 2 and lora.is_target(modules[name])
    ]
    has_own_rows = POSITIONS in model.rules and model.rules[POSITIONS].transform is not AS_IS
    tables = [modules[name] for name in targets if model.parts[name].parameter == POSITIONS]
    if has_own_rows and tables:
        raise CheckpointError(
            f"{files.path} adapts {listed(tables)}, whose rows PEFT looks up by the attention mask and not by their "
            "positions, so that merged it is another model: train an adapter without."
        )
    return targets


def _refuse_unlike(
    files: AdapterFiles,
    stored: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
    missing: list[str],
    unexpected: list[str],
) -> None:
    """Raise one CheckpointError for all tensors that are not as expected."""
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "misshapen": [
            f"{name} is {stored[name].shape} and should be {shape}"
            for name, shape in expected.items()
            if name in stored and stored[name].shape != shape
        ],
    }
    if any(problems.values()) or not stored:
        lines = "".join(f"\n  {kind}: {listed(names)}" for kind, names in problems.items() if names)
        raise CheckpointError(
            f"{files.path} does not hold the adapter that its {CONFIG} describes for this model.{lines}\n"
            "Give the model that the adapter was trained for, or download the adapter again, all of it."
        )


def _factors(name: str, module: str, model: Model, lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """Return names and shapes, (r, in) and (out, r)."""
    part, r = model.parts[name], lora.rank(module)
    out = part.shape[part.out_axis]
    inner = part.shape[1 - part.out_axis]
    if model.is_embedding(name):  # for PEFT a layer from V to C, which is wte's transpose
        return {f"{module}.lora_embedding_B": (inner, r), f"{module}.lora_embedding_A": (r, out)}
    return {f"{module}.lora_A.weight": (r, inner), f"{module}.lora_B.weight": (out, r)}


def _update(name: str, a: Tensor, b: Tensor, scale: float, model: Model) -> Tensor:
    if model.is_embedding(name):
        a = LazyTensor(np.transpose, (a,))
        b = LazyTensor(np.transpose, (b,))
    return LazyTensor(partial(_product, scale, model.parts[name].out_axis == 1), (a, b))


def _product(scale: float, is_in_out: bool, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return scale * b @ a, of a (r, in) and b (out, r)."""
    # Not `@`: NumPy's BLAS rounds differently with its number of threads, and is no faster at such ranks.
    update = np.einsum("or,ri->oi", b, a)
    update *= scale
    return np.ascontiguousarray(update.T if is_in_out else update)  # which kernels are made for


_COPY = re.compile(r"\.(?:modules_to_save|original_module)\.")


class _WholeTensors(NamedTuple):
    """Names in the adapter's file, of whole tensors by the tensors' names, and of all others."""

    file_names: dict[str, str]
    ignored: list[str]
    unexpected: list[str]


def _whole_tensors(names: Collection[str], model: Model) -> _WholeTensors:
    whole = _WholeTensors({}, [], [])
    for name in sorted(names):
        short = model.layout.short_name(plain_name(name))
        # Of embeddings that were saved as modules, too.
        is_copy = _COPY.search(name) is not None and _COPY.sub(".", name) in names
        if short in model.parts and short not in whole.file_names:
            whole.file_names[short] = name
        elif is_copy or matches(short, IGNORED):
            whole.ignored.append(name)
        else:
            whole.unexpected.append(name)
    return whole


def _trained_biases(modules: Mapping[str, str], targets: Iterable[str], bias: str) -> frozenset[str]:
    if bias == "none":
        return frozenset()
    adapted = set(modules.values()) if bias == "all" else {modules[name] for name in targets}
    return frozenset(name for name, module in modules.items() if name.endswith(".bias") and module in adapted)
