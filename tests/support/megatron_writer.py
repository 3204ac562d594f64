"""Megatron-LM's and NeMo's checkpoints of the tiny model, cut for any number of GPUs, in the words of any version."""

import io
import tarfile
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from support.tables import rows
from support.tiny_checkpoint import CONFIG, Arrays
from support.torch_files import Call, Global, own_bytes

H = CONFIG["n_head"]


@dataclass(frozen=True)
class Form:
    """version: of the order of rows. layers, attention: what these are called. core: Megatron core's names, if any."""

    version: int = 3
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    heads: int = H
    layers: str = "language_model.encoder"
    attention: str = "self_attention"
    core: str = ""


def share_of(rows: np.ndarray, form: Form, rank: int) -> np.ndarray:
    """The GPU's own heads of (3 C, ...) rows, [q | k | v] x heads x head size, in the order of the version."""
    qkv = rows.reshape(3, form.heads, -1, *rows.shape[1:])
    own = np.array_split(qkv, form.tp, axis=1)[rank]
    if form.version > 0:
        own = np.moveaxis(own, 0, 2 if form.version == 1 else 1)  # h d 3, or h 3 d
    return own.reshape(-1, *rows.shape[1:])


def cut(array: np.ndarray, axis: int, form: Form, rank: int) -> np.ndarray:
    return np.ascontiguousarray(np.array_split(array, form.tp, axis=axis)[rank])


MODULES = dict(
    rows("""
ln_1        | input_layernorm
attn.c_attn | attention.query_key_value
attn.c_proj | attention.dense
ln_2        | post_attention_layernorm
mlp.c_fc    | mlp.dense_h_to_4h
mlp.c_proj  | mlp.dense_4h_to_h
""")
)
# Of (out, in): along which GPUs share a parameter.
AXES = {"attn.c_proj.weight": 1, "mlp.c_fc.weight": 0, "mlp.c_fc.bias": 0, "mlp.c_proj.weight": 1}


def layer_state(arrays: Arrays, i: int, form: Form, rank: int) -> Arrays:
    """By Megatron's names; matrices are (out, in)."""
    state = {}
    for name in (name for name in arrays if name.startswith(f"h.{i}.")):
        own = name.removeprefix(f"h.{i}.")
        module, _, kind = own.rpartition(".")
        array = arrays[name].T
        if module == "attn.c_attn":
            array = share_of(array, form, rank)
        elif own in AXES:
            array = cut(array, AXES[own], form, rank)
        if module in MODULES:  # and not an expert
            state[named(f"{MODULES[module]}.{kind}", form)] = np.ascontiguousarray(array)
    return state


CORE = {
    "attention.query_key_value.": "self_attention.linear_qkv.",
    "attention.dense.": "self_attention.linear_proj.",
    "mlp.dense_h_to_4h.": "mlp.linear_fc1.",
    "mlp.dense_4h_to_h.": "mlp.linear_fc2.",
}
# Of layer norms, by the two ways in which Megatron core builds layers.
NORMS = {
    "local": {"post_attention_layernorm.": "pre_mlp_layernorm."},
    "fused": {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "post_attention_layernorm.": "mlp.linear_fc1.layer_norm_",
    },
}


def named(name: str, form: Form) -> str:
    for before, core in {**CORE, **NORMS[form.core]}.items() if form.core else ():
        if name.startswith(before):
            return core + name.removeprefix(before)
    return name.replace("attention.", f"{form.attention}.", 1) if name.startswith("attention.") else name


def _layers(arrays: Arrays) -> int:
    return 1 + max(int(name.split(".")[1]) for name in arrays if name.startswith("h."))


def stage_state(arrays: Arrays, form: Form, rank: int, stage: int, part: int) -> Arrays:
    """Of one part of one stage on one GPU, by names without the wrappers of the whole."""
    layers = "decoder" if form.core else form.layers
    embedding = "embedding" if form.core else "language_model.embedding"
    count = _layers(arrays)
    local = count // (form.pp * form.vpp)
    first = local * (part * form.pp + stage)
    state = {}
    if first == 0:
        state[f"{embedding}.word_embeddings.weight"] = cut(arrays["wte.weight"], 0, form, rank)
        state[f"{embedding}.position_embeddings.weight"] = arrays["wpe.weight"]
    for i in range(local):
        for name, array in layer_state(arrays, first + i, form, rank).items():
            state[f"{layers}.layers.{i}.{name}"] = array
    if first + local == count:
        state |= {f"{layers}.final_layernorm.{kind}": arrays[f"ln_f.{kind}"] for kind in ("weight", "bias")}
        if form.pp > 1:
            head = "output_layer.weight" if form.core else "word_embeddings_for_head.weight"
            state[head] = cut(arrays["wte.weight"], 0, form, rank).copy()
    return state


