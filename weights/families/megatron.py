"""GPT as Megatron-LM and DeepSpeed train it, in any version, on any number of GPUs, and as NeMo packs it.

Over the years, names of layers, names of their attention, and the order of the rows of queries, keys and values
(`checkpoint_version`, which the first files lack) have changed independently.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..config import EMBEDDING, POSITIONS, ModelConfig, parameter_shapes
from ..containers.ranks import NEMO_CONFIG, RANK, number_of
from ..containers.torch import fields_of
from ..errors import listed, shown, truth_of
from ..files import StoredTokenizer, read_json, read_yaml_object
from .family import (
    NO_BIAS,
    NONE,
    Family,
    NamedTensor,
    Names,
    Shapes,
    Source,
    TensorRule,
    as_is,
    num_parts,
    qkv_by_heads,
    split_name,
)
from .gpt2 import BESIDE
from .settings import config_of_parts

_MODEL = re.compile(r"(?:state_dict\.)?mod(?:el|ule)(\d*)\.(?:module\.)?(?:language_model\.)?")
_LAYERS = r"(?:encoder|transformer|decoder)\."
_LAYER = re.compile(rf"{_LAYERS}layers\.(\d{{1,6}})\.(.+)")
# Megatron core's names, and the older names of the same modules.
_CORE = {
    "linear_qkv.layer_norm_": "input_layernorm.",
    "linear_qkv.": "attention.query_key_value.",
    "linear_proj.": "attention.dense.",
    "pre_mlp_layernorm.": "post_attention_layernorm.",
    "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
}
ATTENTION = ("input_layernorm", "attention.query_key_value", "attention.dense")
MLP = ("post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_TOP = {"wte": "embedding.word_embeddings", "wpe": "embedding.position_embeddings", "lm_head": "output_layer"}
NAMES = Names("layers", {**_TOP, "ln_f": "final_layernorm"}, ATTENTION + MLP)


def has_names(source: Source) -> bool:
    return any(
        name.endswith("word_embeddings.weight") and "embedding." in name for name in source.container.tensors
    )


def rank_of(name: str) -> tuple[int, int, str]:
    """Return a tensor's tensor and pipeline parallel rank, and its name in that rank's file."""
    folder, slash, rest = name.partition("/")
    rank = RANK.fullmatch(folder) if slash else None
    if rank is None:
        return 0, 0, name
    tensor, pipeline = (rank[1], rank[2]) if rank[1] else (rank[3], rank[4])
    return int(tensor), int(pipeline or 0), rest


def named(source: Source) -> Iterable[NamedTensor]:
    """Number layers in the whole model: files do so in a stage of the pipeline, or a part of a virtual stage."""
    by_rank = [(*rank_of(name), name, tensor) for name, tensor in source.container.tensors.items()]
    stages = 1 + max((pipeline for _, pipeline, *_ in by_rank), default=0)
    layers = (_LAYER.match(_MODEL.sub("", name, count=1)) for _, _, name, *_ in by_rank)
    local = 1 + max((int(layer[1]) for layer in layers if layer), default=-1)
    for rank, pipeline, name, file_name, tensor in by_rank:
        model = _MODEL.match(name)
        # `model1` is the second of the parts that alternate on a GPU.
        virtual = int(model[1] or 0) if model else 0
        yield NamedTensor(name_of(name, (virtual * stages + pipeline) * local), file_name, tensor, rank)


def name_of(name: str, first: int) -> str:
    """Return the name in the tables. first: the number of the file's first layer in the whole model."""
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


