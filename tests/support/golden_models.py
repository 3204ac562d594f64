"""Small GPT-2 checkpoints that NumPy alone writes, to the same bits everywhere, for answers recorded of them."""

import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from support.demo import EOS, VOCAB_SIZE
from support.paths import DEMO
from support.tiny_checkpoint import shapes_of, write_checkpoint

# By name, fields of config.json over SMALL: each activation, each switch of attention, widths of all kinds.
SMALL = {"n_embd": 36, "n_head": 3, "n_layer": 2, "vocab_size": 71, "n_positions": 40, "n_inner": None}
GOLDEN_MODELS = {
    "plain": {},
    "head-size-1": {"n_embd": 6, "n_head": 6},
    "head-size-7": {"n_embd": 21},
    "head-size-64": {"n_embd": 64, "n_head": 1, "n_layer": 1},
    "odd-width": {"n_embd": 17, "n_head": 1},
    "inner-narrow": {"n_inner": 7},
    "inner-wide": {"n_inner": 149, "activation_function": "gelu_pytorch_tanh"},
    "gelu": {"activation_function": "gelu"},
    "quick-gelu": {"activation_function": "quick_gelu"},
    "gelu-fast": {"activation_function": "gelu_fast"},
    "relu": {"activation_function": "relu"},
    "silu": {"activation_function": "silu"},
    "tanh": {"activation_function": "tanh"},
    "scores-unscaled": {"scale_attn_weights": False},
    "scores-by-layer": {"scale_attn_by_inverse_layer_idx": True, "n_layer": 3},
    "upcast": {"reorder_and_upcast_attn": True},
    "epsilon-large": {"layer_norm_epsilon": 0.1},
    "untied": {"tie_word_embeddings": False},
}


def write_golden(folder: Path, name: str, **others: Any) -> Path:
    """config.json, with `others` over its fields, and model.safetensors in `folder`, which is returned."""
    return write_model(folder, **GOLDEN_MODELS[name] | others)


def write_model(folder: Path, seed: str = "", **fields: Any) -> Path:
    """One of any sizes: fields of config.json over SMALL."""
    fields = {**SMALL, "bos_token_id": None, "eos_token_id": None, **fields}
    return write_checkpoint(folder, _tensors(seed, fields), **fields)


def write_small_demo(folder: Path) -> Path:
    """The demo's tokenizer and positions before a tiny model: its steps take a fraction of the demo's."""
    fields = {"vocab_size": VOCAB_SIZE, "n_positions": 512, "bos_token_id": EOS, "eos_token_id": EOS}
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(DEMO / name, folder)
    return write_model(folder, **fields)


def golden_ids(count: int, seed: str = "ids", vocab_size: int = SMALL["vocab_size"]) -> list[int]:
    return (np.abs(golden_array(seed, (count,))) * vocab_size).astype(int).tolist()


def _tensors(seed: str, fields: dict[str, Any]) -> dict[str, np.ndarray]:
    C, V = fields["n_embd"], fields["vocab_size"]
    shapes = shapes_of(C, fields["n_inner"] or 4 * C, fields["n_layer"], V, fields["n_positions"])
    if not fields.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (V, C)
    tensors = {name: _tensor(seed, name, shape) for name, shape in shapes.items()}
    return {name if name == "lm_head.weight" else f"transformer.{name}": array for name, array in tensors.items()}


def _tensor(seed: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Nothing stays at a 0 or 1 that would hide a mistake, and logits have a std of some units."""
    numbers = golden_array(seed + name, shape)
    if ".ln_" in f".{name}" and name.endswith("weight"):
        # Signs keep a tied head from repeating the last token for ever.
        return np.sign(numbers) * (np.float32(1) + np.float32(0.3) * numbers)
    if name.startswith(("wte", "wpe", "lm_head")):
        return numbers
    if name.endswith("bias"):
        return np.float32(0.2) * numbers
    return numbers * np.float32(3 / 2 ** round(np.log2(shape[0]) / 2))  # Conv1D: (in, out)


def golden_array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 in [-1, 1), from name and place alone: integers mixed as by MurmurHash3's last step, and scaled."""
    x = np.arange(np.prod(shape), dtype=np.uint32) * np.uint32(2654435761) + np.uint32(zlib.crc32(name.encode()))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return ((x >> np.uint32(8)).astype(np.float32) / np.float32(2**23) - 1).reshape(shape)
