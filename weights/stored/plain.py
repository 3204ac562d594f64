"""Checkpoints for others to read: Hugging Face's safetensors, or NumPy's npz, in Hugging Face's names and layout."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.families.family import Layout
from tinygpt.weights.families.hugging_face.gpt2 import LAYOUT as GPT2_LAYOUT
from tinygpt.weights.families.table import FAMILIES
from tinygpt.weights.families.transforms import Transform
from tinygpt.weights.parameters import HEAD, is_transposed, parameter_shapes
from tinygpt.weights.stored.tensor_file import Entry, write_tensors
from tinygpt.weights.tensor import MadeUp, Tensor

SAFETENSORS, NPZ = "model.safetensors", "model.npz"
DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}


def write_safetensors(folder: Path, checkpoint: Checkpoint, dtype: str) -> Path:
    """Write the folder's SAFETENSORS, as transformers' save_pretrained does."""
    kind, itemsize = DTYPES[dtype]
    entries = {
        part.name: Entry(kind, part.shape, itemsize * math.prod(part.shape), partial(_read, part, dtype))
        for part in parts_of(checkpoint)
    }
    write_tensors(folder / SAFETENSORS, entries, {"format": "pt"})
    return folder / SAFETENSORS


def write_npz(folder: Path, checkpoint: Checkpoint, dtype: str) -> Path:
    """Write the folder's NPZ: an array for each tensor, float32 or float16."""
    with (folder / NPZ).open("wb") as file:
        np.savez(file, **{part.name: _read(part, dtype) for part in parts_of(checkpoint)})
    return folder / NPZ


@dataclass(frozen=True)
class Part:
    """A tensor to write, by its name in Hugging Face's files. out_axis: that of its output channels, if a matrix.

    short_name: without what transformers wraps the model in.
    """

    name: str
    short_name: str
    shape: tuple[int, ...]
    parameter: str
    array: Callable[[], np.ndarray]
    out_axis: int


def parts_of(checkpoint: Checkpoint) -> Iterator[Part]:
    """All tensors: not a head that is tied, nor what transformers leaves out of models that were trained without it.

    CheckpointError for a model that is not written so.
    """
    layout, shapes = layout_of(checkpoint), parameter_shapes(checkpoint.config)
    for name, rule in layout.rules(checkpoint.config).items():
        if name == HEAD and checkpoint.tied:
            continue
        if layout.has_defaults and isinstance(checkpoint.stored[name], MadeUp):
            continue
        count = len(rule.sources)
        shape = rule.transform.stored_shape(shapes[name], count)
        for i, source in enumerate(rule.sources):
            array = partial(_part, checkpoint.stored[name], rule.transform, i, count)
            out_axis = 1 if layout.is_in_out and is_transposed(name) else 0
            yield Part(layout.file_name(source), source, shape, name, array, out_axis)


def layout_of(checkpoint: Checkpoint) -> Layout:
    """How transformers keeps such a model. CheckpointError for one that it does not have, or not as it lies here."""
    if not can_be_written(checkpoint):
        raise CheckpointError(
            f"{checkpoint.path} is a {checkpoint.family}, which convert writes in no format: load it as it is."
        )
    return _own_layout(checkpoint) or GPT2_LAYOUT


def can_be_written(checkpoint: Checkpoint) -> bool:
    """Whether there is a config.json that says what the model is."""
    return not checkpoint.config.structure or _own_layout(checkpoint) is not None


def _own_layout(checkpoint: Checkpoint) -> Layout | None:
    return next((family.layout for family in FAMILIES if family.name == checkpoint.family), None)


def _part(tensor: Tensor, transform: Transform, i: int, count: int) -> np.ndarray:
    array = tensor.float32()
    tensor.release()
    return transform.to_parts(array, count)[i]


def to_bfloat16(array: np.ndarray) -> np.ndarray:
    """The upper halves of float32s, rounded to even; a NaN stays one."""
    bits = array.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(array), bits >> 16 | 64, rounded).astype(np.uint16)


def to_float16(name: str, array: np.ndarray) -> np.ndarray:
    """CheckpointError where it does not fit: float16 ends at 65504."""
    with np.errstate(over="ignore"):
        halves = array.astype(np.float16)
    if np.isinf(halves).sum() > np.isinf(array).sum():
        raise CheckpointError(f"{name} has values beyond float16's 65504: give --dtype bfloat16 or float32.")
    return halves


def _read(part: Part, dtype: str) -> np.ndarray:
    array = np.ascontiguousarray(part.array())
    if dtype == "float16":
        return to_float16(part.name, array)
    return to_bfloat16(array) if dtype == "bfloat16" else array
