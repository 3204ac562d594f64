"""BLOOM and BLOOMZ, as transformers writes them (BigScience, 2022): ALiBi, and a layer norm behind the embeddings.

A head's queries, keys and values lie together, head by head.
"""

from typing import Any

from tinygpt.weights.config import ModelConfig
from tinygpt.weights.families.config_fields import checked_config, only, written_eos
from tinygpt.weights.families.family import Rule
from tinygpt.weights.families.hugging_face.model_types import Fields, ModelType
from tinygpt.weights.families.parameter_names import split_name
from tinygpt.weights.families.transforms import AS_IS, queries_keys_values, transposed
from tinygpt.weights.parameters import EMBEDDING, HEAD, parameter_shapes

_DEFAULTS = {
    "vocab_size": 250880,
    "hidden_size": 64,
    "n_layer": 2,
    "n_head": 8,
    "layer_norm_epsilon": 1e-5,
    "seq_length": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ALIASES = {"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_CHECKS = {
    "apply_residual_connection_post_layernorm": only(False, "a residual from behind the layer norm is not implemented")
}
_TOP = {EMBEDDING: Rule(("word_embeddings.weight",)), HEAD: Rule((HEAD,))}
_MODULES = {
    "ln_e": "word_embeddings_layernorm",
    "ln_1": "input_layernorm",
    "attn.c_attn": "self_attention.query_key_value",
    "attn.c_proj": "self_attention.dense",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h",
    "ln_f": "ln_f",
}


def model_config(fields: Fields, generation: Fields | None = None) -> ModelConfig:
    """Raises one CheckpointError that names every field that is impossible or not implemented.

    Positions have no end; the length that it was trained on counts as that of the model.
    """
    aliases = {ours: fields[theirs] for theirs, ours in _ALIASES.items() if fields.get(theirs) is not None}
    fields = {**_DEFAULTS, **fields, **aliases}
    values = {
        **fields,
        "n_embd": fields["hidden_size"],
        "n_positions": fields["seq_length"],
        "n_inner": None,
        "activation_function": "gelu_fast",
    }
    return checked_config(values, generation, _CHECKS, structure={"positions": "alibi", "embed_norm": True})


def config_json(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "bloom",
        "architectures": ["BloomForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "seq_length": config.n_positions,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": written_eos(config),
    }


def _rules(config: ModelConfig, fields: Fields) -> dict[str, Rule]:
    return {name: _rule(name, config.head_size) for name in parameter_shapes(config)}


def _rule(parameter: str, head_size: int) -> Rule:
    if parameter in _TOP:
        return _TOP[parameter]
    layer, module, kind = split_name(parameter)
    name = f"{'' if layer is None else f'h.{layer}.'}{_MODULES[module]}.{kind}"
    if module == "attn.c_attn":
        return Rule((name,), queries_keys_values("h3d", head_size))
    return Rule((name,), transposed() if kind == "weight" and "ln_" not in module else AS_IS)


BLOOM = ModelType(
    "bloom",
    "BLOOM",
    model_config,
    _rules,
    prefix="transformer.",
    quirks=("queries, keys and values of c_attn brought into one order",),
    config_json=config_json,
)
