"""GGUF files of GPT-2, BLOOM and GPT-Neo without local layers that llama.cpp loads, with their tokenizers in them."""

import math
import struct
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..checkpoint import Checkpoint
from ..config import HEAD, POSITIONS, ModelConfig, parameter_shapes
from ..errors import CheckpointError, how_to_install
from ..families.gguf import ARCHITECTURES, CONTROL, ENDS, KEYS, NAMES, NORMAL, UNUSED, USER_DEFINED
from ..files import StoredTokenizer, replacing, sync
from .export import rounded

FILE = "model.gguf"
# By our dtypes, the package's names of a matrix's type and of the file's.
TYPES = {
    "float32": ("F32", "ALL_F32"),
    "float16": ("F16", "MOSTLY_F16"),
    "bfloat16": ("BF16", "MOSTLY_BF16"),
    "int8": ("Q8_0", "MOSTLY_Q8_0"),
    "int4": ("Q4_0", "MOSTLY_Q4_0"),
}
IN_BLOCKS = ("int8", "int4")


def write_gguf(folder: Path, checkpoint: Checkpoint, dtype: str, tokenizer: StoredTokenizer | None) -> Path:
    """Write model.gguf into the folder. Raise CheckpointError for a model that llama.cpp would compute otherwise."""
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
    arrays = (_array(checkpoint, name, dtypes[name]) for name in shapes)
    path = folder / FILE
    _write(path, _architecture_of(config), keys, named, arrays)
    return path


def write_tensors(
    path: Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> Path:
    """Write a GGUF file of float32 arrays, or none. Raise CheckpointError."""
    shapes = {name: (array.shape, "float32") for name, array in tensors.items()}
    arrays = (np.asarray(array, np.float32) for array in tensors.values())
    try:
        with replacing(path) as new:
            _write(new, architecture, keys, shapes, arrays)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}.") from error
    return path


def _write(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, tuple[tuple[int, ...], str]],
    arrays: Iterable[np.ndarray],
) -> None:
    """Write a GGUF file and flush it. tensors: shapes and dtypes by name, in the order of `arrays`."""
    gguf = _library()

    class Writer(gguf.GGUFWriter):
        def _pack_val(self, value: Any, *options: Any, **more: Any) -> bytes:
            if value == []:  # of no merges: the package refuses it, and llama.cpp asks for it
                return struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING, 0)
            return super()._pack_val(value, *options, **more)

    with closing(Writer(path, architecture)) as writer:
        for name, content in keys.items():
            is_whole = type(content) is int
            kind = gguf.GGUFValueType.UINT32 if is_whole else gguf.GGUFValueType.get_type(content)
            writer.add_key_value(name, content, kind)
        for name, (shape, dtype) in tensors.items():
            kind = _type_of(dtype)
            block_values, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            size = math.prod(shape) // block_values * block_bytes
            writer.add_tensor_info(name, shape, np.dtype(np.float32), size, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for array in arrays:
            writer.write_tensor_data(array)
    with path.open("rb+") as file:
        sync(file.fileno())


def _library() -> ModuleType:
    try:
        import gguf
    except ImportError:
        raise CheckpointError(
            f"GGUF files are written by the package gguf: {how_to_install('gguf')}."
        ) from None
    return gguf


def _type_of(dtype: str) -> Any:
    """Return ggml's type of a matrix."""
    return _library().GGMLQuantizationType[TYPES[dtype][0]]


def check_gguf(checkpoint: Checkpoint, dtype: str) -> None:
    """Raise CheckpointError if llama.cpp would compute the model otherwise, or rows are no whole blocks."""
    config = checkpoint.config
    if config.structure not in ARCHITECTURES.values():
        structure = ", ".join(f"{name} {value}" for name, value in config.structure.items())
        raise CheckpointError(
            f"{checkpoint.path} holds {checkpoint.family} ({structure}), and GGUF files are written of GPT-2, BLOOM "
            "and GPT-Neo without local layers: give --to safetensors."
        )
    if config.activation != "gelu_tanh":
        raise CheckpointError(
            f"{checkpoint.path} has the activation {config.activation_function}, and llama.cpp computes gelu_new for "
            "every GPT-2 and BLOOM: it cannot become GGUF."
        )
    values, _ = _library().GGML_QUANT_SIZES[_type_of(dtype)]
    if config.n_embd % values or config.inner_size % values:
        raise CheckpointError(
            f"{checkpoint.path} has rows of {config.n_embd} and {config.inner_size}, which are no whole blocks of "
            f"{values}: give --dtype float16."
        )


def _architecture_of(config: ModelConfig) -> str:
    return next(name for name, structure in ARCHITECTURES.items() if structure == config.structure)


def _keys(config: ModelConfig, dtype: str, name: str) -> dict[str, Any]:
    sizes = {
        "n_layer": config.n_layer,
        "n_positions": config.n_positions,
        "n_embd": config.n_embd,
        "n_inner": config.inner_size,
        "n_head": config.n_head,
        "layer_norm_epsilon": float(config.layer_norm_epsilon),
    }
    architecture = _architecture_of(config)
    return {
        "general.name": name,
        **{KEYS[field].format(architecture): number for field, number in sizes.items()},
        "general.file_type": int(_library().LlamaFileType[TYPES[dtype][1]]),
        "general.quantization_version": 2,
    }


def _tokenizer_keys(config: ModelConfig, tokenizer: StoredTokenizer | None) -> dict[str, Any]:
    """Return a token for each row of the vocabulary: without a text, an unused token."""
    ends = {"bos_token_id": config.bos_token_id, **dict(zip(ENDS, config.eos_token_ids, strict=False))}
    keys = {
        f"tokenizer.ggml.{key}": i for key, i in ends.items() if i is not None and 0 <= i < config.vocab_size
    }
    if tokenizer is None:
        size = f"{_architecture_of(config)}.vocab_size"
        return {**keys, "tokenizer.ggml.model": "none", size: config.vocab_size}
    tokens = [f"[PAD{i}]" for i in range(config.vocab_size)]
    kinds = [UNUSED] * config.vocab_size
    for token, i in tokenizer.vocab.items():
        if i < config.vocab_size:
            tokens[i], kinds[i] = token, NORMAL
            if token in tokenizer.added_tokens:
                kinds[i] = CONTROL if tokenizer.added_tokens[token] else USER_DEFINED
    return {
        **keys,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": tokenizer.cuts,
        "tokenizer.ggml.add_bos_token": tokenizer.bos_token is not None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": list(tokenizer.merges),
    }


def _array(checkpoint: Checkpoint, name: str, dtype: str) -> np.ndarray:
    array = np.ascontiguousarray(_scaled(checkpoint, name))
    checkpoint.release(name)
    if dtype in IN_BLOCKS:
        return _library().quants.quantize(array, _type_of(dtype))
    return rounded(name, array, dtype)


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
