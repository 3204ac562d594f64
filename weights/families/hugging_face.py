"""GPT-2 as transformers' save_pretrained writes it: whose names and layout are the engine's own."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tinygpt.config import ModelConfig
from tinygpt.errors import CheckpointError
from tinygpt.weights.families.config_fields import checked_config
from tinygpt.weights.families.family import Family, Placed, Rule, Source
from tinygpt.weights.json_file import read_json_object
from tinygpt.weights.parameters import parameter_shapes

MODEL_TYPES = ("gpt2",)
# transformers' attribute_map; an alias wins over the name that it stands for.
_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_CHECKS = {"add_cross_attention": (lambda value: not value, "false, because cross-attention is not implemented")}
# Wrappers that a model may have been saved in: GPT2LMHeadModel and other parents, DataParallel, torch.compile.
_WRAPPERS = re.compile(r"(transformer\.|model\.|module\.|_orig_mod\.)+")
_CAUSAL_MASK = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
# What fine-tunes put on top of the hidden states beside, or instead of, the language model's head.
_OTHER_HEADS = ("multiple_choice_head.", "score.", "classifier.", "qa_outputs.", "v_head.")


def read_config(folder: Path) -> ModelConfig:
    """What a folder's config.json says, and generation_config.json where there is one. CheckpointError if it cannot be
    used, with all that is wrong."""
    generation = folder / "generation_config.json"
    fields = read_json_object(folder / "config.json")
    return model_config(fields, read_json_object(generation) if generation.exists() else None)


def model_config(fields: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """ModelConfig from the fields of config.json and, where there is one, generation_config.json.

    Raises one CheckpointError naming every field that is impossible or not implemented.
    """
    if not _is_gpt2(fields):
        raise CheckpointError(_unknown_type(fields))
    values = {**fields, **{_ALIASES[name]: value for name, value in fields.items() if name in _ALIASES}}
    return checked_config(values, generation, _CHECKS)


def canonical_name(name: str) -> str:
    """`name` without the wrappers it was saved in: module.transformer.wte.weight is wte.weight."""
    return _WRAPPERS.sub("", name, count=1) if _WRAPPERS.match(name) else name


def is_causal_mask(canonical_name: str) -> bool:
    return bool(_CAUSAL_MASK.fullmatch(canonical_name))


def is_ignored(canonical_name: str) -> bool:
    """Whether the tensor is known and of no use here: a causal mask, or the head of another task."""
    return is_causal_mask(canonical_name) or canonical_name.startswith(_OTHER_HEADS)


def refusal(source: Source) -> str:
    """Why a source that no family recognises cannot be loaded."""
    if source.config_json is not None:
        return _unknown_type(source.config_json)
    return (
        f"{source.path} holds {source.container.format} whose tensors are named as in no model that is implemented, "
        "and no config.json lies beside it: copy that from the model, or take another checkpoint."
    )


def _is_gpt2(fields: Mapping[str, Any]) -> bool:
    """GPT-2's first files have no model_type."""
    model_type = fields.get("model_type", "gpt2")
    return isinstance(model_type, str) and model_type in MODEL_TYPES


def _unknown_type(fields: Mapping[str, Any]) -> str:
    return (
        f"config.json cannot be used: model_type is {fields.get('model_type')!r} and must be "
        f"{' or '.join(map(repr, MODEL_TYPES))}, because no other architecture is implemented. Take another checkpoint."
    )


def _place(source: Source) -> Iterable[Placed]:
    return (Placed(canonical_name(name), name, tensor) for name, tensor in source.container.tensors.items())


def _rules(source: Source, config: ModelConfig) -> dict[str, Rule]:
    return {name: Rule((name,)) for name in parameter_shapes(config)}


FAMILY = Family(
    name="GPT-2",
    described_by="config.json",
    detect=lambda source: source.config_json is not None and _is_gpt2(source.config_json),
    config=lambda source: model_config(source.config_json or {}, source.json("generation_config.json")),
    rules=_rules,
    place=_place,
    is_ignored=is_ignored,
)
