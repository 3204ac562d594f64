"""Megatron's names of tensors, old and new, and the places in a whole model of what each rank has.

What the layers are called has changed over the years, and so has what their attention is called.
"""

import re
from collections.abc import Iterable

from tinygpt.weights.containers.ranks.rank_files import RANK
from tinygpt.weights.families.family import Placed, Source
from tinygpt.weights.families.parameter_names import name_in_tables
from tinygpt.weights.parameters import EMBEDDING, HEAD, POSITIONS

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
# The names that tables go by: of a layer's modules, and of what is in no layer.
MODULES = {
    "ln_1": "input_layernorm",
    "attn.c_attn": "attention.query_key_value",
    "attn.c_proj": "attention.dense",
    "ln_2": "post_attention_layernorm",
    "mlp.c_fc": "mlp.dense_h_to_4h",
    "mlp.c_proj": "mlp.dense_4h_to_h",
}
TOP = {EMBEDDING: "embedding.word_embeddings.weight", POSITIONS: "embedding.position_embeddings.weight"}
TOP |= {HEAD: "output_layer.weight", "ln_f.weight": "final_layernorm.weight", "ln_f.bias": "final_layernorm.bias"}


def has_names(source: Source) -> bool:
    return any(name.endswith("word_embeddings.weight") and "embedding." in name for name in source.container.tensors)


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


def megatron_name(parameter: str) -> str:
    """What the tables call a parameter: h.3.mlp.c_fc.weight is layers.3.mlp.dense_h_to_4h.weight."""
    return name_in_tables(parameter, TOP, "layers", MODULES)
