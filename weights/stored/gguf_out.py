"""GGUF files of GPT-2 and BLOOM that llama.cpp loads, with their tokenizers in them."""

import math
import struct
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.config import HEAD, POSITIONS, ModelConfig, parameter_shapes
from tinygpt.weights.containers.gguf import ALIGNMENT, ARRAY, MAGIC, NUMBERS, STRING
from tinygpt.weights.errors import CheckpointError, how_to_install
from tinygpt.weights.families.gguf import (
    ARCHITECTURE,
    ARCHITECTURES,
    CONTROL,
    KEYS,
    NAMES,
    NORMAL,
    UNUSED,
    USER_DEFINED,
)
from tinygpt.weights.families.tokenizers import is_blooms_kind
from tinygpt.weights.files import sync
from tinygpt.weights.stored.export import to_bfloat16, to_float16

FILE = "model.gguf"
U32, I32, F32, BOOL = 4, 5, 6, 7
# By our dtypes: ggml's number of the type of matrices, and of the file as a whole.
TYPES = {"float32": (0, 0), "float16": (1, 1), "bfloat16": (30, 32), "int8": (8, 7), "int4": (2, 2)}
BLOCKS = {"int8": (8, 32, 34), "int4": (2, 32, 18)}  # Q8_0 and Q4_0: ggml's number, values and bytes of a block
PLAIN = 0  # float32: what is small, and all positions


def write_gguf(folder: Path, checkpoint: Checkpoint, dtype: str, tokenizer: Mapping[str, Any] | None) -> Path:
    """Write model.gguf into the folder. Raise CheckpointError for a model that llama.cpp would compute otherwise.

    tokenizer: byte-level BPE in the form of a tokenizer.json, or None; "add_bos_token": bos_token_id begins every text.
    """
    config = checkpoint.config
    check_gguf(checkpoint, dtype)
    keys = _keys(config, dtype, checkpoint.path.stem) | _tokenizer_keys(config, tokenizer)
    shapes = parameter_shapes(config)
    names = [name for name in shapes if name != HEAD or not checkpoint.tied]
    out, offset = [MAGIC + struct.pack("<IQQ", 3, len(names), len(keys))], 0
    out += [_string(name) + struct.pack("<I", kind) + _value(kind, content) for name, (kind, content) in keys.items()]
    for name in names:
        shape, kind, size = _place(name, shapes[name], dtype)
        out.append(_string(NAMES.of(name)) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape)))
        out.append(struct.pack("<IQ", kind, offset))
        offset += _padded(size)
    with (folder / FILE).open("wb") as file:
        file.write(_with_padding(b"".join(out)))
        for name in names:
            _, kind, _ = _place(name, shapes[name], dtype)
            file.write(_with_padding(_bytes(checkpoint, name, dtype, kind)))
        file.flush()
        sync(file.fileno())
    return folder / FILE


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
    _, values, _ = BLOCKS.get(dtype, (0, 1, 0))
    if dtype in BLOCKS and find_spec("gguf") is None:
        raise CheckpointError(f"--dtype {dtype} needs gguf for ggml's blocks: {how_to_install('gguf')}.")
    if config.n_embd % values or config.inner_size % values:
        raise CheckpointError(
            f"{checkpoint.path} has rows of {config.n_embd} and {config.inner_size}, which are no whole blocks of "
            f"{values}: give --dtype float16."
        )


def _architecture_of(config: ModelConfig) -> str:
    return next(name for name, structure in ARCHITECTURES.items() if structure == config.structure)


def _keys(config: ModelConfig, dtype: str, name: str) -> dict[str, tuple[int, Any]]:
    architecture = _architecture_of(config)
    numbers = {
        "n_layer": config.n_layer,
        "n_positions": config.n_positions,
        "n_embd": config.n_embd,
        "n_inner": config.inner_size,
        "n_head": config.n_head,
    }
    return {
        ARCHITECTURE: (STRING, architecture),
        "general.name": (STRING, name),
        **{KEYS[field].format(architecture): (U32, number) for field, number in numbers.items()},
        KEYS["layer_norm_epsilon"].format(architecture): (F32, config.layer_norm_epsilon),
        "general.file_type": (U32, TYPES[dtype][1]),
        "general.quantization_version": (U32, 2),
    }


