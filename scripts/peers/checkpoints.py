"""The checkpoint that every engine starts from: a folder with config.json and one float32 model.safetensors."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SHAPES = {  # n_layer, n_embd, n_head
    "tiny": (2, 64, 2),
    "124M": (12, 768, 12),
    "355M": (24, 1024, 16),
}
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
    """GPT-2's initial distribution; biases and gains that matter, so that a forgotten one shows in the logits."""
    layers, c, heads = SHAPES[shape]
    config = DEFAULTS | {"n_layer": layers, "n_embd": c, "n_head": heads}
    generator = np.random.default_rng(0)

    def normal(*size: int, mean: float = 0.0) -> np.ndarray:
        return generator.standard_normal(size, np.float32) * np.float32(0.02) + np.float32(mean)

    tensors = {"wte.weight": normal(config["vocab_size"], c), "wpe.weight": normal(config["n_positions"], c)}
    norms = ["ln_f"] + [f"h.{i}.{norm}" for i in range(layers) for norm in ("ln_1", "ln_2")]
    for norm in norms:
        tensors |= {f"{norm}.weight": normal(c, mean=1.0), f"{norm}.bias": normal(c)}
    sizes = zip(CONV1D, [(c, 3 * c), (c, c), (c, 4 * c), (4 * c, c)], strict=True)
    for name, size in sizes:
        for i in range(layers):
            tensors |= {f"h.{i}.{name}.weight": normal(*size), f"h.{i}.{name}.bias": normal(size[1])}
    write(folder, config, {f"transformer.{name}": tensor for name, tensor in tensors.items()})


def make(model: Path, folder: Path, dtype: str) -> None:
    """The same form of any checkpoint that tinygpt reads; `dtype` is float32."""
    from tinygpt.weights.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(str(model))
    config = DEFAULTS | json.loads((checkpoint.path / "config.json").read_text())
    for name in ("dtype", "torch_dtype"):  # they speak of the files it came in
        config.pop(name, None)
    tensors = {}
    for name in checkpoint.parameters:
        tensor = checkpoint.tensor(name)
        is_conv1d = any(f".{kind}.weight" in name for kind in CONV1D)
        theirs = name if name.startswith("lm_head") else f"transformer.{name}"
        tensors[theirs] = np.ascontiguousarray(tensor.T if is_conv1d else tensor)
    write(folder, config, tensors)


def write(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
