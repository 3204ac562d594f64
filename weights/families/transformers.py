"""Models by the model_type in their config.json: GPT-1, BLOOM, MPT, OPT, XGLM, BioGPT and, elsewhere, GPT-Neo."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..config import POSITIONS, ModelConfig
from ..errors import (
    BOOLEAN,
    LARGEST,
    TOKEN_ID,
    CheckpointError,
    is_whole,
    one_of,
    only,
    or_null,
    size_to,
)
from ..tensor import ones, zeros
from .family import (
    NO_BIAS,
    Names,
    TensorRule,
    Transform,
    qkv_by_heads,
    rule_of_qkv,
    written_config,
)
from .gpt2 import ALIASES, IGNORED
from .gpt_neo import GPT_NEO
from .model_type import Fields, ModelType

# GPT-1 (Radford et al., 2018): GPT-2 with its layer norms after the blocks.

# As its code computes them.
_GPT1_ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "swish"}
OPENAI_GPT = ModelType(
    "openai-gpt",
    "GPT-1",
    prefix="transformer.",
    names=Names("h", {"wte": "tokens_embed", "wpe": "positions_embed", "lm_head": "lm_head"}),
    defaults={
        "vocab_size": 40478,
        "n_positions": 512,
        "afn": "gelu",
        "bos_token_id": None,
        "eos_token_id": None,
    },
    aliases=ALIASES,
    fields={},
    computed=lambda fields: {
        "activation_function": _GPT1_ACTIVATIONS.get(str(fields["afn"]), "gelu_new"),
        "n_inner": None,
    },
    checks={"afn": one_of(_GPT1_ACTIVATIONS)},
    structure=lambda fields: {"norm_placement": "post", "final_norm": False},
    is_in_out=True,
)

# BLOOM and BLOOMZ (BigScience, 2022): ALiBi, and a layer norm after the embeddings. Queries, keys and values lie head
# by head. The length of training counts as the model's.

_BLOOM_FIELDS = {"hidden_size": "n_embd", "seq_length": "n_positions"}
_BLOOM_WRITTEN = (
    "vocab_size",
    "n_layer",
    "n_head",
    "layer_norm_epsilon",
    "tie_word_embeddings",
    "bos_token_id",
)
BLOOM = ModelType(
    "bloom",
    "BLOOM",
    prefix="transformer.",
    names=Names(
        "h",
        {"wte": "word_embeddings", "ln_e": "word_embeddings_layernorm", "ln_f": "ln_f", "lm_head": "lm_head"},
        (
            *("input_layernorm", "self_attention.query_key_value", "self_attention.dense"),
            *("post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        ),
    ),
    defaults={
        "vocab_size": 250880,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 8,
        "seq_length": 2048,
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    aliases={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    fields=_BLOOM_FIELDS,
    computed=lambda fields: {"activation_function": "gelu_fast", "n_inner": None},
    checks={"apply_residual_connection_post_layernorm": only(False, "no other residual is implemented")},
    rule=lambda parameter, usual, config, fields: (
        replace(usual, transform=qkv_by_heads("h3d", config.head_size)) if ".c_attn." in parameter else usual
    ),
    structure=lambda fields: {"positions": "alibi", "embed_norm": True},
    quirks=("queries, keys and values of c_attn brought into one order",),
)
# Of a BLOOM from files without a config.json.
BLOOM_LAYOUT = replace(
    BLOOM.layout,
    config_json=lambda config: written_config(
        "bloom", "BloomForCausalLM", config, {**_BLOOM_FIELDS, **{name: name for name in _BLOOM_WRITTEN}}
    ),
)

# MPT (MosaicML, 2023): ALiBi, and no bias anywhere.

_NO_OTHER = "no other is implemented"
_NOT_YET = "it is not implemented"
MPT = ModelType(
    "mpt",
    "MPT",
    prefix="transformer.",
    names=Names(
        "blocks",
        {"wte": "wte", "ln_f": "norm_f", "lm_head": "lm_head"},
        ("norm_1", "attn.Wqkv", "attn.out_proj", "norm_2", "ffn.up_proj", "ffn.down_proj"),
    ),
    defaults={
        "vocab_size": 50368,
        "d_model": 2048,
        "n_layers": 24,
        "n_heads": 16,
        "max_seq_len": 2048,
        "layer_norm_epsilon": 1e-5,
        "expansion_ratio": 4,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    aliases={"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
    fields={"d_model": "n_embd", "n_layers": "n_layer", "n_heads": "n_head", "max_seq_len": "n_positions"},
    computed=lambda fields: {"activation_function": "gelu", "n_inner": None},
    checks={
        "expansion_ratio": only(4, "transformers computes with no other"),
        "no_bias": only(True, "transformers has no biases"),
        "norm_type": only("low_precision_layernorm", _NO_OTHER),
        "logit_scale": only(None, _NOT_YET),
        "embedding_fraction": only(1.0, _NOT_YET),
        "attn_config": (lambda value: value is None or isinstance(value, Mapping), "an object"),
        "attn_config.attn_type": only("multihead_attention", _NO_OTHER),
        "attn_config.alibi": only(True, "transformers has no other positions for it"),
        "attn_config.alibi_bias_max": only(8, "its slopes are others"),
        "attn_config.qk_ln": only(False, "layer norms of queries and keys are not implemented"),
        "attn_config.clip_qkv": only(None, "clipped queries, keys and values are not implemented"),
        "attn_config.prefix_lm": only(False, _NOT_YET),
        "attn_config.softmax_scale": only(None, "no other scale than by the head's size is implemented"),
    },
    rule=lambda parameter, usual, config, fields: NO_BIAS if parameter.endswith(".bias") else usual,
    structure=lambda fields: {"positions": "alibi"},
)

# OPT and Galactica (Zhang et al., 2022), and models with OPT's layers: XGLM (Lin et al., 2021), BioGPT (Luo et al.,
# 2022). Queries, keys and values have a matrix each. Positions begin at row 2 of their table; XGLM's are sinusoids,
# which no file holds. OPT-350m alone has its norms after the blocks, none before the head, and narrower embeddings.

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
        return rule_of_qkv(usual)
    return usual


def embed_scale(fields: Fields, width: Any) -> dict[str, float]:
    is_scaled = fields["scale_embedding"] is True and is_whole(width) and width > 0
    return {"embed_scale": width**0.5} if is_scaled else {}


_EPSILON = {"layer_norm_epsilon": 1e-5}  # of models without such a field
_OPT_SWITCHES = {
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
}


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
        "vocab_size": 50272,
        "hidden_size": 768,
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "activation_function": "relu",
        "bos_token_id": 2,
        "eos_token_id": 2,
        **_OPT_SWITCHES,
    },
    fields={**ALIASES, "ffn_dim": "n_inner"},
    computed=lambda fields: _EPSILON,
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


XGLM = ModelType(
    "xglm",
    "XGLM",
    prefix="model.",
    wrappers="model|module|_orig_mod",
    names=names("layer_norm"),
    defaults={
        "vocab_size": 256008,
        "d_model": 1024,
        "ffn_dim": 4096,
        "max_position_embeddings": 2048,
        "num_layers": 24,
        "attention_heads": 16,
        "activation_function": "gelu",
        "scale_embedding": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
    },
    aliases={
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "attention_heads",
    },
    fields={
        "d_model": "n_embd",
        "num_layers": "n_layer",
        "attention_heads": "n_head",
        "ffn_dim": "n_inner",
        "max_position_embeddings": "n_positions",
    },
    computed=lambda fields: _EPSILON,
    checks={
        "scale_embedding": BOOLEAN,
        "add_cross_attention": only(False, "cross-attention is not implemented"),
        "pad_token_id": TOKEN_ID,
        "d_model": size_to(LARGEST, least=4),  # of which sinusoids are made
        "max_position_embeddings": size_to(MAX_POSITIONS),
    },
    rule=_xglm_rule,
    structure=lambda fields: embed_scale(fields, fields["d_model"]),
    # The computed table, which older releases of transformers wrote.
    ignored=(*IGNORED, r"embed_positions\.weights"),
    quirks=(ONE_C_ATTN,),
)

# BioGPT. transformers does not read its layer_norm_eps: norms have 1e-5.

BIOGPT = ModelType(
    "biogpt",
    "BioGPT",
    prefix="biogpt.",
    wrappers="biogpt|module|_orig_mod",
    names=names("layer_norm", head="output_projection"),
    defaults={
        "vocab_size": 42384,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "max_position_embeddings": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "hidden_act": "gelu",
        "scale_embedding": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    fields={**ALIASES, "intermediate_size": "n_inner", "hidden_act": "activation_function"},
    computed=lambda fields: _EPSILON,
    checks={"scale_embedding": BOOLEAN},
    rule=rule_of_decoder,
    structure=lambda fields: embed_scale(fields, fields["hidden_size"]),
    beside=("output_projection.weight",),
    quirks=(FIRST_ROW, ONE_C_ATTN),
)


MODEL_TYPES = {one.name: one for one in (OPT, BLOOM, OPENAI_GPT, MPT, XGLM, BIOGPT, GPT_NEO)}


def model_type_of(fields: Mapping[str, Any]) -> ModelType:
    """Raise CheckpointError if the model_type of a config.json is not in the table."""
    name = fields.get("model_type")
    if isinstance(name, str) and name in MODEL_TYPES:
        return MODEL_TYPES[name]
    allowed = ", ".join(map(repr, ("gpt2", *MODEL_TYPES)))
    raise CheckpointError(f"config.json cannot be used: model_type is {name!r} and must be one of {allowed}.")
