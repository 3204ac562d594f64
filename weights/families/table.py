"""The families, and how a source finds its own."""

from collections.abc import Mapping
from typing import Any

from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.families.family import Family, Source
from tinygpt.weights.families.hugging_face import gpt2
from tinygpt.weights.families.hugging_face.biogpt import BIOGPT
from tinygpt.weights.families.hugging_face.bloom import BLOOM
from tinygpt.weights.families.hugging_face.mpt import MPT
from tinygpt.weights.families.hugging_face.openai_gpt import OPENAI_GPT
from tinygpt.weights.families.hugging_face.opt import OPT
from tinygpt.weights.families.hugging_face.xglm import XGLM
from tinygpt.weights.families.megatron import fastertransformer, megatron_lm, megatron_moe
from tinygpt.weights.families.other_programs import gguf, nanogpt, onnx, openai_tf

# By the model_type in a config.json; GPT-2's own first files have none.
MODEL_TYPES = {one.name: one for one in (OPT, BLOOM, OPENAI_GPT, MPT, XGLM, BIOGPT)}
# The first that recognises a source has it. Hugging Face's are last: they go by config.json, which may lie anywhere.
FAMILIES: tuple[Family, ...] = (
    gguf.BLOOM,
    gguf.FAMILY,
    openai_tf.FAMILY,
    fastertransformer.BLOOM,
    fastertransformer.FAMILY,
    megatron_moe.FAMILY,
    megatron_lm.FAMILY,
    onnx.FAMILY,
    nanogpt.NANOGPT,
    nanogpt.MINGPT,
    *(one.family for one in MODEL_TYPES.values()),
    gpt2.FAMILY,
)
# Those that are known and need more than their names, and why they are refused.
NOT_IMPLEMENTED = {
    "gpt_neo": "every second layer of which attends to 256 positions only",
    "gpt_bigcode": "whose heads share keys and values",
    **dict.fromkeys(("gptj", "gpt_neox", "codegen"), "whose positions are rotary"),
    "gpt_neox_japanese": "whose positions are rotary",
    "imagegpt": "which is of images",
    "ctrl": "whose head has a bias",
    "jais": "which is custom code",
    "btlm": "which is custom code",
}


def family_of(source: Source) -> Family:
    """The family whose names and layout the source has. CheckpointError where it is none of them."""
    for family in FAMILIES:
        if family.detect(source):
            return family
    if source.config_json is not None:
        raise CheckpointError(unknown_type(source.config_json))
    raise CheckpointError(
        f"{source.path} holds {source.container.format} whose tensors are named as in no model that is implemented, "
        "and no config.json lies beside it: copy that from the model, or take another checkpoint."
    )


def comes_with_config(name: str) -> bool:
    """Whether the family of this name, no GPT-2, is one whose config.json lies beside the weights."""
    return any(one.family_name == name for one in MODEL_TYPES.values())


def unknown_type(fields: Mapping[str, Any]) -> str:
    """What is wrong with a config.json of a model_type that is not in the table."""
    found, allowed = fields.get("model_type"), ", ".join(map(repr, (*gpt2.MODEL_TYPES, *MODEL_TYPES)))
    reason = NOT_IMPLEMENTED.get(found) if isinstance(found, str) else None
    return (
        f"config.json cannot be used: model_type is {found!r}{f', {reason},' if reason else ''} and must be one of "
        f"{allowed}, because no other architecture is implemented. Take another checkpoint."
    )
