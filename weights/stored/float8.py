"""Checkpoints converted to float8: a safetensors file of half bfloat16's size, which is read as any other.

model.safetensors holds the parameters in Hugging Face's layout: matrices as float8 with a scale for each output
channel, or for each token of an embedding, everything else as float32.
"""

import json
import os
import struct
from pathlib import Path

import numpy as np

from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.containers.float8 import FORMAT, IN_FILES, SCALE, encode
from tinygpt.weights.parameters import HEAD, POSITIONS, is_transposed

FILE = "model.safetensors"


def write_float8(folder: Path, checkpoint: Checkpoint, source: str) -> Path:
    """Write the folder's FILE."""
    arrays: dict[str, np.ndarray] = {}
    for name, tensor in checkpoint.stored.items():
        if name == HEAD and checkpoint.tied:
            continue
        array = tensor.float32()
        if array.ndim == 2 and name != POSITIONS:  # which is small, and added to the residual stream as it is
            array, arrays[name + SCALE] = encode(array, axis=0 if is_transposed(name) else 1)
        arrays[name] = array
        tensor.release()
    arrays = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))  # so that float32 is aligned
    file = folder / FILE
    with file.open("wb") as out:
        out.write(_header(arrays, {"format": FORMAT, "source": source}))
        for array in arrays.values():
            out.write(np.ascontiguousarray(array).data)
        out.flush()
        os.fsync(out.fileno())
    return file


def _header(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> bytes:
    """By hand: NumPy has no float8 that the safetensors library could take."""
    entries, start = {"__metadata__": metadata}, 0
    for name, array in arrays.items():
        kind = IN_FILES if array.dtype == np.uint8 else "F32"
        entries[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [start, start := start + array.nbytes]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
