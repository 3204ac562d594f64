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
from support.golden_models import write_model as write_gpt2
from support.tables import rows

V = 61
T = 40
L = 2
ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

# By model_type, the usual fields of config.json.
USUAL = dict(
    rows("""
opt        | {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "ffn_dim": 52}
bloom      | {"n_layer": 2, "seq_length": 40}
mpt        | {"n_layers": 2, "max_seq_len": 40, "expansion_ratio": 4}
openai-gpt | {"n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 40, "afn": "gelu"}
gpt_neo    | {"hidden_size": 24, "num_heads": 3, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}
xglm       | {"d_model": 24, "attention_heads": 3, "num_layers": 2, "ffn_dim": 52}
biogpt     | {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 52}
""")
)


def family(model_type: str, **fields: Any) -> dict[str, Any]:
    length = {"max_position_embeddings": T} if model_type in ("opt", "xglm", "biogpt", "gpt_neo") else {}
    return {"model_type": model_type, "vocab_size": V, **USUAL[model_type], **length, **ENDS, **fields}


# Fields of config.json: all variants, odd widths and numbers of heads.
MODELS = """
opt               | opt        | {}
opt-350m          | opt        | {"do_layer_norm_before": false, "word_embed_proj_dim": 10}
opt-projected     | opt        | {"word_embed_proj_dim": 36}
opt-post-norm     | opt        | {"do_layer_norm_before": false}
opt-no-final-norm | opt        | {"_remove_final_layer_norm": true}
opt-odd           | opt        | {"hidden_size": 35, "num_attention_heads": 7, "tie_word_embeddings": false}
galactica         | opt        | {"activation_function": "gelu", "enable_bias": false}
opt-plain-norms   | opt        | {"layer_norm_elementwise_affine": false, "activation_function": "gelu_new"}
bloom-4           | bloom      | {"hidden_size": 24, "n_head": 4}
bloom-6           | bloom      | {"hidden_size": 30, "n_head": 6}
bloom-12          | bloom      | {"hidden_size": 24, "n_head": 12}
bloom-14          | bloom      | {"hidden_size": 42, "n_head": 14, "layer_norm_epsilon": 0.001}
bloom-untied      | bloom      | {"hidden_size": 16, "n_head": 1, "tie_word_embeddings": false}
mpt-4             | mpt        | {"d_model": 32, "n_heads": 4}
mpt-6             | mpt        | {"d_model": 42, "n_heads": 6}
gpt-1             | openai-gpt | {}
gpt-1-silu        | openai-gpt | {"afn": "silu", "n_embd": 33, "layer_norm_epsilon": 0.001}
xglm              | xglm       | {}
xglm-odd          | xglm       | {"d_model": 35, "attention_heads": 5, "activation_function": "relu", "pad_token_id": 7}
xglm-unscaled     | xglm       | {"scale_embedding": false, "tie_word_embeddings": false}
biogpt            | biogpt     | {}
biogpt-odd | biogpt | {"hidden_size": 35, "num_attention_heads": 7, "hidden_act": "silu", "tie_word_embeddings": false}
biogpt-unscaled   | biogpt     | {"scale_embedding": false, "layer_norm_eps": 0.001}
gpt-neo           | gpt_neo    | {"window_size": 5}
gpt-neo-local     | gpt_neo    | {"attention_types": [[["local"], 2]], "window_size": 1, "tie_word_embeddings": false}
gpt-neo-odd       | gpt_neo    | {"hidden_size": 35, "num_heads": 5, "window_size": 39, "intermediate_size": 50}
gpt-neo-wide      | gpt_neo    | {"window_size": 40, "activation_function": "relu", "layer_norm_epsilon": 0.001}
gpt-neo-global    | gpt_neo    | {"attention_types": [[["global"], 2]]}
"""
FAMILY_MODELS = {name: family(kind, **fields) for name, kind, fields in rows(MODELS)}


def write_family(folder: Path, name: str, prefix: str | None = None, **others: Any) -> Path:
    """config.json, with `others` over its fields, and model.safetensors; `prefix` in place of the usual one."""
    return write_model(folder, {**FAMILY_MODELS[name], **others}, prefix)


def write_any(folder: Path, seed: str = "", **fields: Any) -> Path:
    """A model of any sizes: with a model_type, fields over a family's usual ones, otherwise a GPT-2 of a seed."""
    if "model_type" in fields:
        return write_model(folder, family(**fields))
    return write_gpt2(folder, seed, **fields)


def write_model(folder: Path, fields: dict[str, Any], prefix: str | None = None) -> Path:
    kind = fields["model_type"]
    usual, embedding = LAYOUTS[kind][:2]
    stem = usual if prefix is None else prefix
    tensors = {stem + key: _tensor(key, shape) for key, shape in _shapes(fields).items()}
    if not fields.get("tie_word_embeddings", True):
        shape = tensors[f"{stem}{embedding}.weight"].shape
        tensors[HEADS.get(kind, "lm_head.weight")] = _tensor("head", shape)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")
    return folder


