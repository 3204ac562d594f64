"""GPT as Megatron-LM trains it, in any of its versions and on any number of GPUs, and as NeMo packs it.

Three things have changed over the years, each by itself: what the layers are called, what their attention is called,
and in which order the rows of its queries, keys and values lie (`checkpoint_version`, which the first files lack).
"""

import json
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from tinygpt.config import ModelConfig
from tinygpt.errors import CheckpointError
from tinygpt.weights.containers.pickles.pickle_reader import fields_of
from tinygpt.weights.containers.ranks.nemo_archive import NEMO_CONFIG, members_of
from tinygpt.weights.containers.ranks.rank_files import RANK, metadata_by_rank
from tinygpt.weights.families.byte_level import byte_level_tokenizer
from tinygpt.weights.families.config_fields import checked_config
from tinygpt.weights.families.facts import (
    MEGATRON_MODULES,
    Shapes,
    ends_of,
    from_config_json,
    name_in_tables,
    need_heads,
)
from tinygpt.weights.families.family import NO_BIAS, Family, Placed, Rule, Source
from tinygpt.weights.families.transforms import AS_IS, Transform, as_is, queries_keys_values, transposed
from tinygpt.weights.messages import shown
from tinygpt.weights.parameters import EMBEDDING, HEAD, POSITIONS, parameter_shapes
from tinygpt.weights.yaml_text import read_yaml_object

_MODEL = re.compile(r"(?:state_dict\.)?mod(?:el|ule)(\d*)\.(?:module\.)?(?:language_model\.)?")
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
# Along which axis of the parameter GPUs have shared it.
_AXES = {
    EMBEDDING: 0,
    HEAD: 0,
    "attn.c_proj.weight": 0,
    "mlp.c_fc.weight": 1,
    "mlp.c_fc.bias": 0,
    "mlp.c_proj.weight": 0,
}
# How each version orders the rows of one GPU: its heads, their size, and queries, keys and values.
_ORDERS = {0: "3hd", 1: "hd3", 2: "h3d", 3: "h3d"}
# Settings that change the arithmetic: what they may be where they are there.
_PLAIN: dict[str, tuple] = {
    "swiglu": (False,),
    "squared_relu": (False,),
    "gated_linear_unit": (False,),
    "qk_layernorm": (False,),
    "apply_layernorm_1p": (False,),  # whose weights are less by 1
    "apply_residual_connection_post_layernorm": (False,),
    "use_rotary_position_embeddings": (False,),
    "num_experts": (0,),
    "expert_num": (0,),
    "multi_query_attention": (False,),
    "normalize_attention_scores": (True,),
    "transformer_block_type": ("pre_ln",),
    "normalization": ("LayerNorm", "layernorm"),
    "position_embedding_type": ("learned_absolute", "learned"),
    "activation": ("gelu",),
}


def has_names(source: Source) -> bool:
    return any(name.endswith("word_embeddings.weight") and "embedding." in name for name in source.container.tensors)


# Ranks and names


def rank_of(name: str) -> tuple[int, int, str]:
    """Tensor and pipeline parallel rank of a tensor, and its name in that file."""
    folder, slash, rest = name.partition("/")
    found = RANK.fullmatch(folder) if slash else None
    if found is None:
        return 0, 0, name
    tensor, pipeline = (found[1], found[2]) if found[1] else (found[3], found[4])
    return int(tensor), int(pipeline or 0), rest


def place(source: Source) -> Iterable[Placed]:
    """Layers are numbered within a stage of the pipeline, and where stages alternate, within a part of it."""
    found = [(*rank_of(name), name, tensor) for name, tensor in source.container.tensors.items()]
    stages = 1 + max((pipeline for _, pipeline, *_ in found), default=0)
    local = _layers_of_a_stage(name for _, _, name, *_ in found)
    for rank, pipeline, name, file_name, tensor in found:
        first = (_virtual(name) * stages + pipeline) * local
        yield Placed(name_of(name, first), file_name, tensor, rank)


