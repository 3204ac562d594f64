"""A small GPT with experts, as DeepSpeed and FasterTransformer write it: parameters, and files for some GPUs."""

from pathlib import Path

import numpy as np

from support.foreign import fastertransformer
from support.golden_models import filled, golden_array
from support.megatron_writer import Form, args, cut, stage_state
from support.tiny_checkpoint import Arrays, shapes_of
from support.torch_files import own_bytes

V = 64
T = 32
C = 24
H = 4
F = 40
L = 4
E = 5
EXPERT_LAYERS = (1, 3)
MLP = ("c_fc.weight", "c_fc.bias", "c_proj.weight", "c_proj.bias")
FT_MLP = ("dense_h_to_4h.weight", "dense_h_to_4h.bias", "dense_4h_to_h.weight", "dense_4h_to_h.bias")
PREFIX = "mlp.deepspeed_moe."


def moe_arrays(num_experts: int = E, expert_layers: tuple[int, ...] = EXPERT_LAYERS) -> Arrays:
    """By the engine's names; matrices of layers are (in, out)."""
    shapes = shapes_of(C, F, L, V, T)
    for i in expert_layers:
        shapes[f"h.{i}.mlp.gate.weight"] = (num_experts, C)
        for name in MLP:
            shape = shapes.pop(f"h.{i}.mlp.{name}")
            shapes |= {f"h.{i}.mlp.experts.{e}.{name}": shape for e in range(num_experts)}
    scales = {name: 1 if "gate" in name else 3 / np.sqrt(shape[0]) for name, shape in shapes.items()}
    arrays = {
        name: filled(name, golden_array(f"moe {name}", shape), scales[name]) for name, shape in shapes.items()
    }
    unused = (name for name in arrays if ".experts." in name and name.endswith("c_proj.bias"))
    return arrays | {name: np.zeros(C, np.float32) for name in unused}


def write_moe(
    folder: Path, arrays: Arrays, tp: int = 1, in_folders: bool = False, **settings: object
) -> Path:
    """settings: over the training's own arguments, such as topk."""
    form = Form(tp=tp, heads=H)
    layers = _expert_layers(arrays)
    folder.mkdir(parents=True, exist_ok=True)
    dense = dict(arrays)
    for i in layers:
        dense |= {f"h.{i}.mlp.{name}": arrays[f"h.{i}.mlp.experts.0.{name}"] for name in MLP}
    for rank in range(tp):
        state = stage_state(dense, form, rank, 0, 0)
        for i in layers:
            place = f"language_model.encoder.layers.{i}."
            for name in [name for name in state if name.startswith(f"{place}mlp.")]:
                del state[name]
            state[f"{place}{PREFIX}gate.wg.weight"] = arrays[f"h.{i}.mlp.gate.weight"]
        file = {"module": state, "checkpoint_version": 3.0}
        file["args"] = args(dense, form, num_experts=[_count(arrays)], **settings)
        name = f"mp_rank_{rank:02}/model_states.pt" if in_folders else f"mp_rank_{rank:02}_model_states.pt"
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(own_bytes({**file, "optimizer": None, "global_steps": 9}))
        for m, i in enumerate(layers):
            for e in range(_count(arrays)):
                data = own_bytes(_expert(arrays, i, e, form, rank))
                (folder / f"layer_{m}_expert_{e}_mp_rank_{rank:02}_model_states.pt").write_bytes(data)
    return folder


def ft_moe(folder: Path, arrays: Arrays, gpus: int = 1, **settings: object) -> Path:
    """As megatron_gpt_moe_ckpt_convert.py of FasterTransformer: experts are stacked, before GPUs share them."""
    layers = _expert_layers(arrays)
    said = {"head_num": H, "size_per_head": C // H, "num_layer": L, "max_pos_seq_len": T, "vocab_size": V}
    said |= {"gpt_with_moe": 1, "expert_num": _count(arrays), "moe_layers": layers, "inter_size": F}
    fastertransformer(
        folder,
        {n: a for n, a in arrays.items() if ".mlp.g" not in n and ".experts." not in n},
        gpus,
        **said | settings,
    )
    for i in layers:
        stem = f"model.layers.{i}.mlp.moe."
        arrays[f"h.{i}.mlp.gate.weight"].T.tofile(folder / f"{stem}gate.wg.weight.bin")
        for name, theirs, axis in zip(MLP, FT_MLP, (2, 1, 1, None), strict=True):
            stack = np.stack([arrays[f"h.{i}.mlp.experts.{e}.{name}"] for e in range(_count(arrays))])
            parts = [stack] if axis is None else np.split(stack, gpus, axis)
            for gpu, part in enumerate(parts):
                end = "" if axis is None else f".{gpu}"
                part.tofile(folder / f"{stem}experts.{theirs}{end}.bin")
    return folder


def _expert(arrays: Arrays, i: int, e: int, form: Form, rank: int) -> Arrays:
    own = {name: arrays[f"h.{i}.mlp.experts.{e}.{name}"] for name in MLP}
    stem = f"language_model.encoder.layers.{i}.{PREFIX}experts.deepspeed_experts.{e}."
    return {
        f"{stem}dense_h_to_4h.weight": cut(own["c_fc.weight"].T, 0, form, rank),
        f"{stem}dense_h_to_4h.bias": cut(own["c_fc.bias"], 0, form, rank),
        f"{stem}dense_4h_to_h.weight": cut(own["c_proj.weight"].T, 1, form, rank),
        f"{stem}dense_4h_to_h.bias": own["c_proj.bias"],
    }


def _expert_layers(arrays: Arrays) -> list[int]:
    return sorted(int(name.split(".")[1]) for name in arrays if name.endswith("gate.weight"))


def _count(arrays: Arrays) -> int:
    return next(len(array) for name, array in arrays.items() if name.endswith("gate.weight"))
