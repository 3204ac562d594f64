"""The tiny checkpoint as other programs would have written it: a writer for each family and container.

Each is given the parameters in Hugging Face's names and layout, writes them into a folder, and returns what to open.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np

from support import gguf_writer, onnx_writer
from support.megatron_writer import AXES, MODULES, megatron, nemo
from support.tables import rows
from support.tf_writer import write_bundle
from support.tiny_checkpoint import CONFIG, Arrays, write_checkpoint, write_json
from support.torch_files import Call, Global, own_bytes

MATRICES = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
MODEL_ARGS = {name: CONFIG[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
MODEL_ARGS |= {"block_size": CONFIG["n_positions"], "dropout": 0.0}


def linear(arrays: Arrays) -> Arrays:
    """Matrices of layers as torch's Linear has them, (out, in)."""
    return {name: np.ascontiguousarray(a.T) if name.endswith(MATRICES) else a for name, a in arrays.items()}


def hugging_face(folder: Path, arrays: Arrays) -> Path:
    return write_checkpoint(folder, {f"transformer.{name}": array for name, array in arrays.items()})


def nanogpt_state(arrays: Arrays, prefix: str = "", **arguments: object) -> dict:
    """A training checkpoint: the optimizer's state lies beside the model, and random generators' objects."""
    model = {f"{prefix}transformer.{name}": array for name, array in linear(arrays).items()}
    model[f"{prefix}lm_head.weight"] = model[f"{prefix}transformer.wte.weight"]
    model[f"{prefix}transformer.h.0.attn.bias"] = np.ones((1, 1, 6, 6), np.float32)
    return {
        "model": model,
        "optimizer": {"state": {0: {"step": np.array(3, np.float32), "exp_avg": arrays["wte.weight"] + 1}}},
        "model_args": {**MODEL_ARGS, "bias": True, **arguments},
        "iter_num": 5,
        "best_val_loss": np.array(1.5, np.float32),
        "config": {
            "dataset": "shakespeare_char",
            "dtype": "float16",
            "rng": Call("numpy.random __RandomState_ctor"),
        },
        "device": Global("torch float16"),
    }


def nanogpt(folder: Path, arrays: Arrays, save: Callable = own_bytes, name: str = "ckpt.pt") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(save(nanogpt_state(arrays)))
    return folder / name


def nanogpt_legacy(folder: Path, arrays: Arrays) -> Path:
    return nanogpt(folder, arrays, partial(own_bytes, is_legacy=True)).parent


def mingpt(folder: Path, arrays: Arrays) -> Path:
    folder.mkdir(exist_ok=True)
    state = {f"transformer.{name}": array for name, array in linear(arrays).items()}
    state |= {
        "lm_head.weight": arrays["wte.weight"].copy(),
        "transformer.h.1.attn.bias": np.ones((1, 1, 6, 6), "f4"),
    }
    (folder / "model.pt").write_bytes(own_bytes(state))
    write_json(folder / "config.json", {"system": {"seed": 1}, "model": {"model_type": None, "n_head": 2}})
    return folder


GGUF_NAMES = dict(
    rows("""
wte         | token_embd
wpe         | position_embd
ln_f        | output_norm
lm_head     | output
attn.c_attn | attn_qkv
attn.c_proj | attn_output
ln_1        | attn_norm
mlp.c_fc    | ffn_up
mlp.c_proj  | ffn_down
ln_2        | ffn_norm
""")
)
GGUF_KEYS = {
    "general.architecture": (8, "gpt2"),
    "gpt2.block_count": (4, CONFIG["n_layer"]),
    "gpt2.context_length": (4, CONFIG["n_positions"]),
    "gpt2.embedding_length": (4, CONFIG["n_embd"]),
    "gpt2.feed_forward_length": (4, CONFIG["n_inner"]),
    "gpt2.attention.head_count": (4, CONFIG["n_head"]),
    "gpt2.attention.layer_norm_epsilon": (6, 1e-5),
}


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in GGUF_NAMES:
        return f"{GGUF_NAMES[module]}.{kind}"
    _, layer, rest = module.split(".", 2)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"


def gguf(folder: Path, arrays: Arrays, **keys: tuple) -> Path:
    folder.mkdir(exist_ok=True)
    tensors = {gguf_name(name): gguf_writer.plain(array) for name, array in linear(arrays).items()}
    (folder / "model.gguf").write_bytes(gguf_writer.gguf_bytes(GGUF_KEYS | keys, tensors))
    return folder


def tf_arrays(arrays: Arrays) -> Arrays:
    """By the names of OpenAI's variables; matrices are (1, in, out)."""
    renamed = {}
    for name, array in arrays.items():
        module, _, kind = name.replace("h.", "h", 1).rpartition(".")
        end = {"weight": "/g" if "ln_" in name else "/w", "bias": "/b"}[kind]
        path = f"model/{module.replace('.', '/')}{'' if module in ('wte', 'wpe') else end}"
        renamed[path] = array[None] if name.endswith(MATRICES) else array
    return renamed


def openai_tf(folder: Path, arrays: Arrays, **hparams: object) -> Path:
    folder.mkdir(exist_ok=True)
    sizes = {name: CONFIG[name] for name in ("n_embd", "n_head", "n_layer")}
    sizes |= {"n_vocab": CONFIG["vocab_size"], "n_ctx": CONFIG["n_positions"]}
    write_json(folder / "hparams.json", sizes | hparams)
    write_bundle(folder / "model.ckpt", tf_arrays(arrays))
    return folder


