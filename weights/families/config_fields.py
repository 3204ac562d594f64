"""ModelConfig from what a file says, by the names of Hugging Face's config.json, for every family."""

import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tinygpt.weights.checks import Checks, is_bool, is_number, is_whole, wrong_fields
from tinygpt.weights.config import ACTIVATIONS, STRUCTURE, ModelConfig
from tinygpt.weights.errors import CheckpointError

# The largest of each that is believed: beyond, config.json is damaged, or an attack on memory.
SIZES = {
    **dict.fromkeys(("vocab_size", "n_positions", "n_embd", "n_head", "n_inner"), 2**31 - 1),
    "n_layer": 10_000,
}
BOOLEANS = (
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
    "reorder_and_upcast_attn",
    "tie_word_embeddings",
)


def checked_config(
    values: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    checks: Checks = MappingProxyType({}),
    described_by: str = "config.json or generation_config.json",
    structure: Mapping[str, Any] = MappingProxyType({}),
) -> ModelConfig:
    """ModelConfig from `values`, which go by its names, and from generation_config.json, where there is one.

    `structure` is what sets the family apart from GPT-2: fields of STRUCTURE, which `values` cannot give.

    As in transformers, the ids that end a text come from generation_config.json alone where that exists, even if it
    names none. `checks` are the architecture's own. Raises one CheckpointError that names every field that is
    impossible or not implemented.
    """
    ending = values if generation is None else {"eos_token_id": None, **generation}
    starting = generation if generation and generation.get("bos_token_id") is not None else values
    values = {
        **values,
        "bos_token_id": starting.get("bos_token_id", ModelConfig.bos_token_id),
        "eos_token_id": ending.get("eos_token_id", ModelConfig.eos_token_ids[0]),
    }
    problems = wrong_fields(values, {**checks, **CHECKS})
    n_embd, n_head = (values.get(name, getattr(ModelConfig, name)) for name in ("n_embd", "n_head"))
    if is_whole(n_embd) and is_whole(n_head) and n_head > 0 and n_embd % n_head:
        problems.append(f"n_embd {n_embd} cannot be divided into {n_head} heads (n_head)")
    if problems:
        raise CheckpointError(
            f"{described_by} cannot be used: {'; '.join(problems)}. Correct it, or take another checkpoint."
        )
    names = ModelConfig.__dataclass_fields__.keys() - {*STRUCTURE, "eos_token_ids"}
    fields = {name: values[name] for name in names if name in values}
    return ModelConfig(**fields, **structure, eos_token_ids=_as_tuple(values["eos_token_id"]))


def written_eos(config: ModelConfig) -> int | list[int] | None:
    """The ids that end a text, as config.json has them."""
    ids = list(config.eos_token_ids)
    return ids[0] if len(ids) == 1 else ids or None


def renamed(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Those of `fields` that are in `names`, by the names that are there for them."""
    return {ours: fields[theirs] for theirs, ours in names.items() if theirs in fields}


def only(allowed: Any, because: str) -> tuple[Callable[[Any], bool], str]:
    """A check of a field that may have one value, or none at all."""
    shown = {False: "false", True: "true", None: "null"}.get(allowed, allowed)
    return lambda value: value is None or value == allowed, f"{shown}, because {because}"


def _as_tuple(token_ids: Any) -> tuple[Any, ...]:
    if isinstance(token_ids, list):
        return tuple(token_ids)
    return () if token_ids is None else (token_ids,)


def _is_size(largest: int) -> Callable[[Any], bool]:
    return lambda value: is_whole(value) and 1 <= value <= largest


# Token ids outside the vocabulary are believed, as transformers does: they are simply never produced.
CHECKS: Checks = {
    "quantization_config": (lambda value: value is None, "absent, because quantised checkpoints are not implemented"),
    "activation_function": (
        lambda value: isinstance(value, str) and value in ACTIVATIONS,
        f"one of {', '.join(ACTIVATIONS)}, which are implemented",
    ),
    **{name: (_is_size(most), f"a whole number from 1 to {most}") for name, most in SIZES.items()},
    "n_inner": (lambda value: value is None or _is_size(SIZES["n_inner"])(value), "a whole number from 1 up, or null"),
    **dict.fromkeys(BOOLEANS, (is_bool, "true or false")),
    "layer_norm_epsilon": (lambda value: is_number(value) and 0 <= value <= sys.float_info.max, "a number from 0 up"),
    "bos_token_id": (lambda value: value is None or is_whole(value), "a token id or null"),
    "eos_token_id": (
        lambda value: all(map(is_whole, _as_tuple(value))),
        "a token id, a list of token ids or null",
    ),
}
