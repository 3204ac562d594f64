"""Models whose config.json says their model_type: GPT-1, BLOOM and MPT, and what all model types have in common."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tinygpt.weights.config import ModelConfig
from tinygpt.weights.families.config_fields import checked_config, only, renamed, written_eos
from tinygpt.weights.families.family import (
    AS_IS,
    NO_BIAS,
    Family,
    Layout,
    Rule,
    named_by,
    queries_keys_values,
    transposed,
)
from tinygpt.weights.families.gpt2 import ALIASES, is_ignored
from tinygpt.weights.parameters import EMBEDDING, HEAD, POSITIONS, parameter_shapes, split_name

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class ModelType:
    """A model_type of transformers.

    family_name: for messages. model_config: from the fields of config.json, and of generation_config.json if there is
    one. rules: for every parameter, its sources, by the same fields; none: the usual ones. wrappers: prefixes of names
    that files may have, and `prefix` transformers' own. beside: names that have no prefix. ignored: names of unused
    tensors. is_in_out: matrices of layers are (in, out). quirks: what loading evens out. config_json: of Layout.
    """

    name: str
    family_name: str
    model_config: Callable[[Fields, Fields | None], ModelConfig]
    rules: Callable[[ModelConfig, Fields], dict[str, Rule]]
    prefix: str
    wrappers: str = "transformer|model|module|_orig_mod"
    beside: tuple[str, ...] = (HEAD,)
    ignored: tuple[str, ...] = ()
    is_in_out: bool = False
    quirks: tuple[str, ...] = ()
    config_json: Callable[[ModelConfig], dict[str, Any]] | None = None

    @property
    def layout(self) -> Layout:
        return Layout(
            lambda config: self.rules(config, {}),
            lambda name: name if name in self.beside else self.prefix + name,
            self._short_name,
            self.is_in_out,
            config_json=self.config_json,
        )

    @property
    def family(self) -> Family:
        return Family(
            name=self.family_name,
            described_by="config.json",
            detect=lambda source: source.model_type == self.name,
            config=lambda source: self.model_config(source.config_json or {}, source.json("generation_config.json")),
            rules=lambda source, config: self.rules(config, source.config_json or {}),
            named=partial(named_by, self._short_name),
            is_ignored=lambda name: name in self.ignored or is_ignored(name),
            quirks=lambda source, config: self.quirks,
            layout=self.layout,
        )

    def _short_name(self, name: str) -> str:
        return re.sub(rf"^(?:(?:{self.wrappers})\.)+", "", name)


# GPT-1 (Radford et al., 2018): GPT-2 with its layer norms after the blocks.

_GPT1_DEFAULTS = {
    "vocab_size": 40478,
    "n_positions": 512,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "afn": "gelu",
    "bos_token_id": None,
    "eos_token_id": None,
}
_GPT1_ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "swish"}  # as its code computes them
_GPT1_CHECKS = {
    "afn": (
        lambda value: isinstance(value, str) and value in _GPT1_ACTIVATIONS,
        f"one of {', '.join(_GPT1_ACTIVATIONS)}",
    ),
}
_GPT1_TOP = {EMBEDDING: "tokens_embed.weight", POSITIONS: "positions_embed.weight"}


def _gpt1_config(fields: Fields, generation: Fields | None = None) -> ModelConfig:
    fields = {**_GPT1_DEFAULTS, **fields, **renamed(fields, ALIASES)}
    activation = _GPT1_ACTIVATIONS.get(fields["afn"], "gelu_new") if isinstance(fields["afn"], str) else "gelu_new"
    values = {**fields, "activation_function": activation, "n_inner": None}
    return checked_config(values, generation, _GPT1_CHECKS, structure={"norm_placement": "post", "final_norm": False})


def _gpt1_rules(config: ModelConfig, fields: Fields) -> dict[str, Rule]:
    return {name: Rule((_GPT1_TOP.get(name, name),)) for name in parameter_shapes(config)}


OPENAI_GPT = ModelType("openai-gpt", "GPT-1", _gpt1_config, _gpt1_rules, prefix="transformer.", is_in_out=True)

# BLOOM and BLOOMZ (BigScience, 2022): ALiBi, and a layer norm after the embeddings. A head's queries, keys and values
# lie together, head by head.

_BLOOM_DEFAULTS = {
    "vocab_size": 250880,
    "hidden_size": 64,
    "n_layer": 2,
    "n_head": 8,
    "layer_norm_epsilon": 1e-5,
    "seq_length": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BLOOM_ALIASES = {"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_BLOOM_CHECKS = {
    "apply_residual_connection_post_layernorm": only(False, "a residual from after the layer norm is not implemented")
}
_BLOOM_TOP = {EMBEDDING: Rule(("word_embeddings.weight",)), HEAD: Rule((HEAD,))}
_BLOOM_MODULES = {
    "ln_e": "word_embeddings_layernorm",
    "ln_1": "input_layernorm",
    "attn.c_attn": "self_attention.query_key_value",
    "attn.c_proj": "self_attention.dense",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h",
    "ln_f": "ln_f",
}


def _bloom_config(fields: Fields, generation: Fields | None = None) -> ModelConfig:
    """Positions have no end: the length of training counts as that of the model."""
    aliases = {ours: fields[theirs] for theirs, ours in _BLOOM_ALIASES.items() if fields.get(theirs) is not None}
    fields = {**_BLOOM_DEFAULTS, **fields, **aliases}
    values = {
        **fields,
        "n_embd": fields["hidden_size"],
        "n_positions": fields["seq_length"],
        "n_inner": None,
        "activation_function": "gelu_fast",
    }
    return checked_config(values, generation, _BLOOM_CHECKS, structure={"positions": "alibi", "embed_norm": True})


def _bloom_config_json(config: ModelConfig) -> dict[str, Any]:
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


def _bloom_rules(config: ModelConfig, fields: Fields) -> dict[str, Rule]:
    return {name: _BLOOM_TOP.get(name) or _bloom_rule(name, config.head_size) for name in parameter_shapes(config)}


def _bloom_rule(parameter: str, head_size: int) -> Rule:
    layer, module, kind = split_name(parameter)
    name = f"{'' if layer is None else f'h.{layer}.'}{_BLOOM_MODULES[module]}.{kind}"
    if module == "attn.c_attn":
        return Rule((name,), queries_keys_values("h3d", head_size))
    return Rule((name,), transposed() if kind == "weight" and "ln_" not in module else AS_IS)


BLOOM = ModelType(
    "bloom",
    "BLOOM",
    _bloom_config,
    _bloom_rules,
    prefix="transformer.",
    quirks=("queries, keys and values of c_attn brought into one order",),
    config_json=_bloom_config_json,
)

# MPT (MosaicML, 2023): ALiBi, and no bias anywhere.

_MPT_DEFAULTS = {
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
_MPT_NAMES = {"d_model": "n_embd", "n_layers": "n_layer", "n_heads": "n_head", "max_seq_len": "n_positions"}
_MPT_ALIASES = {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
_NO_OTHER, _NOT_YET = "no other is implemented", "it is not implemented"
_MPT_CHECKS = {
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
}
_MPT_TOP = {EMBEDDING: "wte.weight", HEAD: HEAD, "ln_f.weight": "norm_f.weight"}
_MPT_MODULES = {
    "ln_1": "norm_1",
    "attn.c_attn": "attn.Wqkv",
    "attn.c_proj": "attn.out_proj",
    "ln_2": "norm_2",
    "mlp.c_fc": "ffn.up_proj",
    "mlp.c_proj": "ffn.down_proj",
}


def _mpt_config(fields: Fields, generation: Fields | None = None) -> ModelConfig:
    fields = {**_MPT_DEFAULTS, **fields, **renamed(fields, _MPT_ALIASES)}
    attention = fields.get("attn_config")
    inner = {f"attn_config.{k}": v for k, v in attention.items()} if isinstance(attention, Mapping) else {}
    values = {**fields, **inner, **renamed(fields, _MPT_NAMES), "activation_function": "gelu", "n_inner": None}
    return checked_config(values, generation, _MPT_CHECKS, structure={"positions": "alibi"})


def _mpt_rules(config: ModelConfig, fields: Fields) -> dict[str, Rule]:
    return {name: _mpt_rule(name) for name in parameter_shapes(config)}


def _mpt_rule(parameter: str) -> Rule:
    layer, module, kind = split_name(parameter)
    if kind == "bias":
        return NO_BIAS
    if parameter in _MPT_TOP:
        return Rule((_MPT_TOP[parameter],))
    return Rule((f"blocks.{layer}.{_MPT_MODULES[module]}.weight",), AS_IS if "ln_" in module else transposed())


MPT = ModelType("mpt", "MPT", _mpt_config, _mpt_rules, prefix="transformer.")
