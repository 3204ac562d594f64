"""GPT-Neo (EleutherAI, 2021) and TinyStories: GPT-2 with kinds of attention by layer, and scores without a scale."""

from itertools import chain
from typing import Any

from ..config import ModelConfig
from ..errors import LARGEST, CheckpointError, is_whole, or_null, shown, size_to
from .family import NO_BIAS, Names, TensorRule, rule_of_qkv
from .gpt2 import IGNORED
from .model_type import Fields, ModelType

MAX_LAYERS = 10_000
KINDS = ("global", "local")
_DEFAULT = [[["global", "local"], 12]]
_FIELDS = {
    "hidden_size": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
_QKV = "attn.attention.qkv_proj"  # stands for q_proj, k_proj and v_proj


def _are_kinds(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_LAYERS and all(kind in KINDS for kind in value)


def _is_run(value: Any) -> bool:
    """Return whether a value is kinds of layers and how often they follow one another."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    kinds, count = value
    return _are_kinds(kinds) and is_whole(count) and 0 <= count * len(kinds) <= MAX_LAYERS


def _are_types(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_LAYERS and all(map(_is_run, value))


def _layers_of(types: list[Any]) -> list[str]:
    return list(chain.from_iterable(kinds * count for kinds, count in types))


def _structure(fields: Fields) -> dict[str, Any]:
    """Raise CheckpointError if two fields, each possible, do not fit."""
    types, stated, n_layer = fields["attention_types"], fields["attention_layers"], fields["num_layers"]
    if not (_TYPES[0](types) and _LAYERS[0](stated)):
        return {}  # which the checks tell
    counted = _DEFAULT if types is None else types
    layers = _layers_of(counted) if stated is None else stated
    if None not in (types, stated) and _layers_of(types) != stated:
        raise CheckpointError(
            f"config.json cannot be used: attention_layers is {shown(stated)}, and attention_types {shown(types)}."
        )
    if is_whole(n_layer) and len(layers) != n_layer:
        said = (
            f"attention_types is {shown(counted)}"
            if stated is None
            else f"attention_layers is {shown(stated)}"
        )
        raise CheckpointError(
            f"config.json cannot be used: {said}, kinds of {len(layers)} layers, and num_layers is {n_layer}."
        )
    local = tuple(i for i, kind in enumerate(layers) if kind == "local")
    return {"local_layers": local, "window_size": fields["window_size"]} if local else {}


def _rule(parameter: str, usual: TensorRule, config: ModelConfig, fields: Fields) -> TensorRule:
    if ".c_attn." not in parameter:
        return usual
    if parameter.endswith(".bias"):
        return NO_BIAS
    return rule_of_qkv(usual)


_ALLOWED = "of 'global' and 'local'"
_TYPES = or_null((_are_types, f"a list of kinds, {_ALLOWED}, each with a count: [[['global', 'local'], 6]]"))
_LAYERS = or_null((_are_kinds, f"a list of kinds, {_ALLOWED}"))
GPT_NEO = ModelType(
    "gpt_neo",
    "GPT-Neo",
    prefix="transformer.",
    names=Names(
        "h",
        {"wte": "wte", "wpe": "wpe", "ln_f": "ln_f", "lm_head": "lm_head"},
        ("ln_1", _QKV, "attn.attention.out_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"),
    ),
    defaults={
        "vocab_size": 50257,
        "hidden_size": 2048,
        "num_layers": 24,
        "num_heads": 16,
        "intermediate_size": None,
        "max_position_embeddings": 2048,
        "attention_types": None,
        "attention_layers": None,
        "window_size": 256,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    aliases={"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
    fields=_FIELDS,
    computed=lambda fields: {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": False},
    checks={
        "attention_types": _TYPES,
        "attention_layers": _LAYERS,
        "window_size": size_to(LARGEST),
    },
    rule=_rule,
    structure=_structure,
    ignored=(*IGNORED, r"h\.\d+\.attn\.attention\.(bias|masked_bias)"),
    quirks=("one c_attn of queries, keys and values",),
)
