"""OPT, and Galactica, as transformers writes them (Zhang et al., "OPT: Open Pre-trained Transformer Language Models").

Positions begin at row 2 of their table, and queries, keys and values have matrices of their own. The layer norm of a
layer's MLP and the one before the head have the same name. OPT-350m alone has its norms behind the blocks, none before
the head, and embeddings that are narrower than the model.
"""

from collections.abc import Mapping
from typing import Any

from tinygpt.weights.config import ModelConfig
from tinygpt.weights.families.config_fields import checked_config, renamed
from tinygpt.weights.families.family import NO_BIAS, Rule
from tinygpt.weights.families.hugging_face.model_types import Fields, ModelType
from tinygpt.weights.families.parameter_names import split_name
from tinygpt.weights.families.transforms import AS_IS, as_is, transposed, without_rows
from tinygpt.weights.field_checks import is_bool, is_whole
from tinygpt.weights.parameters import EMBEDDING, HEAD, POSITIONS, PROJECT_IN, PROJECT_OUT, parameter_shapes
from tinygpt.weights.tensor import ones, zeros

FIRST_POSITION = 2
FIRST_ROW = f"positions begin at row {FIRST_POSITION} of their table"
ONE_C_ATTN = "one c_attn of queries, keys and values"
_DEFAULTS = {
    "vocab_size": 50272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "activation_function": "relu",
    "bos_token_id": 2,
    "eos_token_id": 2,
}
_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "ffn_dim": "n_inner",
    "max_position_embeddings": "n_positions",
}
_SWITCHES = {
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
}
_CHECKS = {
    **dict.fromkeys(_SWITCHES, (is_bool, "true or false")),
    "word_embed_proj_dim": (lambda value: value is None or (is_whole(value) and 1 <= value < 2**31), "a whole number"),
}
POSITIONS_RULE = Rule(("embed_positions.weight",), without_rows(FIRST_POSITION))
_TOP = {
    EMBEDDING: Rule(("embed_tokens.weight",)),
    PROJECT_IN: Rule(("project_in.weight",)),
    POSITIONS: POSITIONS_RULE,
    PROJECT_OUT: Rule(("project_out.weight",)),
    HEAD: Rule((HEAD,)),
}
_MODULES = {
    "ln_1": "self_attn_layer_norm",
    "attn.c_proj": "self_attn.out_proj",
    "ln_2": "final_layer_norm",
    "mlp.c_fc": "fc1",
    "mlp.c_proj": "fc2",
}
_LAST_NORM = "final_layer_norm"


def model_config(fields: Fields, generation: Fields | None = None) -> ModelConfig:
    """Raises one CheckpointError that names every field that is impossible or not implemented."""
    fields = {**_DEFAULTS, **_SWITCHES, **fields}
    values = {name: value for name, value in fields.items() if name not in ("layer_norm_epsilon", "n_inner")}
    values |= renamed(fields, _NAMES)
    return checked_config(values, generation, _CHECKS, structure=_structure(fields))


def _structure(fields: Mapping[str, Any]) -> dict[str, Any]:
    width, is_pre = fields.get("word_embed_proj_dim"), fields["do_layer_norm_before"]
    return {
        "norm_placement": "pre" if is_pre else "post",
        "final_norm": bool(is_pre and not fields["_remove_final_layer_norm"]),
        "embed_dim": None if width == fields["hidden_size"] else width,
    }


def _rules(config: ModelConfig, fields: Fields) -> dict[str, Rule]:
    fields = {**_SWITCHES, **fields}
    return {
        name: _TOP.get(name) or _rule(name, fields["enable_bias"], fields["layer_norm_elementwise_affine"])
        for name in parameter_shapes(config)
    }


def _rule(parameter: str, has_bias: bool, has_affine: bool) -> Rule:
    is_norm, is_weight = "ln_" in parameter, parameter.endswith("weight")
    if is_norm and not has_affine:
        return Rule((), default=ones if is_weight else zeros)
    if not is_norm and not is_weight and not has_bias:
        return NO_BIAS
    return rule_of_decoder(parameter, _LAST_NORM)


def rule_of_decoder(parameter: str, last_norm: str) -> Rule:
    """Of what stands in layers or behind the last: OPT's names for it, which other models have in common with it."""
    layer, module, kind = split_name(parameter)
    if layer is None:
        return Rule((f"{last_norm}.{kind}",))
    if module == "attn.c_attn":
        names = tuple(f"layers.{layer}.self_attn.{part}_proj.{kind}" for part in "qkv")
        return Rule(names, transposed(1) if kind == "weight" else as_is(0))
    is_matrix = kind == "weight" and not module.startswith("ln_")
    return Rule((f"layers.{layer}.{_MODULES[module]}.{kind}",), transposed() if is_matrix else AS_IS)


OPT = ModelType(
    "opt",
    "OPT",
    model_config,
    _rules,
    prefix="model.decoder.",
    wrappers="model|decoder|module|_orig_mod",
    quirks=(FIRST_ROW, ONE_C_ATTN),
)
