"""Small GPT-2 checkpoints and PEFT adapters that NumPy alone writes, to the same bits everywhere."""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from support.paths import EOS, VOCAB_SIZE
from support.tables import rows
from support.tiny_checkpoint import Arrays, copy_tokenizer, shapes_of, write_checkpoint

# By name, fields of config.json over SMALL: each activation, each switch of attention, widths of all kinds.
PROMPT = [7, 3, 9, 3, 9, 11]  # says something again
NARROW = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 64}
SMALL = {"n_embd": 36, "n_head": 3, "n_layer": 2, "vocab_size": 71, "n_positions": 40, "n_inner": None}
GOLDEN_MODELS = dict(
    rows("""
plain           | {}
head-size-1     | {"n_embd": 6, "n_head": 6}
head-size-7     | {"n_embd": 21}
head-size-64    | {"n_embd": 64, "n_head": 1, "n_layer": 1}
odd-width       | {"n_embd": 17, "n_head": 1}
inner-narrow    | {"n_inner": 7}
inner-wide      | {"n_inner": 149, "activation_function": "gelu_pytorch_tanh"}
gelu            | {"activation_function": "gelu"}
quick-gelu      | {"activation_function": "quick_gelu"}
gelu-fast       | {"activation_function": "gelu_fast"}
relu            | {"activation_function": "relu"}
silu            | {"activation_function": "silu"}
tanh            | {"activation_function": "tanh"}
scores-unscaled | {"scale_attn_weights": false}
scores-by-layer | {"scale_attn_by_inverse_layer_idx": true, "n_layer": 3}
upcast          | {"reorder_and_upcast_attn": true}
epsilon-large   | {"layer_norm_epsilon": 0.1}
untied          | {"tie_word_embeddings": false}
""")
)


def write_golden(folder: Path, name: str, **others: Any) -> Path:
    """config.json, with `others` over its fields, and model.safetensors in `folder`, which is returned."""
    return write_model(folder, **GOLDEN_MODELS[name] | others)


def write_model(folder: Path, seed: str = "", **fields: Any) -> Path:
    """One of any sizes: fields of config.json over SMALL."""
    fields = {**SMALL, "bos_token_id": None, "eos_token_id": None, **fields}
    return write_checkpoint(folder, _tensors(seed, fields), **fields)


def add_tensors(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """More tensors in the model.safetensors of a folder, which is returned."""
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name: golden_array(name, shape) for name, shape in shapes.items()}, path)
    return folder


def write_small_demo(folder: Path) -> Path:
    """The demo's tokenizer and positions before a tiny model: its steps take a fraction of the demo's."""
    fields = {"vocab_size": VOCAB_SIZE, "n_positions": 512, "bos_token_id": EOS, "eos_token_id": EOS}
    return write_model(copy_tokenizer(folder), **fields)


def golden_ids(count: int, seed: str = "ids", vocab_size: int = SMALL["vocab_size"]) -> list[int]:
    return (np.abs(golden_array(seed, (count,))) * vocab_size).astype(int).tolist()


def _tensors(seed: str, fields: dict[str, Any]) -> Arrays:
    C, V = fields["n_embd"], fields["vocab_size"]
    shapes = shapes_of(C, fields["n_inner"] or 4 * C, fields["n_layer"], V, fields["n_positions"])
    if not fields.get("tie_word_embeddings", True):
        shapes["lm_head.weight"] = (V, C)
    scales = {
        name: 3 / 2 ** round(np.log2(shape[0]) / 2) for name, shape in shapes.items()
    }  # Conv1D: (in, out)
    tensors = {
        name: filled(name, golden_array(seed + name, shape), scales[name]) for name, shape in shapes.items()
    }
    return {
        name if name == "lm_head.weight" else f"transformer.{name}": array for name, array in tensors.items()
    }


