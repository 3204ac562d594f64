"""Checkpoints converted to float8: a safetensors file of half bfloat16's size, which is read as any other.

model.safetensors holds the parameters in Hugging Face's layout: matrices as float8 with a scale for each output
channel, or for each token of an embedding, everything else as float32.
"""

from functools import partial
from pathlib import Path

import numpy as np

from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.containers.safetensors.float8 import FORMAT, IN_FILES, SCALE, encode
from tinygpt.weights.parameters import POSITIONS
from tinygpt.weights.stored.plain import parts_of
from tinygpt.weights.stored.tensor_file import Entry, write_tensors

FILE = "model.safetensors"


def write_float8(folder: Path, checkpoint: Checkpoint, source: str) -> Path:
    """Write the folder's FILE."""
    arrays: dict[str, np.ndarray] = {}
    for part in parts_of(checkpoint):
        array = np.ascontiguousarray(part.array())
        if array.ndim == 2 and part.parameter != POSITIONS:  # which is small, and added to the residual stream as it is
            array, arrays[part.short_name + SCALE] = encode(array, axis=1 - part.out_axis)
        arrays[part.short_name] = array
    arrays = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))  # so that float32 is aligned
    file = folder / FILE
    entries = {
        name: Entry(
            IN_FILES if array.dtype == np.uint8 else "F32", array.shape, array.nbytes, partial(np.asarray, array)
        )
        for name, array in arrays.items()
    }
    write_tensors(file, entries, {"format": FORMAT, "source": source})
    return file
