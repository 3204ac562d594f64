"""GPT as Megatron-LM trains it, in any of its versions and on any number of GPUs, and as NeMo packs it.

Three things have changed over the years, each by itself: what the layers are called, what their attention is called,
and in which order the rows of its queries, keys and values lie (`checkpoint_version`, which the first files lack).
"""

import json
from collections.abc import Iterable
from typing import Any

from tinygpt.weights.config import ModelConfig
from tinygpt.weights.containers.pickles.pickle_reader import fields_of
from tinygpt.weights.containers.ranks.nemo_archive import members_of
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.families.byte_level import byte_level_tokenizer
from tinygpt.weights.families.family import NO_BIAS, Family, Rule, Source
from tinygpt.weights.families.megatron.names import MODULES, has_names, is_ignored, megatron_name, parts_of, place
from tinygpt.weights.families.megatron.settings import (
    ROW_ORDERS,
    check_settings,
    config_of,
    settings_of,
    version_of,
)
from tinygpt.weights.families.transforms import AS_IS, Transform, as_is, queries_keys_values, transposed
from tinygpt.weights.parameters import EMBEDDING, HEAD, parameter_shapes

# Along which axis of the parameter GPUs have shared it.
_AXES = {
    EMBEDDING: 0,
    HEAD: 0,
    "attn.c_proj.weight": 0,
    "mlp.c_fc.weight": 1,
    "mlp.c_fc.bias": 0,
    "mlp.c_proj.weight": 0,
}


def _config(source: Source) -> ModelConfig:
    settings = settings_of(source)
    check_settings(source, settings)
    return config_of(source, settings, place(source))


def _rules(source: Source, config: ModelConfig) -> dict[str, Rule]:
    return rules_of(source, config, parameter_shapes(config))


def rules_of(source: Source, config: ModelConfig, names: Iterable[str]) -> dict[str, Rule]:
    """Those of the parameters of these names."""
    version = version_of(source)
    without = _without_bias(source)
    return {
        name: NO_BIAS
        if name.endswith(without)
        else Rule((megatron_name(name),), _transform(name, version, config.head_size))
        for name in names
    }


_QKV_BIAS, _LINEAR_BIASES = "attn.c_attn.bias", ("attn.c_proj.bias", "mlp.c_fc.bias", "mlp.c_proj.bias")


def _without_bias(source: Source) -> tuple[str, ...]:
    """The parameters, by the ends of their names, that a model was trained without."""
    settings = settings_of(source)
    said = settings.get("add_bias_linear", settings.get("bias"))
    if not isinstance(said, bool):
        modules = tuple(f"{MODULES[name.removesuffix('.bias')]}.bias" for name in (_QKV_BIAS, *_LINEAR_BIASES))
        said = any(one.name.endswith(modules) for one in place(source))
    if said:
        return ()
    has_queries = settings.get("add_qkv_bias", settings.get("qkv_bias")) is True
    return _LINEAR_BIASES if has_queries else (_QKV_BIAS, *_LINEAR_BIASES)


def _transform(parameter: str, version: int, head_size: int) -> Transform:
    kind = parameter if parameter in _AXES else parameter.partition(".")[2].partition(".")[2]
    if kind.startswith("attn.c_attn."):
        return queries_keys_values(ROW_ORDERS[version], head_size)
    axis = _AXES.get(kind)
    if kind.endswith("weight") and kind.split(".")[-2] in ("c_proj", "c_fc"):
        return transposed(axis)
    return AS_IS if axis is None else as_is(axis)


def _quirks(source: Source, config: ModelConfig) -> list[str]:
    quirks = [f"checkpoint_version {version_of(source)}: queries, keys and values brought into one order"]
    if not settings_of(source):
        quirks.append(f"{config.n_head} heads and {config.activation_function}, as the files have no settings")
    return quirks


def _tokenizer(source: Source) -> dict[str, Any] | None:
    """Of a NeMo archive that has GPT-2's two files."""
    members = members_of(source.container)
    names = fields_of(settings_of(source).get("tokenizer")) if members else {}
    vocab, merges = (
        members.get(str(names.get(name) or "").removeprefix("nemo:")) for name in ("vocab_file", "merge_file")
    )
    if vocab is None or merges is None:
        return None
    try:
        ids = json.loads(vocab.text())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{source.path} has a vocabulary that is not valid JSON: download it again, or give token ids."
        ) from error
    lines = merges.text().removesuffix("\n").split("\n")
    end = "<|endoftext|>"
    has_end = isinstance(ids, dict) and type(ids.get(end)) is int
    added = [{"id": ids[end], "content": end, "special": True, "normalized": False}] if has_end else []
    return byte_level_tokenizer(ids, lines[lines[0].startswith("#version") :], added)


FAMILY = Family(
    name="Megatron-LM GPT",
    described_by="its settings",
    detect=has_names,
    config=_config,
    rules=_rules,
    place=place,
    is_ignored=is_ignored,
    parts=parts_of,
    quirks=_quirks,
    tokenizer=_tokenizer,
    advice="Parts that differ where each has the whole are ranks of two iterations, or have drifted apart in training.",
)
