"""BioGPT, as transformers writes it (Luo et al., 2022): OPT's layers, and token embeddings times sqrt(n_embd)."""

from collections.abc import Mapping
from typing import Any

from tinygpt.weights.config import ModelConfig
from tinygpt.weights.families.config_fields import checked_config, renamed
from tinygpt.weights.families.family import Rule
from tinygpt.weights.families.hugging_face.model_types import Fields, ModelType
from tinygpt.weights.families.hugging_face.opt import FIRST_ROW, ONE_C_ATTN, POSITIONS_RULE, rule_of_decoder
from tinygpt.weights.field_checks import is_bool, is_whole
from tinygpt.weights.parameters import EMBEDDING, HEAD, POSITIONS, parameter_shapes

_DEFAULTS = {
    "vocab_size": 42384,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "max_position_embeddings": 1024,
    "hidden_act": "gelu",
    "scale_embedding": True,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
}
_CHECKS = {"scale_embedding": (is_bool, "true or false")}
_HEAD = "output_projection.weight"
_TOP = {EMBEDDING: Rule(("embed_tokens.weight",)), POSITIONS: POSITIONS_RULE, HEAD: Rule((_HEAD,))}


def model_config(fields: Fields, generation: Fields | None = None) -> ModelConfig:
    """Raises one CheckpointError that names every field that is impossible or not implemented.

    transformers does not look at layer_norm_eps: its norms have 1e-5.
    """
    fields = {**_DEFAULTS, **fields}
    values = {name: value for name, value in fields.items() if name != "layer_norm_epsilon"}
    values |= renamed(fields, _NAMES)
    return checked_config(values, generation, _CHECKS, structure=embed_scale(fields, fields["hidden_size"]))


def embed_scale(fields: Mapping[str, Any], width: Any) -> dict[str, float]:
    """The field of ModelConfig, where scale_embedding asks for it."""
    is_scaled = fields["scale_embedding"] is True and is_whole(width) and width > 0
    return {"embed_scale": width**0.5} if is_scaled else {}


def _rules(config: ModelConfig, fields: Fields) -> dict[str, Rule]:
    return {name: _TOP.get(name) or rule_of_decoder(name, "layer_norm") for name in parameter_shapes(config)}


BIOGPT = ModelType(
    "biogpt",
    "BioGPT",
    model_config,
    _rules,
    prefix="biogpt.",
    wrappers="biogpt|module|_orig_mod",
    beside=(_HEAD,),
    quirks=(FIRST_ROW, ONE_C_ATTN),
)
