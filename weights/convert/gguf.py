"""GGUF files of GPT-2 and BLOOM that llama.cpp loads, with their tokenizers in them."""

import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint import Checkpoint
from ..config import HEAD, POSITIONS, ModelConfig, parameter_shapes
from ..containers.gguf import ALIGNMENT, ARRAY, FLOAT32, MAGIC, STRING
from ..errors import CheckpointError, how_to_install
from ..families.gguf import ARCHITECTURE, ARCHITECTURES, CONTROL, KEYS, NAMES, NORMAL, UNUSED, USER_DEFINED
from ..families.gpt2 import is_blooms_kind
from ..files import atomic_write, sync
from .export import rounded

FILE = "model.gguf"
# ggml's numbers of types of values
UINT32 = 4
INT32 = 5
BOOL = 7
NUMBER = {bool: (BOOL, "?"), int: (UINT32, "I"), float: (FLOAT32, "f")}
# By our dtypes: ggml's number of a matrix's type and of the file as a whole, and the values and bytes of a block.
TYPES = {"float32": (0, 0, 1, 4), "float16": (1, 1, 1, 2), "bfloat16": (30, 32, 1, 2)}
BLOCKS = {"int8": (8, 7, 32, 34), "int4": (2, 2, 32, 18)}  # Q8_0 and Q4_0
TYPES |= BLOCKS


def write_gguf(folder: Path, checkpoint: Checkpoint, dtype: str, tokenizer: Mapping[str, Any] | None) -> Path:
    """Write model.gguf into the folder. Raise CheckpointError for a model that llama.cpp would compute otherwise.

    tokenizer: of a tokenizer.json, byte-level BPE, or None; "add_bos_token": bos_token_id begins every text.
    """
    config = checkpoint.config
    check_gguf(checkpoint, dtype)
    keys = _keys(config, dtype, checkpoint.path.stem) | _tokenizer_keys(config, tokenizer)
    shapes = {
        name: shape for name, shape in parameter_shapes(config).items() if name != HEAD or not checkpoint.tied
    }
    # Norms, biases and positions stay float32.
    dtypes = {
        name: "float32" if len(shape) == 1 or name == POSITIONS else dtype for name, shape in shapes.items()
    }
    named = {NAMES.of(name): (shape, dtypes[name]) for name, shape in shapes.items()}
    contents = (_bytes(checkpoint, name, dtypes[name]) for name in shapes)
    path = folder / FILE
    with path.open("wb") as file:
        file.writelines(_parts(keys, named, contents))
        file.flush()
        sync(file.fileno())
    return path


def write_tensors(path: Path, keys: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """Write a GGUF file of float32 arrays, or none. Raise CheckpointError."""
    shapes = {name: (array.shape, "float32") for name, array in tensors.items()}
    contents = (np.asarray(array, "<f4").tobytes() for array in tensors.values())
    try:
        atomic_write(path, b"".join(_parts(keys, shapes, contents)))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}.") from error
    return path


