"""Models whose config.json says their model_type: GPT-1, BLOOM and MPT."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..config import HEAD, ModelConfig, parameter_shapes
from ..errors import Checks
from .config_fields import NONE, checked_config, one_of, only, renamed, written_config
from .family import NO_BIAS, Family, Layout, Names, TensorRule, named_by, qkv_by_heads, rule_in_out
from .gpt2 import ALIASES, is_ignored

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class ModelType:
    """A model_type of transformers.

    defaults: of config.json's fields; aliases: other names of fields; fields: ModelConfig's names of them; computed:
    other fields of ModelConfig; structure: of STRUCTURE. rule: of a parameter, from the rule by `names` alone.
    wrappers: prefixes of names in files, and `prefix` transformers' own. beside: names without a prefix. ignored: names
    of unused tensors. is_in_out: matrices of layers are (in, out).
    """

    name: str
    family_name: str
    prefix: str
    names: Names
    defaults: Fields
    fields: Mapping[str, str]
    structure: Callable[[Fields], dict[str, Any]]
    rule: Callable[[str, TensorRule, ModelConfig, Fields], TensorRule] = (
        lambda parameter, usual, config, fields: usual
    )
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
        inner = {
            f"{k}.{name}": v
            for k, one in fields.items()
            if isinstance(one, Mapping)
            for name, v in one.items()
        }
        values = {**fields, **inner, **self.computed(fields), **renamed(fields, self.fields)}
        return checked_config(values, generation, self.checks, structure=self.structure(fields))

    def rules(self, config: ModelConfig, fields: Fields = NONE) -> dict[str, TensorRule]:
        fields, rules = {**self.defaults, **fields}, {}
        for parameter in parameter_shapes(config):
            name = self.names.of(parameter)
            usual = rule_in_out(parameter, name) if self.is_in_out else TensorRule((name,))
            rules[parameter] = self.rule(parameter, usual, config, fields)
        return rules

    @property
    def layout(self) -> Layout:
        return Layout(
            self.rules,
            lambda name: name if name in self.beside else self.prefix + name,
            self._short_name,
            config_json=self.config_json,
        )

    @property
    def family(self) -> Family:
        return Family(
            name=self.family_name,
            described_by="config.json",
            detect=lambda source: source.model_type == self.name,
            config=lambda source: self.model_config(
                source.config_json or {}, source.json("generation_config.json")
            ),
            rules=lambda source, config: self.rules(config, source.config_json or {}),
            named=partial(named_by, self._short_name),
            is_ignored=lambda name: name in self.ignored or is_ignored(name),
            quirks=lambda source, config: self.quirks,
            layout=self.layout,
        )

    def _short_name(self, name: str) -> str:
        return re.sub(rf"^(?:(?:{self.wrappers})\.)+", "", name)


# GPT-1 (Radford et al., 2018): GPT-2 with its layer norms after the blocks.

_GPT1_ACTIVATIONS = {
    "gelu": "gelu_new",
    "relu": "relu",
    "silu": "silu",
    "swish": "swish",
}  # as its code computes them
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

_BLOOM_ATTENTION = ("input_layernorm", "self_attention.query_key_value", "self_attention.dense")
_BLOOM_MLP = ("post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_BLOOM_FIELDS = {"hidden_size": "n_embd", "seq_length": "n_positions"}
_BLOOM_WRITTEN = (
    "vocab_size",
    "n_layer",
    "n_head",
    "layer_norm_epsilon",
    "tie_word_embeddings",
    "bos_token_id",
)
_BLOOM_SIZES = {"vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8, "seq_length": 2048}


def _bloom_rule(parameter: str, usual: TensorRule, config: ModelConfig, fields: Fields) -> TensorRule:
    is_qkv = ".c_attn." in parameter
    return replace(usual, transform=qkv_by_heads("h3d", config.head_size)) if is_qkv else usual


BLOOM = ModelType(
    "bloom",
    "BLOOM",
    prefix="transformer.",
    names=Names(
        "h",
        {"wte": "word_embeddings", "ln_e": "word_embeddings_layernorm", "ln_f": "ln_f", "lm_head": "lm_head"},
        _BLOOM_ATTENTION + _BLOOM_MLP,
    ),
    defaults={**_BLOOM_SIZES, "layer_norm_epsilon": 1e-5, "bos_token_id": 1, "eos_token_id": 2},
    aliases={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    fields=_BLOOM_FIELDS,
    computed=lambda fields: {"activation_function": "gelu_fast", "n_inner": None},
    checks={"apply_residual_connection_post_layernorm": only(False, "no other residual is implemented")},
    rule=_bloom_rule,
    structure=lambda fields: {"positions": "alibi", "embed_norm": True},
    quirks=("queries, keys and values of c_attn brought into one order",),
    config_json=lambda config: written_config(
        "bloom", "BloomForCausalLM", config, {**_BLOOM_FIELDS, **{name: name for name in _BLOOM_WRITTEN}}
    ),
)

# MPT (MosaicML, 2023): ALiBi, and no bias anywhere.

_NO_OTHER = "no other is implemented"
_NOT_YET = "it is not implemented"
_MPT_SIZES = {"vocab_size": 50368, "d_model": 2048, "n_layers": 24, "n_heads": 16, "max_seq_len": 2048}
_MPT_ENDS = {"bos_token_id": None, "eos_token_id": None}
MPT = ModelType(
    "mpt",
    "MPT",
    prefix="transformer.",
    names=Names(
        "blocks",
        {"wte": "wte", "ln_f": "norm_f", "lm_head": "lm_head"},
        ("norm_1", "attn.Wqkv", "attn.out_proj", "norm_2", "ffn.up_proj", "ffn.down_proj"),
    ),
    defaults={**_MPT_SIZES, "layer_norm_epsilon": 1e-5, "expansion_ratio": 4, **_MPT_ENDS},
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
