"""safetensors: an 8-byte header length, a JSON header, and the tensors end to end.

Format: https://huggingface.co/docs/safetensors/index#format
"""

import json
import struct
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tinygpt.errors import CheckpointError
from tinygpt.weights.containers.mapped_file import MappedFile, StoredTensor, contiguous_strides

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Where every tensor of a safetensors file lies. Raises CheckpointError when the file is damaged.

    The safetensors library checks the file, header and offsets included; the mapping is ours because the
    library copies every tensor that it hands out and has no bfloat16 for NumPy.
    """
    file = MappedFile(path)
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}): download it again.") from error
    (header_size,) = struct.unpack_from("<Q", file.data)
    start = 8 + header_size
    header = json.loads(file.data[8:start])
    header.pop("__metadata__", None)
    return {name: _stored(file, start, entry) for name, entry in header.items()}


def _stored(file: MappedFile, start: int, entry: dict) -> StoredTensor:
    shape = tuple(entry["shape"])
    dtype = DTYPES.get(entry["dtype"], entry["dtype"])
    return StoredTensor(file, dtype, shape, contiguous_strides(shape), start + entry["data_offsets"][0])
