"""OPT and Galactica (Zhang et al., 2022), and models with OPT's layers: XGLM (Lin et al., 2021), BioGPT (Luo et al.,
2022).

Queries, keys and values have a matrix each. Positions begin at row 2 of their table; XGLM's are sinusoids, which no
file holds. OPT-350m alone has its norms after the blocks, none before the head, and narrower embeddings.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..config import POSITIONS, ModelConfig
from ..errors import is_whole
from ..tensor import ones, zeros
from .config_fields import BOOLEAN, LARGEST, only, or_null, size_to
from .family import NO_BIAS, Names, TensorRule, Transform, as_is
from .gpt2 import ALIASES
from .model_types import Fields, ModelType

FIRST_POSITION = 2
FIRST_ROW = f"positions begin at row {FIRST_POSITION} of their table"
ONE_C_ATTN = "one c_attn of queries, keys and values"
QKV = "self_attn.qkv_proj"  # stands for q_proj, k_proj and v_proj
IN_LAYER = ("self_attn_layer_norm", QKV, "self_attn.out_proj", "final_layer_norm", "fc1", "fc2")
WITHOUT_FIRST_ROWS = Transform(
    lambda shape, n: (shape[0] + FIRST_POSITION, *shape[1:]),
    lambda array: array[FIRST_POSITION:],
    to_parts=lambda array, n: [np.pad(array, ((FIRST_POSITION, 0), (0, 0)))],
)


def names(last_norm: str, head: str = "lm_head", **others: str) -> Names:
    tables = {"wte": "embed_tokens", "wpe": "embed_positions", "ln_f": last_norm, "lm_head": head}
    return Names("layers", tables | others, IN_LAYER)


def rule_of_decoder(parameter: str, usual: TensorRule, config: ModelConfig, fields: Fields) -> TensorRule:
    if parameter == POSITIONS:
        return replace(usual, transform=WITHOUT_FIRST_ROWS)
    if ".c_attn." in parameter:
        return TensorRule(tuple(usual.sources[0].replace("qkv", matrix) for matrix in "qkv"), as_is(0))
    return usual


def embed_scale(fields: Fields, width: Any) -> dict[str, float]:
    is_scaled = fields["scale_embedding"] is True and is_whole(width) and width > 0
    return {"embed_scale": width**0.5} if is_scaled else {}


def _epsilon(fields: Fields) -> dict[str, float]:
    """layer_norm_epsilon is no field of these models."""
    return {"layer_norm_epsilon": 1e-5}


_OPT_SIZES = {"vocab_size": 50272, "hidden_size": 768, "ffn_dim": 3072, "max_position_embeddings": 2048}
_OPT_SIZES |= {"num_hidden_layers": 12, "num_attention_heads": 12}
_OPT_SWITCHES = {"do_layer_norm_before": True, "_remove_final_layer_norm": False}
_OPT_SWITCHES |= {"enable_bias": True, "layer_norm_elementwise_affine": True}


def _opt_structure(fields: Fields) -> dict[str, Any]:
    width = fields.get("word_embed_proj_dim")
    is_pre = fields["do_layer_norm_before"]
    return {
        "norm_placement": "pre" if is_pre else "post",
        "final_norm": bool(is_pre and not fields["_remove_final_layer_norm"]),
        "embed_dim": None if width == fields["hidden_size"] else width,
    }


def _opt_rule(parameter: str, usual: TensorRule, config: ModelConfig, fields: Fields) -> TensorRule:
    is_norm = "ln_" in parameter
    is_weight = parameter.endswith("weight")
    if is_norm and not fields["layer_norm_elementwise_affine"]:
        return TensorRule((), default=ones if is_weight else zeros)
    if not is_norm and not is_weight and not fields["enable_bias"]:
        return NO_BIAS
    return rule_of_decoder(parameter, usual, config, fields)


OPT = ModelType(
    "opt",
    "OPT",
    prefix="model.decoder.",
    wrappers="model|decoder|module|_orig_mod",
    names=names("final_layer_norm", project_in="project_in", project_out="project_out"),
    defaults={
        **_OPT_SIZES,
        "activation_function": "relu",
        "bos_token_id": 2,
        "eos_token_id": 2,
        **_OPT_SWITCHES,
    },
    fields={**ALIASES, "ffn_dim": "n_inner"},
    computed=_epsilon,
    checks={**dict.fromkeys(_OPT_SWITCHES, BOOLEAN), "word_embed_proj_dim": or_null(size_to(LARGEST))},
    rule=_opt_rule,
    structure=_opt_structure,
    quirks=(FIRST_ROW, ONE_C_ATTN),
)

MAX_POSITIONS = 2**16  # rows of the table, in a file of any size


def sinusoids(shape: tuple[int, ...], pad_token_id: int | None) -> np.ndarray:
    """Return embeddings (n_positions, C), rounded at the same steps as in transformers, and 0 for padding.

    Angles of some thousands depend on the rounding.
    """
    n_positions, width = shape
    half = width // 2
    steps = np.arange(half, dtype=np.float32) * np.float32(-math.log(10000) / (half - 1))  # (C / 2,)
    frequencies = np.exp(steps.astype(np.float64)).astype(np.float32)
    rows = np.arange(n_positions, dtype=np.float32) + np.float32(FIRST_POSITION)
    angles = (rows[:, None] * frequencies).astype(np.float64)  # (n_positions, C / 2)
    table = np.zeros(shape, np.float32)
    table[:, :half], table[:, half : 2 * half] = np.sin(angles), np.cos(angles)
    if pad_token_id is not None and FIRST_POSITION <= pad_token_id < FIRST_POSITION + n_positions:
        table[pad_token_id - FIRST_POSITION] = 0
    return table


def _xglm_rule(parameter: str, usual: TensorRule, config: ModelConfig, fields: Fields) -> TensorRule:
    if parameter == POSITIONS:
        return TensorRule((), default=partial(sinusoids, pad_token_id=fields["pad_token_id"]))
    return rule_of_decoder(parameter, usual, config, fields)


_XGLM_SIZES = {"vocab_size": 256008, "d_model": 1024, "ffn_dim": 4096, "max_position_embeddings": 2048}
_XGLM_SIZES |= {"num_layers": 24, "attention_heads": 16}
_XGLM_ENDS = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
_XGLM_FIELDS = {
    "d_model": "n_embd",
    "num_layers": "n_layer",
    "attention_heads": "n_head",
    "ffn_dim": "n_inner",
}
XGLM = ModelType(
    "xglm",
    "XGLM",
    prefix="model.",
    wrappers="model|module|_orig_mod",
    names=names("layer_norm"),
    defaults={**_XGLM_SIZES, "activation_function": "gelu", "scale_embedding": True, **_XGLM_ENDS},
    aliases={
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "attention_heads",
    },
    fields={**_XGLM_FIELDS, "max_position_embeddings": "n_positions"},
    computed=_epsilon,
    checks={
        "scale_embedding": BOOLEAN,
        "add_cross_attention": only(False, "cross-attention is not implemented"),
        "pad_token_id": (lambda value: value is None or is_whole(value), "a token id or null"),
        "d_model": size_to(LARGEST, least=4),  # of which sinusoids are made
        "max_position_embeddings": size_to(MAX_POSITIONS),
    },
    rule=_xglm_rule,
    structure=lambda fields: embed_scale(fields, fields["d_model"]),
    ignored=("embed_positions.weights",),  # the computed table, which older releases of transformers wrote
    quirks=(ONE_C_ATTN,),
)

# BioGPT. transformers does not read its layer_norm_eps: norms have 1e-5.

_BIOGPT_SIZES = {
    "vocab_size": 42384,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "max_position_embeddings": 1024,
}
_BIOGPT_SIZES |= {"num_hidden_layers": 24, "num_attention_heads": 16}
_BIOGPT_OTHERS = {"hidden_act": "gelu", "scale_embedding": True, "bos_token_id": 0, "eos_token_id": 2}
BIOGPT = ModelType(
    "biogpt",
    "BioGPT",
    prefix="biogpt.",
    wrappers="biogpt|module|_orig_mod",
    names=names("layer_norm", head="output_projection"),
    defaults=_BIOGPT_SIZES | _BIOGPT_OTHERS,
    fields={**ALIASES, "intermediate_size": "n_inner", "hidden_act": "activation_function"},
    computed=_epsilon,
    checks={"scale_embedding": BOOLEAN},
    rule=rule_of_decoder,
    structure=lambda fields: embed_scale(fields, fields["hidden_size"]),
    beside=("output_projection.weight",),
    quirks=(FIRST_ROW, ONE_C_ATTN),
)