def filled(name: str, numbers: np.ndarray, scale: float) -> np.ndarray:
    """Nothing stays at a 0 or 1 that would hide a mistake, and logits have a std of some units."""
    if ".ln_" in f".{name}" and name.endswith("weight"):
        # Signs keep a tied head from repeating the last token for ever.
        return np.sign(numbers) * (np.float32(1) + np.float32(0.3) * numbers)
    if name.startswith(("wte", "wpe", "lm_head")):
        return numbers
    return np.float32(0.2 if name.endswith("bias") else scale) * numbers


def golden_array(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 in [-1, 1), from name and place alone: integers mixed as by MurmurHash3's last step, and scaled."""
    x = np.arange(np.prod(shape), dtype=np.uint32) * np.uint32(2654435761) + np.uint32(
        zlib.crc32(name.encode())
    )
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return ((x >> np.uint32(8)).astype(np.float32) / np.float32(2**23) - 1).reshape(shape)


NEED_PEFT = "needs peft: pip install -e '.[parity]'"
# (in, out) / C, of GPT-2 and of GPT-Neo
MATRICES = {
    "attn.c_attn": (1, 3),
    "attn.c_proj": (1, 1),
    "mlp.c_fc": (1, 4),
    "mlp.c_proj": (4, 1),
    **{f"attn.attention.{name}_proj": (1, 1) for name in ("q", "k", "v", "out")},
}
LORA = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "bias": "none",
    "lora_alpha": 8,
}
# Each is one array in the file: what a prompt encoder would compute is computed when it is saved.
SOFT_PROMPTS = dict(
    rows("""
prompt | {"peft_type": "PROMPT_TUNING", "prompt_tuning_init": "RANDOM"}
p-tuning | {"peft_type": "P_TUNING", "encoder_hidden_size": 6, "encoder_reparameterization_type": "MLP"}
prefix | {"peft_type": "PREFIX_TUNING", "prefix_projection": false}
""")
)


def write_lora(folder: Path, rank: int, targets: list[str], has_head: bool, **fields: Any) -> Path:
    """An adapter of write_any(**fields): `targets` of every layer, and the whole head where has_head."""
    sizes = SMALL | fields
    C, tensors = sizes.get("hidden_size", sizes["n_embd"]), {}
    for layer in range(sizes["n_layer"]):
        for name, (wide, high) in MATRICES.items():
            if name.rpartition(".")[2] in targets:
                for part, shape in {"lora_A": (rank, wide * C), "lora_B": (high * C, rank)}.items():
                    full = f"transformer.h.{layer}.{name}.{part}.weight"
                    tensors[full] = np.float32(0.3) * golden_array(full, shape)
    if has_head:
        tensors["lm_head.weight"] = golden_array("adapter lm_head", (sizes["vocab_size"], C))
    more = {"modules_to_save": ["lm_head"]} if has_head else {}
    config = {**LORA, "fan_in_fan_out": "model_type" not in fields, "r": rank, "target_modules": targets}
    return _write(folder, config | more, tensors)


def write_soft_prompt(folder: Path, kind: str, num_virtual_tokens: int, **fields: Any) -> Path:
    """One of SOFT_PROMPTS for write_model(**fields)."""
    sizes = SMALL | fields
    C, L = sizes["n_embd"], sizes["n_layer"]
    width = 2 * L * C if kind == "prefix" else C
    config = {
        "num_virtual_tokens": num_virtual_tokens,
        "token_dim": C,
        "num_layers": L,
        "task_type": "CAUSAL_LM",
        "num_attention_heads": sizes["n_head"],
        "num_transformer_submodules": 1,
        "inference_mode": True,
    }
    tensors = {"prompt_embeddings": golden_array(kind, (num_virtual_tokens, width))}
    return _write(folder, {**SOFT_PROMPTS[kind], **config}, tensors)


def _write(folder: Path, config: dict[str, Any], tensors: Arrays) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "", **config}))
    if config["peft_type"] == "LORA":
        tensors = {f"base_model.model.{name}": array for name, array in tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(folder: Path, remove: str = "", **changes: np.ndarray) -> None:
    tensors = load_file(folder / "adapter_model.safetensors") | changes
    tensors.pop(remove, None)
    save_file(tensors, folder / "adapter_model.safetensors")
