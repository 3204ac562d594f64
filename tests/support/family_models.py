"""Small models of every family that transformers has, as its save_pretrained names and lays them out.

NumPy alone writes them, to the same bits everywhere, for answers recorded of them.
"""

import json
import math
import string
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from support.golden_models import golden_array

V, T, L = 61, 40, 2
ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def opt(width: int = 24, heads: int = 3, **fields: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": L, "ffn_dim": 52}
    return {"model_type": "opt", "vocab_size": V, "max_position_embeddings": T, **sizes, **ENDS, **fields}


def bloom(heads: int, head_size: int = 6, **fields: Any) -> dict[str, Any]:
    sizes = {"hidden_size": heads * head_size, "n_head": heads, "n_layer": L, "seq_length": T}
    return {"model_type": "bloom", "vocab_size": V, **sizes, **ENDS, **fields}


def mpt(heads: int, head_size: int = 8, **fields: Any) -> dict[str, Any]:
    sizes = {"d_model": heads * head_size, "n_heads": heads, "n_layers": L, "max_seq_len": T}
    return {"model_type": "mpt", "vocab_size": V, "expansion_ratio": 4, **sizes, **ENDS, **fields}


def openai_gpt(**fields: Any) -> dict[str, Any]:
    sizes = {"n_embd": 24, "n_head": 3, "n_layer": L, "n_positions": T}
    return {"model_type": "openai-gpt", "vocab_size": V, "afn": "gelu", **sizes, **ENDS, **fields}


def xglm(**fields: Any) -> dict[str, Any]:
    sizes = {"d_model": 24, "attention_heads": 3, "num_layers": L, "ffn_dim": 52, "max_position_embeddings": T}
    return {"model_type": "xglm", "vocab_size": V, **sizes, **ENDS, **fields}


def biogpt(**fields: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": L, "intermediate_size": 52}
    return {"model_type": "biogpt", "vocab_size": V, "max_position_embeddings": T, **sizes, **ENDS, **fields}


# Fields of config.json: all variants, odd widths and numbers of heads.
FAMILY_MODELS = {
    "opt": opt(),
    "opt-350m": opt(do_layer_norm_before=False, word_embed_proj_dim=10),
    "opt-projected": opt(word_embed_proj_dim=36),
    "opt-post-norm": opt(do_layer_norm_before=False),
    "opt-no-final-norm": opt(_remove_final_layer_norm=True),
    "opt-odd": opt(width=35, heads=7, tie_word_embeddings=False),
    "galactica": opt(activation_function="gelu", enable_bias=False),
    "opt-plain-norms": opt(layer_norm_elementwise_affine=False, activation_function="gelu_new"),
    "bloom-4": bloom(4),
    "bloom-6": bloom(6, 5),
    "bloom-12": bloom(12, 2),
    "bloom-14": bloom(14, 3, layer_norm_epsilon=1e-3),
    "bloom-untied": bloom(1, 16, tie_word_embeddings=False),
    "mpt-4": mpt(4),
    "mpt-6": mpt(6, 7),
    "gpt-1": openai_gpt(),
    "gpt-1-silu": openai_gpt(afn="silu", n_embd=33, layer_norm_epsilon=1e-3),
    "xglm": xglm(),
    "xglm-odd": xglm(d_model=35, attention_heads=5, activation_function="relu", pad_token_id=7),
    "xglm-unscaled": xglm(scale_embedding=False, tie_word_embeddings=False),
    "biogpt": biogpt(),
    "biogpt-odd": biogpt(hidden_size=35, num_attention_heads=7, hidden_act="silu", tie_word_embeddings=False),
    "biogpt-unscaled": biogpt(scale_embedding=False, layer_norm_eps=1e-3),
}


def write_family(folder: Path, name: str, prefix: str | None = None, **others: Any) -> Path:
    """config.json, with `others` over its fields, and model.safetensors; `prefix` in place of the usual one."""
    return write_model(folder, {**FAMILY_MODELS[name], **others}, prefix)


def write_model(folder: Path, fields: dict[str, Any], prefix: str | None = None) -> Path:
    kind = fields["model_type"]
    stem = PREFIXES.get(kind, "transformer.") if prefix is None else prefix
    tensors = {stem + key: _tensor(key, shape) for key, shape in SHAPES[kind](fields).items()}
    if not fields.get("tie_word_embeddings", True):
        embedding = next(array for key, array in tensors.items() if key.endswith(EMBEDDINGS))
        tensors[HEADS.get(kind, "lm_head.weight")] = _tensor("head", embedding.shape)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")
    return folder


CHARACTERS = (string.ascii_letters + string.digits)[: V - 1] + " "  # of token ids 0 to V - 1


def write_characters(folder: Path) -> Path:
    """A tokenizer.json beside a model: each token is a character."""
    splitter = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    model = {"type": "WordLevel", "vocab": {c: i for i, c in enumerate(CHARACTERS)}, "unk_token": "[UNK]"}
    steps = {"normalizer": None, "pre_tokenizer": splitter, "post_processor": None, "decoder": {"type": "Fuse"}}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], **steps, "model": model}))
    return folder


