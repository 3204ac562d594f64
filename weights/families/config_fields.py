"""ModelConfig from fields of config.json, from other files' settings, and from the shapes of tensors."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ..config import ACTIVATIONS, STRUCTURE, ModelConfig
from ..errors import CheckpointError, Checks, is_bool, is_number, is_whole, shown, wrong_fields
from .family import NamedTensor, Source, as_named

NONE: Mapping[str, Any] = MappingProxyType({})


def checked_config(
    values: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    checks: Checks = NONE,
    described_by: str = "config.json or generation_config.json",
    structure: Mapping[str, Any] = NONE,
) -> ModelConfig:
    """Return ModelConfig from `values`, by its field names, and from generation_config.json if there is one.

    structure: fields of STRUCTURE, which `values` cannot give. As in transformers, the ids that end a text come from
    generation_config.json alone if it exists, even if it names none. Raise one CheckpointError for all fields that are
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
        raise CheckpointError(f"{described_by} cannot be used: {'; '.join(problems)}.")
    names = ModelConfig.__dataclass_fields__.keys() - {*STRUCTURE, "eos_token_ids"}
    fields = {name: values[name] for name in names if name in values}
    return ModelConfig(**fields, **structure, eos_token_ids=_as_tuple(values["eos_token_id"]))


def written_config(
    model_type: str, architecture: str, config: ModelConfig, names: Mapping[str, str]
) -> dict[str, Any]:
    """Return the fields of a config.json. names: ModelConfig's names by the written ones."""
    ids = list(config.eos_token_ids)
    fields = {theirs: getattr(config, ours) for theirs, ours in names.items()}
    ends = {"eos_token_id": ids[0] if len(ids) == 1 else ids or None}
    return {"model_type": model_type, "architectures": [architecture], **fields, **ends}


def renamed(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {ours: fields[theirs] for theirs, ours in names.items() if theirs in fields}


def only(allowed: Any, because: str) -> tuple[Callable[[Any], bool], str]:
    shown = {False: "false", True: "true", None: "null"}.get(allowed, allowed)
    return lambda value: value is None or value == allowed, f"{shown}, because {because}"


def one_of(allowed: Mapping[str, Any]) -> tuple[Callable[[Any], bool], str]:
    return lambda value: isinstance(value, str) and value in allowed, f"one of {', '.join(allowed)}"


def size_to(most: int, least: int = 1) -> tuple[Callable[[Any], bool], str]:
    """Beyond `most`, config.json is damaged or an attack on memory."""
    return lambda value: is_whole(value) and least <= value <= most, f"a whole number from {least} to {most}"


def or_null(check: tuple[Callable[[Any], bool], str]) -> tuple[Callable[[Any], bool], str]:
    return lambda value: value is None or check[0](value), f"{check[1]}, or null"


def _as_tuple(token_ids: Any) -> tuple[Any, ...]:
    if isinstance(token_ids, list):
        return tuple(token_ids)
    return () if token_ids is None else (token_ids,)


BOOLEAN = (is_bool, "true or false")
LARGEST = 2**31 - 1
# As in transformers, token ids outside the vocabulary are allowed: they are never produced.
CHECKS: Checks = {
    "quantization_config": only(None, "quantized checkpoints are not implemented"),
    "activation_function": one_of(ACTIVATIONS),
    **dict.fromkeys(("vocab_size", "n_positions", "n_embd", "n_head"), size_to(LARGEST)),
    "n_layer": size_to(10_000),
    "n_inner": or_null(size_to(LARGEST)),
    "scale_attn_weights": BOOLEAN,
    "scale_attn_by_inverse_layer_idx": BOOLEAN,
    "reorder_and_upcast_attn": BOOLEAN,
    "tie_word_embeddings": BOOLEAN,
    "layer_norm_epsilon": (
        lambda value: is_number(value) and 0 <= value <= sys.float_info.max,
        "a number from 0 up",
    ),
    "bos_token_id": (lambda value: value is None or is_whole(value), "a token id or null"),
    "eos_token_id": (
        lambda value: all(map(is_whole, _as_tuple(value))),
        "a token id, a list of token ids or null",
    ),
}


# Fields that no tensor shows, and that a config.json next to the file may give.
UNSEEN = ("n_head", "activation_function", "layer_norm_epsilon", "bos_token_id", "eos_token_id")
GPT2_END = 50256  # the id of <|endoftext|>, which begins and ends texts


def config_of_parts(
    source: Source,
    described_by: str,
    guessed: Mapping[str, Any] = NONE,
    seen: Mapping[str, Any] = NONE,
    said: Mapping[str, Any] = NONE,
    structure: Mapping[str, Any] = NONE,
) -> ModelConfig:
    """Return ModelConfig: `said` wins over `seen`, UNSEEN of a config.json, and `guessed`.

    Raise CheckpointError for impossible fields, without a number of heads, or with two.
    """
    V = {**seen, **said}.get("vocab_size")
    end = GPT2_END if isinstance(V, int) and V > GPT2_END else None
    beside = {name: value for name, value in (source.config_json or {}).items() if name in UNSEEN}
    values = {"bos_token_id": end, "eos_token_id": end, **guessed, **beside, **seen, **said}
    if values.get("n_head") is None:
        width = values.get("n_embd")
        heads = (
            f'{{"n_head": {width // 64}}} if they have 64 columns'
            if is_whole(width) and width >= 64
            else "n_head"
        )
        place = source.folder / "config.json"
        raise source.error(f"does not say how many heads its model has: write {place} with {heads}.")
    refuse_other_heads(source, values["n_head"])
    described_by += " or config.json" * bool(beside)
    return checked_config(values, described_by=described_by, structure=structure)


def refuse_other_heads(source: Source, n_head: Any) -> None:
    """Raise CheckpointError if the files' n_head is not that of a config.json: shapes fit either."""
    if (beside := (source.config_json or {}).get("n_head")) not in (None, n_head):
        raise source.error(
            f"has n_head {shown(n_head)}, and config.json beside it {shown(beside)}: correct that one."
        )


class Shapes:
    """The shapes of tensors, of the first part of each, by name."""

    def __init__(self, source: Source, tensors: Iterable[NamedTensor] | None = None):
        tensors = as_named(source) if tensors is None else tensors
        self._source = source
        self._shapes = {one.name: one.tensor.shape for one in tensors if one.part == 0}

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def size(self, name: str, axis: int) -> int:
        """Raise CheckpointError if the tensor or the axis is absent."""
        if name not in self._shapes or len(self._shapes[name]) <= axis:
            raise self._source.error(
                f"holds no tensor {name} of {axis + 1} dimensions or more, which shows a size."
            )
        return self._shapes[name][axis]

    def sizes(self, embedding: str, positions: str, inner: tuple[str, int], layer: str) -> dict[str, int]:
        """Return ModelConfig's sizes. inner: a tensor and its axis; layer: the names' beginning before the number."""
        numbers = [
            int(found[1]) for name in self._shapes if (found := re.match(rf"{layer}(\d{{1,9}})[./]", name))
        ]
        return {
            "vocab_size": self.size(embedding, 0),
            "n_embd": self.size(embedding, 1),
            "n_positions": self.size(positions, 0),
            "n_inner": self.size(*inner),
            "n_layer": 1 + max(numbers, default=-1),
        }
