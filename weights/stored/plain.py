"""Checkpoints for others to read: Hugging Face's safetensors, or NumPy's npz, in Hugging Face's names and layout."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tinygpt.config import ModelConfig
from tinygpt.errors import CheckpointError
from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.parameters import HEAD, parameter_shapes
from tinygpt.weights.stored.tensor_file import Entry, write_tensors

SAFETENSORS, NPZ = "model.safetensors", "model.npz"
DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}


def write_safetensors(folder: Path, checkpoint: Checkpoint, dtype: str) -> Path:
    """Write the folder's SAFETENSORS, as transformers' save_pretrained does."""
    shapes = parameter_shapes(checkpoint.config)
    kind, itemsize = DTYPES[dtype]
    entries = {
        _prefixed(name): Entry(
            kind, shapes[name], itemsize * int(np.prod(shapes[name])), partial(_read, checkpoint, name, dtype)
        )
        for name in _names(checkpoint)
    }
    write_tensors(folder / SAFETENSORS, entries, {"format": "pt"})
    return folder / SAFETENSORS


def write_npz(folder: Path, checkpoint: Checkpoint, dtype: str) -> Path:
    """Write the folder's NPZ: an array for each parameter, float32 or float16."""
    with (folder / NPZ).open("wb") as file:
        np.savez(file, **{_prefixed(name): _read(checkpoint, name, dtype) for name in _names(checkpoint)})
    return folder / NPZ


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The fields of a config.json with which transformers makes the same model."""
    eos = list(config.eos_token_ids)
    fields = {name: getattr(config, name) for name in ModelConfig.__dataclass_fields__ if name != "eos_token_ids"}
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        **fields,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
    }


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


def _names(checkpoint: Checkpoint) -> Iterator[str]:
    """Parameters that are to be written: not a head that is tied."""
    return (name for name in parameter_shapes(checkpoint.config) if name != HEAD or not checkpoint.tied)


def _prefixed(name: str) -> str:
    return name if name == HEAD else f"transformer.{name}"


def _read(checkpoint: Checkpoint, name: str, dtype: str) -> np.ndarray:
    tensor = checkpoint.stored[name]
    array = np.ascontiguousarray(tensor.float32())
    tensor.release()
    if dtype == "float16":
        return to_float16(name, array)
    return to_bfloat16(array) if dtype == "bfloat16" else array