def _virtual(name: str) -> int:
    """Which of the parts that alternate on a GPU a tensor is of: those of `model1` are of the second."""
    found = _MODEL.match(name)
    return int(found[1] or 0) if found else 0


def _layers_of_a_stage(names: Iterable[str]) -> int:
    numbers = [int(found[1]) for name in names if (found := _LAYER.match(_MODEL.sub("", name, count=1)))]
    return 1 + max(numbers, default=-1)


def name_of(name: str, first: int) -> str:
    """The name in the tables, with the number that a layer has in the whole model."""
    model = _MODEL.match(name)
    if model is None:
        return BESIDE + name
    name = name[model.end() :]
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return re.sub(rf"^{_LAYERS}", "", name).replace("word_embeddings_for_head", "output_layer")
    rest = re.sub(r"^(self_)?attention\.", "attention.", layer[2])
    for core, before in _CORE.items():
        if rest.removeprefix("attention.").startswith(core):
            rest = before + rest.removeprefix("attention.").removeprefix(core)
            break
    return f"layers.{first + int(layer[1])}.{rest}"


def is_ignored(name: str) -> bool:
    return name.startswith(BESIDE) or name.endswith("_extra_state")


def parts_of(source: Source) -> int:
    return 1 + max((rank_of(name)[0] for name in source.container.tensors), default=0)


def _file_name(parameter: str) -> str:
    return name_in_tables(parameter, _TOP, "layers", MEGATRON_MODULES)


# Configuration


def settings_of(source: Source) -> dict[str, Any]:
    """What the training was told: of NeMo's file, or the arguments in the first rank."""
    members = members_of(source.container)
    if members:
        return read_yaml_object(f"{source.path}: {NEMO_CONFIG}", members[NEMO_CONFIG].text())
    return fields_of(_first_rank(source).get("args"))


def _first_rank(source: Source) -> Mapping[str, Any]:
    ranks = metadata_by_rank(source.container)
    return ranks[min(ranks)]


def version_of(source: Source) -> int:
    """Files of Megatron core and NeMo's are of the last version, whether they say so or not; others of the first."""
    is_new = members_of(source.container) or any(".linear_qkv." in name for name in source.container.tensors)
    version = _first_rank(source).get("checkpoint_version", 3 if is_new else 0)
    if type(version) not in (int, float) or version not in _ORDERS:
        raise CheckpointError(f"{source.path} is of checkpoint_version {shown(version)}, which is not implemented.")
    return int(version)


def _config(source: Source) -> ModelConfig:
    settings = settings_of(source)
    check_settings(source, settings)
    return config_of(source, settings, place(source))


def config_of(
    source: Source,
    settings: Mapping[str, Any],
    tensors: Iterable[Placed],
    inner: str = "layers.0.mlp.dense_h_to_4h.weight",
    structure: Mapping[str, Any] = MappingProxyType({}),
) -> ModelConfig:
    """The configuration by the shapes of tensors. inner: the one that shows how wide an MLP is."""
    shapes = Shapes(source, {one.name: one.tensor.shape for one in tensors if one.part == 0})
    n, V = parts_of(source), shapes.size(_TOP[EMBEDDING], 0)
    C = shapes.size(_TOP[EMBEDDING], 1)
    values = {
        **ends_of(V * n),
        "n_head": 16 if not settings and C == 1024 else None,  # the one model that was published without them
        "activation_function": activation_of(settings),
        **from_config_json(source),
        "vocab_size": V * n,
        "n_embd": C,
        "n_positions": shapes.size(_TOP[POSITIONS], 0),
        "n_inner": shapes.size(inner, 0) * n,
        "n_layer": shapes.layers(r"layers\.(\d{1,9})\."),
        **_said(settings),
        "tie_word_embeddings": not settings.get("untie_embeddings_and_output_weights", False),
    }
    need_heads(source, values)
    config = checked_config(values, described_by="its settings", structure=structure)
    if config.n_head % n:
        raise CheckpointError(f"{source.path} has {config.n_head} heads on {n} GPUs: its ranks are not of one model.")
    return config