def _tokenizer_keys(config: ModelConfig, tokenizer: Mapping[str, Any] | None) -> dict[str, tuple[int, Any]]:
    """Return as many tokens as the vocabulary has rows: rows without a text are unused tokens."""
    ends = {"bos_token_id": config.bos_token_id, "eos_token_id": next(iter(config.eos_token_ids), None)}
    keys = {
        f"tokenizer.ggml.{key}": (U32, i) for key, i in ends.items() if i is not None and 0 <= i < config.vocab_size
    }
    if tokenizer is None:
        size = f"{_architecture_of(config)}.vocab_size"
        return keys | {"tokenizer.ggml.model": (STRING, "none"), size: (U32, config.vocab_size)}
    tokens = [f"[PAD{i}]" for i in range(config.vocab_size)]
    kinds = [UNUSED] * config.vocab_size
    for token, i in tokenizer["model"]["vocab"].items():
        if i < config.vocab_size:
            tokens[i], kinds[i] = token, NORMAL
    for entry in tokenizer["added_tokens"]:
        if entry["id"] < config.vocab_size:
            tokens[entry["id"]] = entry["content"]
            kinds[entry["id"]] = CONTROL if entry["special"] else USER_DEFINED
    merges = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    return {
        **keys,
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "bloom" if is_blooms_kind(tokenizer) else "gpt-2"),
        "tokenizer.ggml.add_bos_token": (BOOL, bool(tokenizer.get("add_bos_token"))),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, kinds)),
        "tokenizer.ggml.merges": (ARRAY, (STRING, merges)),
    }


def _place(name: str, shape: tuple[int, ...], dtype: str) -> tuple[tuple[int, ...], int, int]:
    """Return the shape in the file, ggml's type and the size in bytes."""
    if len(shape) == 1 or name == POSITIONS:
        return shape, PLAIN, 4 * math.prod(shape)
    if dtype in BLOCKS:
        kind, values, size = BLOCKS[dtype]
        return shape, kind, math.prod(shape) // values * size
    return shape, TYPES[dtype][0], math.prod(shape) * (4 if dtype == "float32" else 2)


def _bytes(checkpoint: Checkpoint, name: str, dtype: str, kind: int) -> bytes:
    array = np.ascontiguousarray(_scaled(checkpoint, name))
    checkpoint.release(name)
    if kind == PLAIN:
        return array.tobytes()
    if dtype in BLOCKS:
        from gguf import GGMLQuantizationType, quants

        return quants.quantize(array, GGMLQuantizationType(kind)).tobytes()
    return (to_float16(name, array) if dtype == "float16" else to_bfloat16(array)).tobytes()


def _scaled(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """Return the parameter, (out, in). llama.cpp scales scores by the head size alone: the rest goes into queries."""
    array, config = checkpoint.tensor(name), checkpoint.config
    if ".attn.c_attn." not in name:
        return array
    factor = config.attention_scale(int(name.split(".")[1])) * math.sqrt(config.head_size)
    if math.isclose(factor, 1, rel_tol=1e-9):
        return array
    array = array.copy()
    array[: config.n_embd] *= np.float32(factor)
    return array


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, content: Any) -> bytes:
    if kind == STRING:
        return _string(content)
    if kind != ARRAY:
        return struct.pack(f"<{NUMBERS[kind]}", content)
    inner, elements = content
    return struct.pack("<IQ", inner, len(elements)) + b"".join(_value(inner, element) for element in elements)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _with_padding(data: bytes) -> bytes:
    return data.ljust(_padded(len(data)), b"\0")