CHARACTERS = (string.ascii_letters + string.digits)[: V - 1] + " "  # of token ids 0 to V - 1
HEADS = {"biogpt": "output_projection.weight"}
# By model_type: the prefix of names, the embedding, layers, norms in layers and outside.
LAYOUTS = {
    kind: cells
    for kind, *cells in rows("""
opt        | model.decoder. | embed_tokens    | layers.
  | ["self_attn_layer_norm", "final_layer_norm"] | ["final_layer_norm"]
xglm       | model.         | embed_tokens    | layers. | ["self_attn_layer_norm", "final_layer_norm"] | ["layer_norm"]
biogpt     | biogpt.        | embed_tokens    | layers. | ["self_attn_layer_norm", "final_layer_norm"] | ["layer_norm"]
bloom      | transformer.   | word_embeddings | h.      | ["input_layernorm", "post_attention_layernorm"]
  | ["word_embeddings_layernorm", "ln_f"]
mpt        | transformer.   | wte             | blocks. | ["norm_1", "norm_2"] | ["norm_f"]
gpt_neo    | transformer.   | wte             | h.      | ["ln_1", "ln_2"] | ["ln_f"]
openai-gpt | transformer.   | tokens_embed    | h.      | ["ln_1", "ln_2"] | []
""")
}
# Linears of a layer: a letter for each size, C the width, Q that of queries, keys and values, F the MLP's.
NO_BIAS = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
LINEARS = dict(
    rows("""
bart | {"self_attn.q_proj": "CC", "self_attn.k_proj": "CC", "self_attn.v_proj": "CC", "self_attn.out_proj": "CC",
  "fc1": "FC", "fc2": "CF"}
bloom | {"self_attention.query_key_value": "QC", "self_attention.dense": "CC",
  "mlp.dense_h_to_4h": "FC", "mlp.dense_4h_to_h": "CF"}
mpt | {"attn.Wqkv": "QC", "attn.out_proj": "CC", "ffn.up_proj": "FC", "ffn.down_proj": "CF"}
gpt_neo | {"attn.attention.q_proj": "CC", "attn.attention.k_proj": "CC", "attn.attention.v_proj": "CC",
  "attn.attention.out_proj": "CC", "mlp.c_fc": "FC", "mlp.c_proj": "CF"}
openai-gpt | {"attn.c_attn": "CQ", "attn.c_proj": "CC", "mlp.c_fc": "CF", "mlp.c_proj": "FC"}
""")
)


def _shapes(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    kind = fields["model_type"]
    C = next(fields[name] for name in ("hidden_size", "d_model", "n_embd") if name in fields)
    F = next((fields[name] for name in ("ffn_dim", "intermediate_size") if name in fields), 4 * C)
    E = fields.get("word_embed_proj_dim", C)
    V = fields["vocab_size"]
    _, embedding, layers, norms, outer_norms = LAYOUTS[kind]
    parts = ("weight",) if kind == "mpt" else ("weight", "bias")  # of a norm
    if not fields.get("layer_norm_elementwise_affine", True):
        parts = ()
    if not fields.get("do_layer_norm_before", True) or fields.get("_remove_final_layer_norm"):
        outer_norms = ()
    shapes = {f"{embedding}.weight": (V, E)} | {
        f"{name}.{part}": (C,) for name in outer_norms for part in parts
    }
    if kind in ("opt", "biogpt"):
        shapes["embed_positions.weight"] = (T + 2, C)
    if kind == "gpt_neo":
        shapes["wpe.weight"] = (fields["max_position_embeddings"], C)
    if kind == "openai-gpt":
        shapes["positions_embed.weight"] = (fields["n_positions"], C)
    if E != C:
        shapes |= {"project_in.weight": (C, E), "project_out.weight": (E, C)}
    for i in range(L):
        for name, letters in LINEARS.get(kind, LINEARS["bart"]).items():
            shape = tuple({"C": C, "F": F, "Q": 3 * C}[letter] for letter in letters)
            shapes[f"{layers}{i}.{name}.weight"] = shape
            is_bare = kind == "mpt" or name.endswith(NO_BIAS)
            if fields.get("enable_bias", not is_bare):
                shapes[f"{layers}{i}.{name}.bias"] = shape[1:] if kind == "openai-gpt" else shape[:1]
        shapes |= {f"{layers}{i}.{name}.{part}": (C,) for name in norms for part in parts}
    return shapes


def _tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Nothing stays at a 0 or 1 that would hide a mistake, and logits have a std of some units."""
    numbers = golden_array(name, shape)
    if "norm" in name or ".ln_" in name or name.startswith("ln_"):
        # Signs keep a tied head from repeating the last token for ever.
        is_gain = name.endswith("weight")
        return (
            np.sign(numbers) * (np.float32(1) + np.float32(0.3) * numbers)
            if is_gain
            else np.float32(0.3) * numbers
        )
    if len(shape) == 1:
        return np.float32(0.2) * numbers
    if "embed" in name or name in ("head", "wte.weight", "wpe.weight"):
        return numbers
    if name.endswith("attention.q_proj.weight"):  # of scores without a scale, as small as training leaves it
        numbers = numbers / np.float32(math.sqrt(8))
    return numbers * np.float32(3 / math.sqrt(min(shape)))