# The order of one GPU's rows by checkpoint_version: h heads, head size d, and 3 matrices.
_ROW_ORDERS = {0: "3hd", 1: "hd3", 2: "h3d", 3: "h3d"}
# Settings that change the arithmetic, and their allowed values.
_NEVER = (
    "swiglu",
    "squared_relu",
    "gated_linear_unit",
    "qk_layernorm",
    "multi_query_attention",
    "apply_residual_connection_post_layernorm",
    "use_rotary_position_embeddings",
    "apply_layernorm_1p",  # its weights are less by 1
)
_ALLOWED: dict[str, tuple] = {
    **dict.fromkeys(_NEVER, (False,)),
    **dict.fromkeys(("num_experts", "expert_num"), (0,)),
    "normalize_attention_scores": (True,),
    "transformer_block_type": ("pre_ln",),
    "normalization": ("LayerNorm", "layernorm"),
    "position_embedding_type": ("learned_absolute", "learned"),
    "activation": ("gelu",),
}
_SIZES = {
    "num_attention_heads": "n_head",
    "layernorm_epsilon": "layer_norm_epsilon",
    "norm_epsilon": "layer_norm_epsilon",
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "ffn_hidden_size": "n_inner",
    "max_position_embeddings": "n_positions",
}


def settings_of(source: Source) -> dict[str, Any]:
    members = source.container.archive_members
    if members:
        return read_yaml_object(f"{source.path}: {NEMO_CONFIG}", members[NEMO_CONFIG].text())
    return fields_of(_first_rank(source).get("args"))


def _first_rank(source: Source) -> Mapping[str, Any]:
    ranks = source.container.rank_metadata or {"": source.container.metadata}
    return ranks[min(ranks)]


def _version_of(source: Source) -> int:
    """Return checkpoint_version; without one, the last for Megatron core and NeMo, or the first."""
    is_new = source.container.archive_members or any(
        ".linear_qkv." in name for name in source.container.tensors
    )
    version = _first_rank(source).get("checkpoint_version", 3 if is_new else 0)
    if type(version) not in (int, float) or version not in _ROW_ORDERS:
        raise source.error(f"is of checkpoint_version {shown(version)}, which is not implemented.")
    return int(version)


def config_of(
    source: Source,
    settings: Mapping[str, Any],
    tensors: Iterable[NamedTensor],
    inner: str = "layers.0.mlp.dense_h_to_4h.weight",
    structure: Mapping[str, Any] = NONE,
) -> ModelConfig:
    """inner: the tensor that shows an MLP's width."""
    tensors = list(tensors)
    n = num_parts(tensors)
    seen = Shapes(source, tensors).sizes(NAMES.of(EMBEDDING), NAMES.of(POSITIONS), (inner, 0), r"layers\.")
    seen = {name: size * n if name in ("vocab_size", "n_inner") else size for name, size in seen.items()}
    seen["tie_word_embeddings"] = not truth_of(settings.get("untie_embeddings_and_output_weights"))
    # Settings win over shapes, so that lost layers are missed. "${" begins NeMo's reference to another setting.
    said = {
        ours: number_of(value)
        for theirs, ours in _SIZES.items()
        if (value := settings.get(theirs)) is not None
        and not (isinstance(value, str) and value.startswith("${"))
    }
    # The one model that was published without settings has 16 heads.
    heads = 16 if not settings and seen["n_embd"] == 1024 else None
    guessed = {"n_head": heads, "activation_function": _activation_of(settings)}
    config = config_of_parts(source, "its settings", guessed, seen, said, structure)
    if config.n_head % n:
        raise source.error(f"has {config.n_head} heads on {n} GPUs: its ranks are not of one model.")
    return config


def _activation_of(settings: Mapping[str, Any]) -> str:
    fused = settings.get("bias_gelu_fusion", settings.get("bias_activation_fusion", True))
    is_openais = truth_of(settings.get("openai_gelu"))
    is_tanh = is_openais or (truth_of(fused) and not truth_of(settings.get("onnx_safe")))
    if not settings or is_tanh:
        return "gelu_new"  # fused or not, it is the same function but for rounding
    return "gelu"


def check_settings(source: Source, settings: Mapping[str, Any]) -> None:
    wrong = [
        f"{name} is {shown(settings[name])}"
        for name, allowed in _ALLOWED.items()
        if settings.get(name) not in (None, *allowed)
    ]
    heads = settings.get("num_attention_heads")
    groups = settings.get("num_query_groups")
    if groups not in (None, heads) and settings.get("group_query_attention", True):
        wrong.append(f"num_query_groups is {shown(groups)} for {shown(heads)} heads")
    if wrong:
        raise source.error(f"is no plain GPT, and its kind is not implemented: {'; '.join(wrong)}.")
    ranks = {rank_of(name)[:2] for name in source.container.tensors}
    tp, pp = (
        settings[name] if isinstance(settings.get(name), int) else 1 + max(rank[axis] for rank in ranks)
        for axis, name in enumerate(("tensor_model_parallel_size", "pipeline_model_parallel_size"))
    )
    if len(ranks) != tp * pp or any(t >= tp or p >= pp for t, p in ranks):
        raise source.error(
            f"holds {len(ranks)} of {tp} x {pp} ranks (tensor x pipeline): give the whole folder."
        )


