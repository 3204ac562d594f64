"""GPT as Megatron-LM trains it, in any of its versions and on any number of GPUs, and as NeMo packs it.

Three things have changed over the years, each by itself: what the layers are called, what their attention is called,
and in which order the rows of its queries, keys and values lie (`checkpoint_version`, which the first files lack).
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tinygpt.config import ModelConfig
from tinygpt.errors import CheckpointError
from tinygpt.weights.containers.pickle_reader import fields_of
from tinygpt.weights.containers.ranks import NEMO_CONFIG, RANK, members_of, metadata_by_rank
from tinygpt.weights.families.config_fields import checked_config
from tinygpt.weights.families.facts import Shapes, ends_of, from_config_json, need_heads
from tinygpt.weights.families.family import Family, Placed, Rule, Source
from tinygpt.weights.families.transforms import AS_IS, Transform, as_is, transposed
from tinygpt.weights.messages import shown
from tinygpt.weights.parameters import EMBEDDING, HEAD, POSITIONS, parameter_shapes
from tinygpt.weights.yaml_text import read_yaml_object

_MODEL = re.compile(r"(?:state_dict\.)?model(\d*)\.(?:module\.)?(?:language_model\.)?")
_LAYERS = r"(?:encoder|transformer|decoder)\."
_LAYER = re.compile(rf"{_LAYERS}layers\.(\d{{1,6}})\.(.+)")
BESIDE = "beside the model: "
# Megatron core's names, as they were before.
_CORE = {
    "linear_qkv.layer_norm_": "input_layernorm.",
    "linear_qkv.": "attention.query_key_value.",
    "linear_proj.": "attention.dense.",
    "pre_mlp_layernorm.": "post_attention_layernorm.",
    "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
}
_TOP = {EMBEDDING: "embedding.word_embeddings.weight", POSITIONS: "embedding.position_embeddings.weight"}
_TOP |= {HEAD: "output_layer.weight", "ln_f.weight": "final_layernorm.weight", "ln_f.bias": "final_layernorm.bias"}
_MODULES = {
    "ln_1": "input_layernorm",
    "attn.c_attn": "attention.query_key_value",
    "attn.c_proj": "attention.dense",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h",
}
# Along which axis of the parameter GPUs have shared it.
_AXES = {
    EMBEDDING: 0,
    HEAD: 0,
    "attn.c_proj.weight": 0,
    "mlp.c_fc.weight": 1,
    "mlp.c_fc.bias": 0,
    "mlp.c_proj.weight": 0,
}
# How each version orders the rows of one GPU, as axes to be brought to (3, heads, head size).
_ORDERS = {0: ("3hd", (0, 1, 2)), 1: ("hd3", (2, 0, 1)), 2: ("h3d", (1, 0, 2)), 3: ("h3d", (1, 0, 2))}
# Settings that change the arithmetic: what they must be.
_PLAIN = {
    "swiglu": False,
    "squared_relu": False,
    "gated_linear_unit": False,
    "qk_layernorm": False,
    "apply_residual_connection_post_layernorm": False,
    "use_rotary_position_embeddings": False,
    "num_experts": None,
    "expert_num": None,
    "multi_query_attention": False,
}


def _detect(source: Source) -> bool:
    return any(name.endswith("word_embeddings.weight") and "embedding." in name for name in source.container.tensors)


# Ranks and names


def _rank_of(name: str) -> tuple[int, int, str]:
    """Tensor and pipeline parallel rank of a tensor, and its name in that file."""
    folder, slash, rest = name.partition("/")
    found = RANK.fullmatch(folder) if slash else None
    if found is None:
        return 0, 0, name
    tensor, pipeline = (found[1], found[2]) if found[1] else (found[3], found[4])
    return int(tensor), int(pipeline or 0), rest


def _place(source: Source) -> Iterable[Placed]:
    """Layers are numbered within a stage of the pipeline, and where stages alternate, within a part of it."""
    found = [(*_rank_of(name), name, tensor) for name, tensor in source.container.tensors.items()]
    stages = 1 + max((pipeline for _, pipeline, *_ in found), default=0)
    parts = 1 + max((_virtual(name) for _, _, name, *_ in found), default=0)
    local = _layers_of_a_stage(name for _, _, name, *_ in found)
    for rank, pipeline, name, file_name, tensor in found:
        first = (_virtual(name) * stages + pipeline) * local
        yield Placed(_name_of(name, first, first + local if stages * parts > 1 else None), file_name, tensor, rank)


def _virtual(name: str) -> int:
    """Which of the parts that alternate on a GPU a tensor is of: those of `model1` are of the second."""
    found = _MODEL.match(name)
    return int(found[1] or 0) if found else 0


def _layers_of_a_stage(names: Iterable[str]) -> int:
    numbers = [int(found[1]) for name in names if (found := _LAYER.match(_MODEL.sub("", name, count=1)))]
    return 1 + max(numbers, default=-1)


def _name_of(name: str, first: int, stop: int | None) -> str:
    """The name in the tables, with the number that a layer has in the whole model."""
    model = _MODEL.match(name)
    if model is None:
        return BESIDE + name
    name = name[model.end() :]
    layer = _LAYER.fullmatch(name)
    if layer is None:
        name = re.sub(rf"^{_LAYERS}", "", name).replace("word_embeddings_for_head", "output_layer")
        return name
    rest = re.sub(r"^(self_)?attention\.", "attention.", layer[2])
    for core, before in _CORE.items():
        if rest.removeprefix("attention.").startswith(core):
            rest = before + rest.removeprefix("attention.").removeprefix(core)
            break
    return f"layers.{first + int(layer[1])}.{rest}"


def _is_ignored(name: str) -> bool:
    return name.startswith(BESIDE) or name.endswith("_extra_state")


def _parts(source: Source) -> int:
    return 1 + max((_rank_of(name)[0] for name in source.container.tensors), default=0)


def _file_name(parameter: str) -> str:
    if parameter in _TOP:
        return _TOP[parameter]
    layer, module, kind = re.fullmatch(r"h\.(\d+)\.(.+)\.(\w+)", parameter).groups()
    return f"layers.{layer}.{_MODULES[module]}.{kind}"


# Configuration


def _settings(source: Source) -> dict[str, Any]:
    """What the training was told: of NeMo's file, or the arguments in the first rank."""
    members = members_of(source.container)
    if members:
        return read_yaml_object(f"{source.path}: {NEMO_CONFIG}", members[NEMO_CONFIG].text())
    return fields_of(_first_rank(source).get("args"))


