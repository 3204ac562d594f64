"""MPT, as transformers writes it (MosaicML, 2023): ALiBi, and no bias anywhere."""

from collections.abc import Mapping

from tinygpt.weights.config import ModelConfig
from tinygpt.weights.families.config_fields import checked_config, only, renamed
from tinygpt.weights.families.family import NO_BIAS, Rule
from tinygpt.weights.families.hugging_face.model_types import Fields, ModelType
from tinygpt.weights.families.parameter_names import split_name
from tinygpt.weights.families.transforms import AS_IS, transposed
from tinygpt.weights.parameters import EMBEDDING, HEAD, parameter_shapes

_DEFAULTS = {
    "vocab_size": 50368,
    "d_model": 2048,
    "n_layers": 24,
    "n_heads": 16,
    "max_seq_len": 2048,
    "layer_norm_epsilon": 1e-5,
    "expansion_ratio": 4,
    "bos_token_id": None,
    "eos_token_id": None,
}
_NAMES = {"d_model": "n_embd", "n_layers": "n_layer", "n_heads": "n_head", "max_seq_len": "n_positions"}
_ALIASES = {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
_NOT_YET = "no other is implemented"
_CHECKS = {
    "expansion_ratio": only(4, "transformers computes with no other"),
    "no_bias": only(True, "transformers has no biases"),
    "norm_type": only("low_precision_layernorm", _NOT_YET),
    "logit_scale": only(None, "it is not implemented"),
    "embedding_fraction": only(1.0, "it is not implemented"),
    "attn_config": (lambda value: value is None or isinstance(value, Mapping), "an object"),
    "attn_config.attn_type": only("multihead_attention", _NOT_YET),
    "attn_config.alibi": only(True, "transformers has no other positions for it"),
    "attn_config.alibi_bias_max": only(8, "its slopes are others"),
    "attn_config.qk_ln": only(False, "layer norms of queries and keys are not implemented"),
    "attn_config.clip_qkv": only(None, "clipped queries, keys and values are not implemented"),
    "attn_config.prefix_lm": only(False, "it is not implemented"),
    "attn_config.softmax_scale": only(None, "no other scale than by the head's size is implemented"),
}
_TOP = {EMBEDDING: "wte.weight", HEAD: HEAD, "ln_f.weight": "norm_f.weight"}
_MODULES = {
    "ln_1": "norm_1",
    "attn.c_attn": "attn.Wqkv",
    "attn.c_proj": "attn.out_proj",
    "ln_2": "norm_2",
    "mlp.c_fc": "ffn.up_proj",
    "mlp.c_proj": "ffn.down_proj",
}


def model_config(fields: Fields, generation: Fields | None = None) -> ModelConfig:
    """Raises one CheckpointError that names every field that is impossible or not implemented."""
    fields = {**_DEFAULTS, **fields, **renamed(fields, _ALIASES)}
    attention = fields.get("attn_config")
    inner = {f"attn_config.{k}": v for k, v in attention.items()} if isinstance(attention, Mapping) else {}
    values = {
        **fields,
        **inner,
        **renamed(fields, _NAMES),
        "activation_function": "gelu",
        "n_inner": None,
    }
    return checked_config(values, generation, _CHECKS, structure={"positions": "alibi"})


def _rules(config: ModelConfig, fields: Fields) -> dict[str, Rule]:
    return {name: _rule(name) for name in parameter_shapes(config)}


def _rule(parameter: str) -> Rule:
    layer, module, kind = split_name(parameter)
    if kind == "bias":
        return NO_BIAS
    if parameter in _TOP:
        return Rule((_TOP[parameter],))
    return Rule((f"blocks.{layer}.{_MODULES[module]}.weight",), AS_IS if "ln_" in module else transposed())


MPT = ModelType("mpt", "MPT", model_config, _rules, prefix="transformer.")
