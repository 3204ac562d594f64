"""GPT-2 as transformers' save_pretrained writes it: names and layout are the engine's own."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tinygpt.weights.config import HEAD, STRUCTURE, ModelConfig, parameter_shapes
from tinygpt.weights.families.config_fields import checked_config, renamed, written_config
from tinygpt.weights.families.family import Family, Layout, NamedTensor, Rule, Source, named_by, rule_in_out

MODEL_TYPES = ("gpt2",)
# transformers' attribute_map; an alias wins over the name that it stands for.
ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_CHECKS = {"add_cross_attention": (lambda value: not value, "false, because cross-attention is not implemented")}
# Wrappers that a model may have been saved in: GPT2LMHeadModel and other parents, DataParallel, torch.compile.
_WRAPPERS = re.compile(r"(transformer\.|model\.|module\.|_orig_mod\.)+")
_CAUSAL_MASK = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
# Heads of fine-tuned models, next to the language model's head or instead of it.
_OTHER_HEADS = ("multiple_choice_head.", "score.", "classifier.", "qa_outputs.", "v_head.")


def model_config(fields: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Return ModelConfig from the fields of config.json and generation_config.json.

    Raise one CheckpointError that names every field that is impossible or not implemented.
    """
    return checked_config({**fields, **renamed(fields, ALIASES)}, generation, _CHECKS)


def canonical_name(name: str) -> str:
    """Return `name` without wrappers: module.transformer.wte.weight is wte.weight."""
    return _WRAPPERS.sub("", name, count=1) if _WRAPPERS.match(name) else name


def is_causal_mask(canonical_name: str) -> bool:
    return bool(_CAUSAL_MASK.fullmatch(canonical_name))


def is_ignored(canonical_name: str) -> bool:
    """Return whether the tensor is known and unused: a causal mask, or the head of another task."""
    return is_causal_mask(canonical_name) or canonical_name.startswith(_OTHER_HEADS)


def is_gpt2(fields: Mapping[str, Any]) -> bool:
    """GPT-2's first files have no model_type."""
    model_type = fields.get("model_type", "gpt2")
    return isinstance(model_type, str) and model_type in MODEL_TYPES


def named(source: Source) -> Iterable[NamedTensor]:
    return named_by(canonical_name, source)


def _rules(config: ModelConfig) -> dict[str, Rule]:
    return {name: rule_in_out(name, name) for name in parameter_shapes(config)}


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a config.json with which transformers makes the same GPT-2."""
    names = {name: name for name in ModelConfig.__dataclass_fields__ if name not in ("eos_token_ids", *STRUCTURE)}
    return written_config("gpt2", "GPT2LMHeadModel", config, names)


# Of GPT-2s of every family.
LAYOUT = Layout(
    _rules,
    lambda name: name if name == HEAD else f"transformer.{name}",
    canonical_name,
    is_in_out=True,
    has_defaults=False,
    config_json=config_json,
)
FAMILY = Family(
    name="GPT-2",
    described_by="config.json",
    detect=lambda source: source.config_json is not None and is_gpt2(source.config_json),
    config=lambda source: model_config(source.config_json or {}, source.json("generation_config.json")),
    rules=lambda source, config: _rules(config),
    named=named,
    is_ignored=is_ignored,
)
