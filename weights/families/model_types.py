"""Models whose config.json says their model_type: GPT-1, BLOOM and MPT, and what all model types have in common."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tinygpt.weights.config import EMBEDDING, HEAD, POSITIONS, ModelConfig, parameter_shapes
from tinygpt.weights.errors import Checks
from tinygpt.weights.families.config_fields import NONE, checked_config, one_of, only, renamed, written_eos
from tinygpt.weights.families.family import (
    NO_BIAS,
    Family,
    Layout,
    Rule,
    named_by,
    queries_keys_values,
    rule_by_tables,
)
from tinygpt.weights.families.gpt2 import ALIASES, is_ignored

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class ModelType:
    """A model_type of transformers.

    family_name: for messages. defaults: of config.json's fields; aliases: other names of fields; names: ModelConfig's
    names of them; computed: other fields of ModelConfig; structure: those of STRUCTURE, by config.json's fields.
    rule: the sources of a parameter, by the same fields; none: the usual ones. wrappers: prefixes of names that files
    may have, and `prefix` transformers' own. beside: names without a prefix. ignored: names of unused tensors.
    is_in_out: matrices of layers are (in, out). quirks: what loading evens out. config_json: of Layout.
    """

    name: str
    family_name: str
    prefix: str
    defaults: Fields
    names: Mapping[str, str]
    rule: Callable[[str, ModelConfig, Fields], Rule]
    structure: Callable[[Fields], dict[str, Any]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    computed: Callable[[Fields], dict[str, Any]] = lambda fields: {}
    checks: Checks = field(default_factory=dict)
    wrappers: str = "transformer|model|module|_orig_mod"
    beside: tuple[str, ...] = (HEAD,)
    ignored: tuple[str, ...] = ()
    is_in_out: bool = False
    quirks: tuple[str, ...] = ()
    config_json: Callable[[ModelConfig], dict[str, Any]] | None = None

    def model_config(self, fields: Fields, generation: Fields | None = None) -> ModelConfig:
        """Return the configuration. Raise one CheckpointError for all impossible or unknown fields."""
        aliased = {ours: value for ours, value in renamed(fields, self.aliases).items() if value is not None}
        fields = {**self.defaults, **fields, **aliased}
        inner = {f"{k}.{name}": v for k, one in fields.items() if isinstance(one, Mapping) for name, v in one.items()}
        values = {**fields, **inner, **self.computed(fields), **renamed(fields, self.names)}
        return checked_config(values, generation, self.checks, structure=self.structure(fields))

    def rules(self, config: ModelConfig, fields: Fields = NONE) -> dict[str, Rule]:
        fields = {**self.defaults, **fields}
        return {name: self.rule(name, config, fields) for name in parameter_shapes(config)}

    @property
    def layout(self) -> Layout:
        return Layout(
            self.rules,
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

_GPT1_ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "swish"}  # as its code computes them
_GPT1_TOP = {EMBEDDING: "tokens_embed.weight", POSITIONS: "positions_embed.weight"}
OPENAI_GPT = ModelType(
    "openai-gpt",
    "GPT-1",
    prefix="transformer.",
    defaults={"vocab_size": 40478, "n_positions": 512, "afn": "gelu", "bos_token_id": None, "eos_token_id": None},
    aliases=ALIASES,
    names={},
    computed=lambda fields: {
        "activation_function": _GPT1_ACTIVATIONS.get(str(fields["afn"]), "gelu_new"),
        "n_inner": None,
    },
    checks={"afn": one_of(_GPT1_ACTIVATIONS)},
    rule=lambda name, config, fields: Rule((_GPT1_TOP.get(name, name),)),
    structure=lambda fields: {"norm_placement": "post", "final_norm": False},
    is_in_out=True,
)

# BLOOM and BLOOMZ (BigScience, 2022): ALiBi, and a layer norm after the embeddings. A head's queries, keys and values
# lie together, head by head. Positions have no end: the length of training counts as the model's.

_BLOOM_TOP = {EMBEDDING: "word_embeddings.weight", HEAD: HEAD}
_BLOOM_TOP |= {f"ln_e.{kind}": f"word_embeddings_layernorm.{kind}" for kind in ("weight", "bias")}
_BLOOM_TOP |= {f"ln_f.{kind}": f"ln_f.{kind}" for kind in ("weight", "bias")}
_BLOOM_MODULES = {
    "ln_1": "input_layernorm",
    "attn.c_attn": "self_attention.query_key_value",
    "attn.c_proj": "self_attention.dense",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h",
}


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


def _bloom_rule(parameter: str, config: ModelConfig, fields: Fields) -> Rule:
    rule = rule_by_tables(parameter, _BLOOM_TOP, "h", _BLOOM_MODULES)
    is_qkv = ".c_attn." in parameter
    return Rule(rule.sources, queries_keys_values("h3d", config.head_size)) if is_qkv else rule


BLOOM = ModelType(
    "bloom",
    "BLOOM",
    prefix="transformer.",
    defaults={
        "vocab_size": 250880,
        "hidden_size": 64,
        "n_layer": 2,
        "n_head": 8,
        "layer_norm_epsilon": 1e-5,
        "seq_length": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    aliases={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    names={"hidden_size": "n_embd", "seq_length": "n_positions"},
    computed=lambda fields: {"activation_function": "gelu_fast", "n_inner": None},
    checks={"apply_residual_connection_post_layernorm": only(False, "no other residual is implemented")},
    rule=_bloom_rule,
    structure=lambda fields: {"positions": "alibi", "embed_norm": True},
    quirks=("queries, keys and values of c_attn brought into one order",),
    config_json=_bloom_config_json,
)

# MPT (MosaicML, 2023): ALiBi, and no bias anywhere.

_NO_OTHER, _NOT_YET = "no other is implemented", "it is not implemented"
_MPT_TOP = {EMBEDDING: "wte.weight", HEAD: HEAD, "ln_f.weight": "norm_f.weight"}
_MPT_MODULES = {
    "ln_1": "norm_1",
    "attn.c_attn": "attn.Wqkv",
    "attn.c_proj": "attn.out_proj",
    "ln_2": "norm_2",
    "mlp.c_fc": "ffn.up_proj",
    "mlp.c_proj": "ffn.down_proj",
}


def _mpt_rule(parameter: str, config: ModelConfig, fields: Fields) -> Rule:
    return NO_BIAS if parameter.endswith(".bias") else rule_by_tables(parameter, _MPT_TOP, "blocks", _MPT_MODULES)


MPT = ModelType(
    "mpt",
    "MPT",
    prefix="transformer.",
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
    names={"d_model": "n_embd", "n_layers": "n_layer", "n_heads": "n_head", "max_seq_len": "n_positions"},
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
    rule=_mpt_rule,
    structure=lambda fields: {"positions": "alibi"},
)