_SETTINGS = {
    "num_attention_heads": "n_head",
    "layernorm_epsilon": "layer_norm_epsilon",
    "norm_epsilon": "layer_norm_epsilon",
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "ffn_hidden_size": "n_inner",
    "max_position_embeddings": "n_positions",
}


def _said(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the settings say wins over what tensors show, so that layers that were lost are missed."""
    return {ours: _number(settings[theirs]) for theirs, ours in _SETTINGS.items() if _is_value(settings.get(theirs))}


def _is_value(value: Any) -> bool:
    """Not a reference to another setting, as NeMo writes it."""
    return value is not None and not (isinstance(value, str) and value.startswith("${"))


def _number(value: Any) -> Any:
    """YAML takes 1e-5 for a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def activation_of(settings: Mapping[str, Any]) -> str:
    fused = settings.get("bias_gelu_fusion", settings.get("bias_activation_fusion", True))
    if not settings or settings.get("openai_gelu") or (fused and not settings.get("onnx_safe")):
        return "gelu_new"  # fused or not, it is the same function but for rounding
    return "gelu"


def check_settings(source: Source, settings: Mapping[str, Any]) -> None:
    wrong = [
        f"{name} is {shown(settings[name])}"
        for name, plain in _PLAIN.items()
        if settings.get(name) not in (None, *plain)
    ]
    heads, groups = settings.get("num_attention_heads"), settings.get("num_query_groups")
    if groups not in (None, heads) and (settings.get("group_query_attention", True)):
        wrong.append(f"num_query_groups is {shown(groups)} for {shown(heads)} heads")
    if wrong:
        raise CheckpointError(f"{source.path} is no plain GPT, and what it is is not implemented: {'; '.join(wrong)}.")
    _check_ranks(source, settings)


def _check_ranks(source: Source, settings: Mapping[str, Any]) -> None:
    """All parts must be there: a rank's file alone, or one that is lost, would be half a model."""
    ranks = {rank_of(name)[:2] for name in source.container.tensors}
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
    return rules_of(source, config, parameter_shapes(config))


def rules_of(source: Source, config: ModelConfig, names: Iterable[str]) -> dict[str, Rule]:
    """Those of the parameters of these names."""
    version = version_of(source)
    without = _without_bias(source)
    return {
        name: NO_BIAS
        if name.endswith(without)
        else Rule((_file_name(name),), _transform(name, version, config.head_size))
        for name in names
    }


_QKV_BIAS, _LINEAR_BIASES = "attn.c_attn.bias", ("attn.c_proj.bias", "mlp.c_fc.bias", "mlp.c_proj.bias")


def _without_bias(source: Source) -> tuple[str, ...]:
    """The parameters, by the ends of their names, that a model was trained without."""
    settings = settings_of(source)
    said = settings.get("add_bias_linear", settings.get("bias"))
    if not isinstance(said, bool):
        modules = tuple(f"{MEGATRON_MODULES[name.removesuffix('.bias')]}.bias" for name in (_QKV_BIAS, *_LINEAR_BIASES))
        said = any(one.name.endswith(modules) for one in place(source))
    if said:
        return ()
    has_queries = settings.get("add_qkv_bias", settings.get("qkv_bias")) is True
    return _LINEAR_BIASES if has_queries else (_QKV_BIAS, *_LINEAR_BIASES)


def _transform(parameter: str, version: int, head_size: int) -> Transform:
    kind = parameter if parameter in _AXES else parameter.partition(".")[2].partition(".")[2]
    if kind.startswith("attn.c_attn."):
        return queries_keys_values(_ORDERS[version], head_size)
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
        raise CheckpointError(f"{source.path} has a vocabulary that is not valid JSON: give token ids.") from error
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
