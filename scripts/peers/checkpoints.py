"""The checkpoint that every engine starts from: a folder with config.json and one float32 model.safetensors."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tinygpt.weights.random_checkpoint import open_random

DEFAULTS = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_inner": None,
    "n_positions": 1024,
    "tie_word_embeddings": True,
    "vocab_size": 50257,
}
CONV1D = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


def make_random(shape: str, folder: Path) -> None:
    """GPT-2's initial distribution; biases and layer norms that matter, so that a forgotten one shows in the logits."""
    checkpoint = open_random(f"random:{shape}")
    sizes = {name: getattr(checkpoint.config, name) for name in ("n_layer", "n_embd", "n_head")}
    write(folder, DEFAULTS | sizes, {f"transformer.{name}": t.float32() for name, t in checkpoint.stored.items()})


def make(model: Path, folder: Path, dtype: str) -> None:
    """The same form of any checkpoint that tinygpt reads; `dtype` is float32."""
    from tinygpt.weights.open import open_checkpoint

    checkpoint = open_checkpoint(str(model))
    config = DEFAULTS | json.loads((checkpoint.path / "config.json").read_text())
    for name in ("dtype", "torch_dtype"):  # they speak of the files it came in
        config.pop(name, None)
    tensors = {}
    for name in checkpoint.stored:
        tensor = checkpoint.tensor(name)
        is_conv1d = any(f".{kind}.weight" in name for kind in CONV1D)
        theirs = name if name.startswith("lm_head") else f"transformer.{name}"
        tensors[theirs] = np.ascontiguousarray(tensor.T if is_conv1d else tensor)
    write(folder, config, tensors)


def write(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
