"""XGLM, as transformers writes it (Lin et al., 2021): OPT's layers, token embeddings times sqrt(n_embd), and positions
that are sinusoids, which no file holds.
"""

import math
from functools import partial

import numpy as np

from tinygpt.weights.config import ModelConfig
from tinygpt.weights.families.config_fields import checked_config, only, renamed
from tinygpt.weights.families.family import Rule
from tinygpt.weights.families.hugging_face.biogpt import embed_scale
from tinygpt.weights.families.hugging_face.model_types import Fields, ModelType
from tinygpt.weights.families.hugging_face.opt import FIRST_POSITION, ONE_C_ATTN, rule_of_decoder
from tinygpt.weights.field_checks import is_bool, is_whole
from tinygpt.weights.parameters import EMBEDDING, HEAD, POSITIONS, parameter_shapes

MAX_POSITIONS = 2**16  # a table of as many rows is made, whatever the size of the file
_DEFAULTS = {
    "vocab_size": 256008,
    "d_model": 1024,
    "num_layers": 24,
    "attention_heads": 16,
    "ffn_dim": 4096,
    "max_position_embeddings": 2048,
    "activation_function": "gelu",
    "scale_embedding": True,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
_NAMES = {
    "d_model": "n_embd",
    "num_layers": "n_layer",
    "attention_heads": "n_head",
    "ffn_dim": "n_inner",
    "max_position_embeddings": "n_positions",
}
_ALIASES = {"hidden_size": "d_model", "num_hidden_layers": "num_layers", "num_attention_heads": "attention_heads"}
_CHECKS = {
    "scale_embedding": (is_bool, "true or false"),
    "add_cross_attention": only(False, "cross-attention is not implemented"),
    "pad_token_id": (lambda value: value is None or is_whole(value), "a token id or null"),
    "d_model": (lambda value: is_whole(value) and value >= 4, "a whole number from 4 up, of which sinusoids are made"),
    "max_position_embeddings": (
        lambda value: is_whole(value) and 1 <= value <= MAX_POSITIONS,
        f"a whole number from 1 to {MAX_POSITIONS}",
    ),
}


def model_config(fields: Fields, generation: Fields | None = None) -> ModelConfig:
    """Raises one CheckpointError that names every field that is impossible or not implemented."""
    fields = {**_DEFAULTS, **fields, **renamed(fields, _ALIASES)}
    values = {name: value for name, value in fields.items() if name != "layer_norm_epsilon"}
    values |= renamed(fields, _NAMES)
    return checked_config(values, generation, _CHECKS, structure=embed_scale(fields, fields["d_model"]))


def sinusoids(shape: tuple[int, int], pad_token_id: int | None) -> np.ndarray:
    """Embeddings (n_positions, C) of positions, which begin at row 2 of a table whose row of padding is 0.

    Rounded to float32 where transformers rounds, on which its angles of some thousands depend.
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


def _rules(config: ModelConfig, fields: Fields) -> dict[str, Rule]:
    pad_token_id = fields.get("pad_token_id", _DEFAULTS["pad_token_id"])
    top = {
        EMBEDDING: Rule(("embed_tokens.weight",)),
        POSITIONS: Rule((), default=partial(sinusoids, pad_token_id=pad_token_id)),
        HEAD: Rule((HEAD,)),
    }
    return {name: top.get(name) or rule_of_decoder(name, "layer_norm") for name in parameter_shapes(config)}


XGLM = ModelType(
    "xglm",
    "XGLM",
    model_config,
    _rules,
    prefix="model.",
    wrappers="model|module|_orig_mod",
    ignored=("embed_positions.weights",),  # older releases of transformers wrote the table that they had computed
    quirks=(ONE_C_ATTN,),
)
