"""Checkpoints for other programs, in transformers' layout: safetensors, and NumPy's npz."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...kernels.numbers import to_bfloat16
from ..checkpoint import Checkpoint, read_config
from ..config import HEAD, parameter_shapes
from ..containers.safetensors import Entry, write_tensors
from ..errors import CheckpointError
from ..families.family import TRANSPOSED, Layout, Transform
from ..families.gpt2 import LAYOUT as GPT2_LAYOUT
from ..files import CONFIG_FILES, TOKENIZER_FILES, read_json_object, read_regular
from ..tensor import DefaultTensor, parsing

SAFETENSORS = "model.safetensors"
NPZ = "model.npz"


@dataclass(frozen=True)
class LayoutPart:
    """A tensor of a layout, to write.

    short_name: without transformers' wrappers; out_axis: of output channels.
    """

    name: str
    short_name: str
    shape: tuple[int, ...]
    parameter: str
    array: Callable[[], np.ndarray]
    out_axis: int


def write_safetensors(folder: Path, checkpoint: Checkpoint, dtype: str) -> Path:
    entries = {
        part.name: Entry(dtype, part.shape, partial(_read, part, dtype)) for part in parts_of(checkpoint)
    }
    write_tensors(folder / SAFETENSORS, entries, {"format": "pt"})
    return folder / SAFETENSORS


def write_npz(folder: Path, checkpoint: Checkpoint, dtype: str) -> Path:
    """Write model.npz: an array for each tensor, float32 or float16."""
    with (folder / NPZ).open("wb") as file:
        arrays: dict[str, Any] = {part.name: _read(part, dtype) for part in parts_of(checkpoint)}
        np.savez(file, **arrays)
    return folder / NPZ


def parts_of(checkpoint: Checkpoint) -> Iterator[LayoutPart]:
    """Yield all tensors but a tied head and the parameters that the layout leaves out."""
    layout = layout_of(checkpoint)
    shapes = parameter_shapes(checkpoint.config)
    for name, rule in layout.rules(checkpoint.config).items():
        if name == HEAD and checkpoint.tied:
            continue
        if layout.has_defaults and isinstance(checkpoint.stored[name], DefaultTensor):
            continue
        count = len(rule.sources)
        shape = rule.transform.stored_shape(shapes[name], count)
        for i, source in enumerate(rule.sources):
            array = partial(_part, checkpoint, name, rule.transform, i, count)
            yield LayoutPart(
                layout.file_name(source), source, shape, name, array, int(rule.transform is TRANSPOSED)
            )


def layout_of(checkpoint: Checkpoint) -> Layout:
    """Return transformers' layout of a model. Raise CheckpointError if it has none."""
    if not can_be_written(checkpoint):
        raise CheckpointError(
            f"{checkpoint.path} is a {checkpoint.family}, which convert writes in no format: load it as it is."
        )
    return checkpoint.layout or GPT2_LAYOUT


def can_be_written(checkpoint: Checkpoint) -> bool:
    """Return whether a config.json can describe the model."""
    return not checkpoint.config.structure or checkpoint.layout is not None


def _part(checkpoint: Checkpoint, name: str, transform: Transform, i: int, count: int) -> np.ndarray:
    array = checkpoint.tensor(name)
    checkpoint.release(name)
    return transform.to_parts(array, count)[i]


def rounded(name: str, array: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32s as float32, float16, or bfloat16 in a uint16, rounded to even.

    Raise CheckpointError for values beyond float16's.
    """
    array = np.ascontiguousarray(array)
    if dtype == "float32":
        return array
    if dtype == "bfloat16":
        return to_bfloat16(array)
    with np.errstate(over="ignore"):
        halves = array.astype(np.float16)
    if np.isinf(halves).sum() > np.isinf(array).sum():
        raise CheckpointError(f"{name} has values beyond float16's 65504: give --dtype bfloat16 or float32.")
    return halves


def _read(part: LayoutPart, dtype: str) -> np.ndarray:
    return rounded(part.name, part.array(), dtype)


def write_sidecar_files(
    folder: Path, checkpoint: Checkpoint, tokenizer_json: Mapping[str, Any] | None
) -> None:
    """Copy configuration and tokenizer if they are in Hugging Face's form; otherwise write them.

    tokenizer_json: of the tokenizer in the weights' files.
    """
    # A head that differs from the embedding counts, whatever the checkpoint's own file says.
    config = replace(checkpoint.config, tie_word_embeddings=checkpoint.tied)
    try:
        is_as_beside = read_config(checkpoint.folder) == config
    except CheckpointError:
        is_as_beside = False
    config_json = layout_of(checkpoint).config_json
    if is_as_beside or config_json is None:
        _copy(CONFIG_FILES, checkpoint.folder, folder)
        if not is_as_beside:
            fields = read_json_object(folder / "config.json")
            _write(folder / "config.json", {**fields, "tie_word_embeddings": config.tie_word_embeddings})
    else:
        _write(folder / "config.json", config_json(config))
    if tokenizer_json is None:
        _copy(TOKENIZER_FILES, checkpoint.folder, folder)
        return
    parts = dict(tokenizer_json)
    eos_token = parts.pop("eos_token", None)
    _write(folder / "tokenizer.json", parts)
    if eos_token is not None:
        _write(folder / "tokenizer_config.json", {"eos_token": eos_token})


def _copy(names: tuple[str, ...], source: Path, target: Path) -> None:
    for name in names:
        if (source / name).is_file():
            with parsing(source / name, "file"):
                data = read_regular(source / name)
            (target / name).write_bytes(data)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