# The axis of the parameter along which GPUs have shared it.
_AXES = {
    "wte.weight": 0,
    "lm_head.weight": 0,
    "attn.c_proj.weight": 1,
    "mlp.c_proj.weight": 1,
    "mlp.c_fc.weight": 0,
    "mlp.c_fc.bias": 0,
}
_QKV_BIAS = "attn.c_attn.bias"
_LINEAR_BIASES = ("attn.c_proj.bias", "mlp.c_fc.bias", "mlp.c_proj.bias")
_GATE = "mlp.deepspeed_moe.gate.wg.weight"
EXPERT = re.compile(r"experts\.\d+\.")


def _config(source: Source) -> ModelConfig:
    settings = settings_of(source)
    check_settings(source, settings)
    return config_of(source, settings, named(source))


def _rules(source: Source, config: ModelConfig) -> dict[str, TensorRule]:
    version = _version_of(source)
    without = _without_bias(source)
    return {
        name: NO_BIAS if name.endswith(without) else _rule(name, version, config.head_size)
        for name in parameter_shapes(config)
    }


def _rule(parameter: str, version: int, head_size: int) -> TensorRule:
    layer, module, kind = split_name(parameter)
    if module == "mlp.gate":
        return TensorRule((f"layers.{layer}.{_GATE}",))
    expert = "".join(EXPERT.findall(module))
    module = module.replace(expert, "")
    if expert and (module, kind) == ("mlp.c_proj", "bias"):
        return NO_BIAS
    name = NAMES.of(parameter.replace(expert, "")).replace("mlp.", f"mlp.{expert}")
    if module == "attn.c_attn":
        return TensorRule((name,), qkv_by_heads(_ROW_ORDERS[version], head_size))
    return TensorRule((name,), as_is(_AXES.get(f"{module}.{kind}")))


def _without_bias(source: Source) -> tuple[str, ...]:
    settings = settings_of(source)
    has_biases = settings.get("add_bias_linear", settings.get("bias"))
    if not isinstance(has_biases, bool):
        biases = tuple(f"{NAMES.in_layer[i]}.bias" for i in (1, 2, 4, 5))
        has_biases = any(one.name.endswith(biases) for one in named(source))
    if has_biases:
        return ()
    has_queries = settings.get("add_qkv_bias", settings.get("qkv_bias")) is True
    return _LINEAR_BIASES if has_queries else (_QKV_BIAS, *_LINEAR_BIASES)


def _quirks(source: Source, config: ModelConfig) -> list[str]:
    quirks = [f"checkpoint_version {_version_of(source)}: queries, keys and values brought into one order"]
    if not settings_of(source):
        quirks.append(
            f"{config.n_head} heads and {config.activation_function}, as the files have no settings"
        )
    return quirks


def _tokenizer(source: Source) -> StoredTokenizer | None:
    members = source.container.archive_members
    names = fields_of(settings_of(source).get("tokenizer")) if members else {}
    vocab, merges = (
        members.get(str(names.get(name) or "").removeprefix("nemo:")) for name in ("vocab_file", "merge_file")
    )
    if vocab is None or merges is None:
        return None
    try:
        ids = read_json(vocab.text())
    except ValueError as error:
        raise source.error(
            "has a vocabulary that is not valid JSON: download it again, or give token ids."
        ) from error
    vocab = ids if isinstance(ids, dict) else {}
    lines = merges.text().removesuffix("\n").split("\n")
    end = "<|endoftext|>"
    added_tokens = {end: True} if type(vocab.get(end)) is int else {}
    return StoredTokenizer("gpt-2", vocab, lines[lines[0].startswith("#version") :], added_tokens)


