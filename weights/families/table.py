"""The families, and how a source finds its own."""

from collections.abc import Mapping
from typing import Any

from ..containers.ranks import FT_FOLDER
from ..errors import CheckpointError
from . import fastertransformer, gguf, gpt2, megatron, nanogpt, onnx
from .family import Family, Source
from .model_types import BLOOM, MPT, OPENAI_GPT, ModelType
from .opt import BIOGPT, OPT, XGLM

# By the model_type in config.json.
MODEL_TYPES = {one.name: one for one in (OPT, BLOOM, OPENAI_GPT, MPT, XGLM, BIOGPT)}
# Of containers that hold models of one program alone.
BY_FORMAT: dict[str, tuple[Family, ...]] = {
    "GGUF": (gguf.BLOOM, gguf.FAMILY),
    "ONNX": (onnx.FAMILY,),
    "TensorFlow bundle": (gpt2.OPENAI,),
    FT_FOLDER: (fastertransformer.BLOOM, fastertransformer.FAMILY),
}
# Of other containers: by names, then by config.json, which may lie next to any file.
OTHERS: tuple[Family, ...] = (
    megatron.WITH_EXPERTS,
    megatron.FAMILY,
    nanogpt.NANOGPT,
    nanogpt.MINGPT,
    *(one.family for one in MODEL_TYPES.values()),
    gpt2.FAMILY,
)
FAMILIES: tuple[Family, ...] = (*(family for families in BY_FORMAT.values() for family in families), *OTHERS)


def family_of(source: Source) -> Family:
    """Raise CheckpointError if the source has no family's names and layout."""
    for family in BY_FORMAT.get(source.container.format, OTHERS):
        if family.detect(source):
            return family
    if source.config_json is not None:
        model_type_of(source.config_json)  # raises CheckpointError
    held = source.container.format
    raise source.error(f"holds {held} of no model that is implemented, and no config.json lies beside it.")


def comes_with_config(name: str) -> bool:
    """Return whether this family, besides GPT-2, has its config.json next to the weights."""
    return any(one.family_name == name for one in MODEL_TYPES.values())


def model_type_of(fields: Mapping[str, Any]) -> ModelType:
    """Raise CheckpointError if the model_type of a config.json is not in the table."""
    found = fields.get("model_type")
    if isinstance(found, str) and found in MODEL_TYPES:
        return MODEL_TYPES[found]
    allowed = ", ".join(map(repr, ("gpt2", *MODEL_TYPES)))
    raise CheckpointError(
        f"config.json cannot be used: model_type is {found!r} and must be one of {allowed}."
    )