def ft_files(arrays: Arrays, gpus: int = 1) -> Arrays:
    """By the names of FasterTransformer's files; every matrix is (in, out)."""
    top = {"wte.weight": "wte", "wpe.weight": "wpe", "ln_f.weight": "final_layernorm.weight"}
    top |= {f"ln_e.{kind}": f"pre_decoder_layernorm.{kind}" for kind in ("weight", "bias")}
    top |= {"ln_f.bias": "final_layernorm.bias", "lm_head.weight": "lm_head.weight"}
    files = {}
    for name, array in arrays.items():
        if name in top:
            files[f"model.{top[name]}.bin"] = array
            continue
        _, layer, rest = name.split(".", 2)
        module, kind = rest.rsplit(".", 1)
        stem = f"model.layers.{layer}.{MODULES[module]}.{kind}"
        if module == "attn.c_attn":
            parts = np.array_split(array.reshape(*array.shape[:-1], 3, -1), gpus, axis=-1)
        elif rest in AXES:
            parts = np.array_split(array, gpus, axis=array.ndim - 1 - AXES[rest])
        else:
            files[f"{stem}.bin"] = array
            continue
        files |= {f"{stem}.{gpu}.bin": np.ascontiguousarray(part) for gpu, part in enumerate(parts)}
    return files


# inter_size is not true of this model, and of many that it was written for.
FT_SETTINGS = """
model_name                 gpt
head_num                   2
size_per_head              4
inter_size                 32
num_layer                  2
max_pos_seq_len            6
vocab_size                 11
layernorm_eps              1e-5
layernorm_type             pre_layernorm
activation_type            Gelu
has_positional_encoding    1
has_post_decoder_layernorm True
weight_data_type           fp32
tensor_para_size           1
start_id                   1
end_id                     2
"""


def ft_config(**settings: object) -> str:
    values = dict(line.split() for line in FT_SETTINGS.strip().splitlines()) | settings
    return "\n".join(["[gpt]", *(f"{name} = {value}" for name, value in values.items())])


def fastertransformer(folder: Path, arrays: Arrays, gpus: int = 1, **settings: object) -> Path:
    folder.mkdir(exist_ok=True)
    for name, array in ft_files(arrays, gpus).items():
        (folder / name).write_bytes(array.tobytes())
    (folder / "config.ini").write_text(ft_config(tensor_para_size=gpus, **settings))
    return folder


def onnx_tensors(arrays: Arrays, prefix: str = "transformer.", head: str = "onnx::MatMul_523") -> Arrays:
    """As torch exports them: a tied head is a copy without a name, transposed."""
    tensors = {prefix + name: array for name, array in arrays.items() if name != "lm_head.weight"}
    return tensors | {head: np.ascontiguousarray(arrays.get("lm_head.weight", arrays["wte.weight"]).T)}


def onnx_nodes(names: Iterable[str], activation: str = "Tanh", **attributes: object) -> list:
    """Some of what would compute with the tensors."""
    nodes = [onnx_writer.node("LayerNormalization", ["x", "w", "b"], ["n"], epsilon=1e-5)]
    for name in names:
        is_head = "MatMul" in name or name.endswith("lm_head.weight")
        if name.endswith(MATRICES) or is_head:
            kind = "MatMul" if is_head else "Gemm"
            nodes.append(
                onnx_writer.node(kind, ["x", name], [f"{name} product"], **({} if is_head else attributes))
            )
    return [*nodes, onnx_writer.node(activation, ["x"], ["y"])]


PAST = {"input_ids": ("batch", "length"), "past_key_values.0.key": ("batch", CONFIG["n_head"], "past", 4)}


def onnx(folder: Path, arrays: Arrays) -> Path:
    written = [onnx_writer.tensor(name, array) for name, array in onnx_tensors(arrays).items()]
    written.append(onnx_writer.tensor("/transformer/Constant_1_output_0", np.array(0.5, np.float32)))
    return _write_onnx(folder, "decoder_model.onnx", arrays, written)


def onnx_external(folder: Path, arrays: Arrays) -> Path:
    written, data = [], b""
    for name, array in onnx_tensors(arrays).items():
        place = {"location": "model.onnx_data", "offset": len(data), "length": array.nbytes}
        written.append(onnx_writer.tensor(name, array, "external", **place))
        data += array.tobytes()
    _write_onnx(folder, "model.onnx", arrays, written)
    (folder / "model.onnx_data").write_bytes(data)
    return folder


def _write_onnx(folder: Path, name: str, arrays: Arrays, written: list) -> Path:
    folder.mkdir(exist_ok=True)
    graph = onnx_writer.graph(onnx_nodes(onnx_tensors(arrays)), written, PAST)
    (folder / name).write_bytes(onnx_writer.model(graph))
    return folder


_WRITERS: tuple[Callable[[Path, Arrays], Path], ...] = (
    hugging_face,
    nanogpt,
    nanogpt_legacy,
    mingpt,
    gguf,
    openai_tf,
    megatron,
    nemo,
    fastertransformer,
    onnx,
    onnx_external,
)
WRITERS = {writer.__name__: writer for writer in _WRITERS}