FAMILY = Family(
    name="Megatron-LM GPT",
    described_by="its settings",
    detect=has_names,
    config=_config,
    rules=_rules,
    named=named,
    ignored=(f"{BESIDE}.*", ".*_extra_state"),
    quirks=_quirks,
    tokenizer=_tokenizer,
    advice="Parts that differ where each has the whole are ranks of two iterations, or have drifted apart in training.",
)


# Models with experts: Megatron's names, and a file for each expert.
# Training may leave out tokens that an expert has no room for. Inference never does: no text depends on its batch.

_IN_GATE = re.compile(rf"layers\.(\d{{1,6}})\.{re.escape(_GATE)}")
_IN_FILE = re.compile(
    r"layers\.(\d{1,6})\.mlp\.deepspeed_moe\.experts\.deepspeed_experts\.(\d{1,6})\.(dense_\w+)\.(weight|bias)"
)
# DeepSpeed never adds this part of an expert's output, in training or after it.
_UNUSED_BIAS = r"layers\.\d+\.mlp\.experts\.\d+\.dense_4h_to_h\.bias"
# Settings of experts, which check_settings would refuse.
_SETTINGS = ("num_experts", "expert_num", "topk", "mlp_type")


def _named_with_experts(source: Source) -> Iterable[NamedTensor]:
    for file_name, tensor in source.container.tensors.items():
        part, _, name = rank_of(file_name)
        if expert_tensor := _IN_FILE.search(name):
            layer, expert, module, kind = expert_tensor.groups()
            yield NamedTensor(f"layers.{layer}.mlp.experts.{expert}.{module}.{kind}", file_name, tensor, part)
        else:
            yield NamedTensor(name_of(name, 0), file_name, tensor, part)


def _config_of_experts(source: Source) -> ModelConfig:
    settings = settings_of(source)
    check_settings(source, {name: value for name, value in settings.items() if name not in _SETTINGS})
    tensors = list(_named_with_experts(source))
    stages = {rank_of(name)[1] for name in source.container.tensors}
    if len(stages) > 1:
        raise source.error(f"is in {len(stages)} stages of a pipeline, which is not implemented for experts.")
    if settings.get("mlp_type") == "residual" or any(".mlp.coefficient." in one.name for one in tensors):
        raise source.error("has an MLP beside its experts (mlp_type residual), which is not implemented.")
    gates = {int(gate[1]): one.tensor.shape for one in tensors if (gate := _IN_GATE.fullmatch(one.name))}
    numbers = {shape[0] for shape in gates.values() if len(shape) == 2}
    if len(numbers) != 1:
        raise source.error(
            f"has layers of {listed(sorted(map(str, numbers)))} experts: it must be one number."
        )
    (num_experts,) = numbers
    per_token = settings.get("topk", 1)
    # The list of missing tensors has to be in proportion to the files.
    num_tensors = sum(".mlp.experts." in one.name for one in tensors)
    wanted = num_experts * len(gates)
    if num_tensors < wanted:
        raise source.error(
            f"has gates for {wanted} experts and {num_tensors} tensors of experts: give the whole folder."
        )
    if type(per_token) is not int or not 1 <= per_token <= num_experts:
        raise source.error(f"has topk {shown(per_token)} of {num_experts} experts.")
    structure = {
        "expert_layers": tuple(sorted(gates)),
        "num_experts": num_experts,
        "experts_per_token": per_token,
        "norm_topk_prob": per_token > 1,
    }
    inner = f"layers.{min(gates)}.mlp.experts.0.dense_h_to_4h.weight"
    return config_of(source, settings, tensors, inner, structure)


WITH_EXPERTS = replace(
    FAMILY,
    name="Megatron-LM GPT with experts",
    detect=lambda source: any(".deepspeed_moe." in name for name in source.container.tensors),
    config=_config_of_experts,
    named=_named_with_experts,
    ignored=(*FAMILY.ignored, _UNUSED_BIAS),
    quirks=lambda source, config: (
        f"each token has {config.experts_per_token} of {config.num_experts} experts, and none is left out",
        "biases of experts' outputs are left out, as in training",
    ),
)