def _parts(
    keys: Mapping[str, Any], tensors: Mapping[str, tuple], contents: Iterable[bytes]
) -> Iterator[bytes]:
    """Yield a GGUF file. tensors: shapes and dtypes by name, in the order of `contents`."""
    out = [MAGIC + struct.pack("<IQQ", 3, len(tensors), len(keys))]
    offset = 0
    out += [_string(name) + _typed(content) for name, content in keys.items()]
    for name, (shape, dtype) in tensors.items():
        kind, _, values, size = TYPES[dtype]
        out.append(
            _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
        )
        offset += _padded(math.prod(shape) // values * size)
    yield _with_padding(b"".join(out))
    yield from map(_with_padding, contents)


def check_gguf(checkpoint: Checkpoint, dtype: str) -> None:
    """Raise CheckpointError if llama.cpp would compute the model otherwise, or rows are no whole blocks."""
    config = checkpoint.config
    if config.structure not in ARCHITECTURES.values():
        raise CheckpointError(
            f"{checkpoint.path} holds {checkpoint.family}, and GGUF files are written of GPT-2 and BLOOM alone: give "
            "--to safetensors."
        )
    if config.activation != "gelu_tanh":
        raise CheckpointError(
            f"{checkpoint.path} has the activation {config.activation_function}, and llama.cpp computes gelu_new for "
            "every GPT-2 and BLOOM: it cannot become GGUF."
        )
    values = TYPES[dtype][2]
    if dtype in BLOCKS and find_spec("gguf") is None:
        raise CheckpointError(f"--dtype {dtype} needs gguf for ggml's blocks: {how_to_install('gguf')}.")
    if config.n_embd % values or config.inner_size % values:
        raise CheckpointError(
            f"{checkpoint.path} has rows of {config.n_embd} and {config.inner_size}, which are no whole blocks of "
            f"{values}: give --dtype float16."
        )


def _architecture_of(config: ModelConfig) -> str:
    return next(name for name, structure in ARCHITECTURES.items() if structure == config.structure)


def _keys(config: ModelConfig, dtype: str, name: str) -> dict[str, Any]:
    architecture = _architecture_of(config)
    sizes = {
        "n_layer": config.n_layer,
        "n_positions": config.n_positions,
        "n_embd": config.n_embd,
        "n_inner": config.inner_size,
        "n_head": config.n_head,
        "layer_norm_epsilon": float(config.layer_norm_epsilon),
    }
    return {
        ARCHITECTURE: architecture,
        "general.name": name,
        **{KEYS[field].format(architecture): number for field, number in sizes.items()},
        "general.file_type": TYPES[dtype][1],
        "general.quantization_version": 2,
    }


def _tokenizer_keys(config: ModelConfig, tokenizer: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a token for each row of the vocabulary: without a text, an unused token."""
    ends = {"bos_token_id": config.bos_token_id, "eos_token_id": next(iter(config.eos_token_ids), None)}
    keys = {
        f"tokenizer.ggml.{key}": i for key, i in ends.items() if i is not None and 0 <= i < config.vocab_size
    }
    if tokenizer is None:
        size = f"{_architecture_of(config)}.vocab_size"
        return {**keys, "tokenizer.ggml.model": "none", size: config.vocab_size}
    tokens = [f"[PAD{i}]" for i in range(config.vocab_size)]
    kinds = [UNUSED] * config.vocab_size
    for token, i in tokenizer["model"]["vocab"].items():
        if i < config.vocab_size:
            tokens[i], kinds[i] = token, NORMAL
    for entry in tokenizer["added_tokens"]:
        if entry["id"] < config.vocab_size:
            tokens[entry["id"]] = entry["content"]
            kinds[entry["id"]] = CONTROL if entry["special"] else USER_DEFINED
    return {
        **keys,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "bloom" if is_blooms_kind(tokenizer) else "gpt-2",
        "tokenizer.ggml.add_bos_token": bool(tokenizer.get("add_bos_token")),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
    }


def _bytes(checkpoint: Checkpoint, name: str, dtype: str) -> bytes:
    array = np.ascontiguousarray(_scaled(checkpoint, name))
    checkpoint.release(name)
    if dtype not in BLOCKS:
        return rounded(name, array, dtype).tobytes()
    from gguf import GGMLQuantizationType, quants

    return quants.quantize(array, GGMLQuantizationType(TYPES[dtype][0])).tobytes()


def _scaled(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """Return the parameter. llama.cpp scales scores by the head size alone: the rest goes into queries."""
    array = checkpoint.tensor(name)
    config = checkpoint.config
    if ".attn.c_attn." not in name:
        return array
    factor = config.attention(int(name.split(".")[1])).scale * math.sqrt(config.head_size)
    if math.isclose(factor, 1, rel_tol=1e-9):
        return array
    array = array.copy()
    array[: config.n_embd] *= np.float32(factor)
    return array


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _typed(value: bool | int | float | str | list[int] | list[str]) -> bytes:
    """Put ggml's type before a value. A list of ints is int32."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if not isinstance(value, list):
        kind, form = NUMBER[type(value)]
        return struct.pack(f"<I{form}", kind, value)
    if value and isinstance(value[0], int):
        kind = INT32
        elements = np.array(value, "<i4").tobytes()
    else:
        kind = STRING
        elements = b"".join(map(_string, value))
    return struct.pack("<IIQ", ARRAY, kind, len(value)) + elements


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _with_padding(data: bytes) -> bytes:
    return data.ljust(_padded(len(data)), b"\0")
