"""What Megatron's training was told, which its files keep, and the configuration by that and by shapes of tensors."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from tinygpt.weights.config import ModelConfig
from tinygpt.weights.containers.pickles.pickle_reader import fields_of
from tinygpt.weights.containers.ranks.nemo_archive import NEMO_CONFIG, members_of
from tinygpt.weights.containers.ranks.rank_files import metadata_by_rank
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.families.config_fields import checked_config
from tinygpt.weights.families.facts import Shapes, ends_of, from_config_json, need_heads
from tinygpt.weights.families.family import Placed, Source
from tinygpt.weights.families.megatron.names import TOP, parts_of, rank_of
from tinygpt.weights.messages import shown
from tinygpt.weights.parameters import EMBEDDING, POSITIONS
from tinygpt.weights.yaml_text import read_yaml_object

# How each version orders the rows of one GPU: its heads, their size, and queries, keys and values.
ROW_ORDERS = {0: "3hd", 1: "hd3", 2: "h3d", 3: "h3d"}
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
    if type(version) not in (int, float) or version not in ROW_ORDERS:
        raise CheckpointError(f"{source.path} is of checkpoint_version {shown(version)}, which is not implemented.")
    return int(version)


def config_of(
    source: Source,
    settings: Mapping[str, Any],
    tensors: Iterable[Placed],
    inner: str = "layers.0.mlp.dense_h_to_4h.weight",
    structure: Mapping[str, Any] = MappingProxyType({}),
) -> ModelConfig:
    """The configuration by the shapes of tensors. inner: the one that shows how wide an MLP is."""
    shapes = Shapes(source, tensors)
    n, V = parts_of(source), shapes.size(TOP[EMBEDDING], 0)
    C = shapes.size(TOP[EMBEDDING], 1)
    values = {
        **ends_of(V * n),
        "n_head": 16 if not settings and C == 1024 else None,  # the one model that was published without them
        "activation_function": activation_of(settings),
        **from_config_json(source),
        "vocab_size": V * n,
        "n_embd": C,
        "n_positions": shapes.size(TOP[POSITIONS], 0),
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
    if groups not in (None, heads) and settings.get("group_query_attention", True):
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