def _first_rank(source: Source) -> Mapping[str, Any]:
    ranks = metadata_by_rank(source.container)
    return ranks[min(ranks)]


def _version(source: Source) -> int:
    """Files of Megatron core and NeMo's are of the last version, whether they say so or not; others of the first."""
    is_new = members_of(source.container) or any(".linear_qkv." in name for name in source.container.tensors)
    version = _first_rank(source).get("checkpoint_version", 3 if is_new else 0)
    if version not in _ORDERS:
        raise CheckpointError(f"{source.path} is of checkpoint_version {shown(version)}, which is not implemented.")
    return int(version)


def _config(source: Source) -> ModelConfig:
    settings = _settings(source)
    _check_settings(source, settings)
    placed = list(_place(source))
    shapes = Shapes(source, {one.name: one.tensor.shape for one in placed if one.part == 0})
    n, V = _parts(source), shapes.size(_TOP[EMBEDDING], 0)
    C = shapes.size(_TOP[EMBEDDING], 1)
    values = {
        **ends_of(V * n),
        "n_head": 16 if not settings and C == 1024 else None,  # the one model that was published without them
        "activation_function": _activation(settings),
        **from_config_json(source),
        **{ours: _number(settings[theirs]) for theirs, ours in _SETTINGS.items() if settings.get(theirs) is not None},
        "vocab_size": V * n,
        "n_embd": C,
        "n_positions": shapes.size(_TOP[POSITIONS], 0),
        "n_inner": shapes.size("layers.0.mlp.dense_h_to_4h.weight", 0) * n,
        "n_layer": shapes.layers(r"layers\.(\d{1,9})\."),
        "tie_word_embeddings": not settings.get("untie_embeddings_and_output_weights", False),
    }
    need_heads(source, values)
    config = checked_config(values, described_by="its settings")
    if config.n_head % n:
        raise CheckpointError(f"{source.path} has {config.n_head} heads on {n} GPUs: its ranks are not of one model.")
    return config


_SETTINGS = {"num_attention_heads": "n_head", "layernorm_epsilon": "layer_norm_epsilon"}
_SETTINGS |= {"norm_epsilon": "layer_norm_epsilon"}


def _number(value: Any) -> Any:
    """YAML takes 1e-5 for a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _activation(settings: Mapping[str, Any]) -> str:
    fused = settings.get("bias_gelu_fusion", settings.get("bias_activation_fusion", True))
    if not settings or settings.get("openai_gelu") or (fused and not settings.get("onnx_safe")):
        return "gelu_new"  # fused or not, it is the same function but for rounding
    return "gelu"


def _check_settings(source: Source, settings: Mapping[str, Any]) -> None:
    wrong = [
        f"{name} is {shown(settings[name])}"
        for name, plain in _PLAIN.items()
        if settings.get(name) not in (plain, None, 0)
    ]
    for name, allowed in {
        "normalization": ("LayerNorm", "layernorm", "layernorm1p_off"),
        "position_embedding_type": ("learned_absolute", "learned"),
        "activation": ("gelu",),
    }.items():
        if settings.get(name) not in (None, *allowed):
            wrong.append(f"{name} is {shown(settings[name])}")
    heads, groups = settings.get("num_attention_heads"), settings.get("num_query_groups")
    if groups not in (None, heads) and (settings.get("group_query_attention", True)):
        wrong.append(f"num_query_groups is {shown(groups)} for {shown(heads)} heads")
    if wrong:
        raise CheckpointError(f"{source.path} is no plain GPT, and what it is is not implemented: {'; '.join(wrong)}.")
    _check_ranks(source, settings)


def _check_ranks(source: Source, settings: Mapping[str, Any]) -> None:
    """All parts must be there: a rank's file alone, or one that is lost, would be half a model."""
    ranks = {_rank_of(name)[:2] for name in source.container.tensors}
    wanted = tuple(
        settings[name] if isinstance(settings.get(name), int) else 1 + max(rank[axis] for rank in ranks)
        for axis, name in enumerate(("tensor_model_parallel_size", "pipeline_model_parallel_size"))
    )
    if len(ranks) != wanted[0] * wanted[1] or any(t >= wanted[0] or p >= wanted[1] for t, p in ranks):
        raise CheckpointError(
            f"{source.path} holds {len(ranks)} parts of a model that was trained in {wanted[0]} x {wanted[1]} (tensor "
            "x pipeline parallel): give the folder that holds all ranks."
        )