PREFIXES = {"opt": "model.decoder.", "xglm": "model.", "biogpt": "biogpt."}
HEADS = {"biogpt": "output_projection.weight"}
EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight", "tokens_embed.weight")


def _opt(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    C, F = fields["hidden_size"], fields["ffn_dim"]
    E = fields.get("word_embed_proj_dim", C)
    bias, affine = fields.get("enable_bias", True), fields.get("layer_norm_elementwise_affine", True)
    is_pre = fields.get("do_layer_norm_before", True)
    shapes = {"embed_tokens.weight": (V, E), "embed_positions.weight": (T + 2, C)}
    shapes |= {"project_in.weight": (C, E), "project_out.weight": (E, C)} if E != C else {}
    shapes |= _opt_layers(C, F, bias, affine)
    has_final = is_pre and not fields.get("_remove_final_layer_norm")
    return shapes | (_norms("", ("final_layer_norm",), C, affine) if has_final else {})


def _opt_layers(C: int, F: int, bias: bool = True, affine: bool = True) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for i in range(L):
        linears = {f"self_attn.{part}_proj": (C, C) for part in ("q", "k", "v", "out")} | {"fc1": (F, C), "fc2": (C, F)}
        shapes |= _linears(f"layers.{i}.", linears, bias)
        shapes |= _norms(f"layers.{i}.", ("self_attn_layer_norm", "final_layer_norm"), C, affine)
    return shapes


def _xglm(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    C = fields["d_model"]
    return {"embed_tokens.weight": (V, C)} | _opt_layers(C, fields["ffn_dim"]) | _norms("", ("layer_norm",), C, True)


def _biogpt(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    C = fields["hidden_size"]
    tables = {"embed_tokens.weight": (V, C), "embed_positions.weight": (T + 2, C)}
    return tables | _opt_layers(C, fields["intermediate_size"]) | _norms("", ("layer_norm",), C, True)


def _bloom(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    C = fields["hidden_size"]
    shapes = {"word_embeddings.weight": (V, C)} | _norms("", ("word_embeddings_layernorm", "ln_f"), C, True)
    linears = {"self_attention.query_key_value": (3 * C, C), "self_attention.dense": (C, C)}
    linears |= {"mlp.dense_h_to_4h": (4 * C, C), "mlp.dense_4h_to_h": (C, 4 * C)}
    for i in range(L):
        shapes |= _linears(f"h.{i}.", linears, True)
        shapes |= _norms(f"h.{i}.", ("input_layernorm", "post_attention_layernorm"), C, True)
    return shapes


def _mpt(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    C = fields["d_model"]
    shapes = {"wte.weight": (V, C), "norm_f.weight": (C,)}
    linears = {"attn.Wqkv": (3 * C, C), "attn.out_proj": (C, C), "ffn.up_proj": (4 * C, C), "ffn.down_proj": (C, 4 * C)}
    for i in range(L):
        shapes |= _linears(f"blocks.{i}.", linears, False)
        shapes |= {f"blocks.{i}.{norm}.weight": (C,) for norm in ("norm_1", "norm_2")}
    return shapes


def _openai_gpt(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    C = fields["n_embd"]
    shapes = {"tokens_embed.weight": (V, C), "positions_embed.weight": (fields["n_positions"], C)}
    linears = {"attn.c_attn": (C, 3 * C), "attn.c_proj": (C, C), "mlp.c_fc": (C, 4 * C), "mlp.c_proj": (4 * C, C)}
    for i in range(L):
        weights = {f"h.{i}.{name}.weight": shape for name, shape in linears.items()}
        biases = {f"h.{i}.{name}.bias": shape[1:] for name, shape in linears.items()}
        shapes |= weights | biases | _norms(f"h.{i}.", ("ln_1", "ln_2"), C, True)
    return shapes


SHAPES = {"opt": _opt, "bloom": _bloom, "mpt": _mpt, "openai-gpt": _openai_gpt, "xglm": _xglm, "biogpt": _biogpt}


def _linears(prefix: str, shapes: dict[str, tuple[int, int]], has_bias: bool) -> dict[str, tuple[int, ...]]:
    weights = {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}
    return weights | ({f"{prefix}{name}.bias": shape[:1] for name, shape in shapes.items()} if has_bias else {})


def _norms(prefix: str, names: tuple[str, ...], width: int, is_affine: bool) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}{name}.{kind}": (width,) for name in names for kind in ("weight", "bias")} if is_affine else {}


def _tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Nothing stays at a 0 or 1 that would hide a mistake, and logits have a std of some units."""
    numbers = golden_array(name, shape)
    if "norm" in name or ".ln_" in name or name.startswith("ln_"):
        # Signs keep a tied head from repeating the last token for ever.
        is_gain = name.endswith("weight")
        return np.sign(numbers) * (np.float32(1) + np.float32(0.3) * numbers) if is_gain else np.float32(0.3) * numbers
    if len(shape) == 1:
        return np.float32(0.2) * numbers
    if "embed" in name or name in ("head", "wte.weight"):
        return numbers
    return numbers * np.float32(3 / math.sqrt(min(shape)))