def args(arrays: Arrays, form: Form, **settings: object) -> Namespace:
    """With objects of Megatron's own among them, and of NumPy's."""
    said = {
        "num_layers": _layers(arrays),
        "hidden_size": arrays["wpe.weight"].shape[1],
        "ffn_hidden_size": arrays["h.0.mlp.c_fc.weight"].shape[1],
        "max_position_embeddings": arrays["wpe.weight"].shape[0],
        "num_attention_heads": form.heads,
        "layernorm_epsilon": 1e-5,
        "tensor_model_parallel_size": form.tp,
        "pipeline_model_parallel_size": form.pp,
        "params_dtype": Global("torch float16"),
        "model_type": Call("megatron.core.enums ModelType", 1),
        "rng_state": Call("numpy.core.multiarray _reconstruct", Global("numpy ndarray"), (0,), "b"),
        "hostile": Call("os system", "touch witness"),
    }
    return Namespace(**said | settings)


def rank_file(arrays: Arrays, form: Form, rank: int = 0, stage: int = 0, **settings: object) -> dict:
    file = {"iteration": 7, "optimizer": {"step": 3}, "rng_state": [Global("os environ")]}
    file["args"] = args(arrays, form, **settings)
    if form.version:
        file["checkpoint_version"] = float(form.version)
    for part in range(form.vpp):
        file["model" + (str(part) if form.vpp > 1 else "")] = stage_state(arrays, form, rank, stage, part)
    return file


def megatron(folder: Path, arrays: Arrays, form: Form = Form(), **settings: object) -> Path:
    """With the folders that Megatron-LM makes around the files."""
    for rank in range(form.tp):
        for stage in range(form.pp):
            name = f"mp_rank_{rank:02}" + (f"_{stage:03}" if form.pp > 1 else "")
            place = folder / "iter_0000007" / name
            place.mkdir(parents=True)
            data = own_bytes(rank_file(arrays, form, rank, stage, **settings))
            (place / "model_optim_rng.pt").write_bytes(data)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


NEMO_CONFIG = """\
num_attention_heads: {heads}
layernorm_epsilon: 1e-5
num_layers: {layers}
hidden_size: {width}
ffn_hidden_size: {inner}
activation: gelu
normalization: layernorm
position_embedding_type: learned_absolute
max_position_embeddings: ${{.encoder_seq_length}}
tensor_model_parallel_size: {tp}
pipeline_model_parallel_size: {pp}
tokenizer:
  vocab_file: nemo:0123_vocab.json
  merge_file: nemo:0123_merges.txt
{more}
"""
VOCAB, MERGES = '{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}', "#version: 0.2\na b\n"


def nemo_members(arrays: Arrays, form: Form, prefix: str = "model.", more: str = "") -> dict[str, bytes]:
    sizes = {"width": arrays["wpe.weight"].shape[1], "inner": arrays["h.0.mlp.c_fc.weight"].shape[1]}
    settings = NEMO_CONFIG.format(
        heads=form.heads, layers=_layers(arrays), tp=form.tp, pp=form.pp, more=more, **sizes
    )
    members = {"./0123_vocab.json": VOCAB.encode(), "./0123_merges.txt": MERGES.encode()}
    members["./model_config.yaml"] = settings.encode()
    for rank in range(form.tp):
        for stage in range(form.pp):
            where = f"tp_rank_{rank:02}_pp_rank_{stage:03}/" if form.pp > 1 else f"mp_rank_{rank:02}/"
            state = stage_state(arrays, form, rank, stage, 0)
            data = own_bytes({prefix + name: array for name, array in state.items()})
            members[f"./{where if form.tp * form.pp > 1 else ''}model_weights.ckpt"] = data
    return members


def tar_bytes(members: Mapping[str, bytes], mode: str = "w:") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def nemo(folder: Path, arrays: Arrays, form: Form = Form(), **options: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "x.nemo").write_bytes(tar_bytes(nemo_members(arrays, form, **options)))
    return folder / "x.nemo"