# Parameters


def _rules(source: Source, config: ModelConfig) -> dict[str, Rule]:
    version = _version(source)
    has_bias = any(name.endswith(("query_key_value.bias", "linear_qkv.bias")) for name in source.container.tensors)
    rules = {}
    for name in parameter_shapes(config):
        transform = _transform(name, version, config.head_size)
        is_linear = name.endswith(".bias") and ".ln_" not in f".{name}"
        rules[name] = Rule((_file_name(name),), transform, default=0.0 if is_linear and not has_bias else None)
    return rules


def _transform(parameter: str, version: int, head_size: int) -> Transform:
    kind = parameter if parameter in _AXES else parameter.partition(".")[2].partition(".")[2]
    if kind.startswith("attn.c_attn."):
        return _queries_keys_values(version, head_size, is_bias=kind.endswith(".bias"))
    axis = _AXES.get(kind)
    if kind.endswith("weight") and kind.split(".")[-2] in ("c_proj", "c_fc"):
        return transposed(axis)
    return AS_IS if axis is None else as_is(axis)


def _queries_keys_values(version: int, head_size: int, is_bias: bool) -> Transform:
    """The rows of each GPU have its own heads: they are ordered first, and then joined along the heads."""
    order, axes = _ORDERS[version]
    sizes = tuple({"3": 3, "h": -1, "d": head_size}[letter] for letter in order)

    def of_part(array: np.ndarray) -> np.ndarray:
        rest = array.shape[1:]
        ordered = array.reshape(*sizes, *rest).transpose(*axes, *range(3, 3 + len(rest)))  # (3, heads, head size, ...)
        return ordered.reshape(3, -1, *rest)  # (3, C of the part, ...)

    def of_whole(array: np.ndarray) -> np.ndarray:
        return array.reshape(-1) if is_bias else array.reshape(-1, array.shape[-1]).T

    def stored_shape(shape: tuple[int, ...], n: int) -> tuple[int, ...]:
        return (shape[-1] // n, *shape[:-1])

    return Transform(stored_shape, of_part, 1, of_whole)


def _quirks(source: Source, config: ModelConfig) -> list[str]:
    quirks = [f"checkpoint_version {_version(source)}: queries, keys and values brought into one order"]
    if not _settings(source):
        quirks.append(f"{config.n_head} heads and {config.activation_function}, as the files have no settings")
    return quirks


def _tokenizer(source: Source) -> dict[str, Any] | None:
    """Of a NeMo archive that has GPT-2's two files."""
    members = members_of(source.container)
    names = fields_of(_settings(source).get("tokenizer")) if members else {}
    vocab, merges = (
        members.get(str(names.get(name) or "").removeprefix("nemo:")) for name in ("vocab_file", "merge_file")
    )
    if vocab is None or merges is None:
        return None
    try:
        ids = json.loads(vocab.text())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source.path} has a vocabulary that is not valid JSON: give token ids.") from error
    lines = merges.text().removesuffix("\n").split("\n")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = "<|endoftext|>"
    has_end = isinstance(ids, dict) and type(ids.get(end)) is int
    return {
        "version": "1.0",
        "model": {"type": "BPE", "vocab": ids, "merges": lines[lines[0].startswith("#version") :]},
        "added_tokens": [{"id": ids[end], "content": end, "special": True, "normalized": False}] if has_end else [],
        "normalizer": None,
        "pre_tokenizer": dict(byte_level),
        "post_processor": None,
        "decoder": byte_level,
    }


FAMILY = Family(
    name="Megatron-LM GPT",
    described_by="its settings",
    detect=_detect,
    config=_config,
    rules=_rules,
    place=_place,
    is_ignored=_is_ignored,
    parts=_parts,
    quirks=_quirks,
    tokenizer=_tokenizer,
    advice="Parts that differ where each has the whole are ranks of two iterations, or have drifted apart in training.",
)
