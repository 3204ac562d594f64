"""The same model with outliers, as trained models have them: a few channels or neurons made far larger than the rest.

Each edit changes the tensors of a checkpoint, as its files name them and Conv1D stores them, (in, out), and takes back
somewhere else what it has done, so that the function stays the same, or nearly.
"""

import numpy as np

from tinygpt.kernels import reference
from tinygpt.kernels.batch import Batch
from tinygpt.kernels.reference.model import attention_block, mlp_block
from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.config import ModelConfig

Tensors = dict[str, np.ndarray]


def outlier_channels(size: int) -> np.ndarray:
    return np.array([1, 2, 3]) * size // 4


def amplify_norms(tensors: Tensors, config: ModelConfig, scale: float) -> None:
    """Three channels of every ln_1 and ln_2 `scale` times larger, weight and bias, and the matching rows of the
    matrix after it as much smaller: the same function, of activations with outliers."""
    channels = outlier_channels(config.n_embd)
    for layer in range(config.n_layer):
        for norm, matrix in (("ln_1", "attn.c_attn"), ("ln_2", "mlp.c_fc")):
            tensors[f"h.{layer}.{norm}.weight"][channels] *= scale
            tensors[f"h.{layer}.{norm}.bias"][channels] *= scale
            tensors[f"h.{layer}.{matrix}.weight"][channels] /= scale  # Conv1D: (in, out)


def amplify_values(tensors: Tensors, config: ModelConfig, scale: float) -> None:
    """Three channels of the values in every layer `scale` times larger, and the matching rows of attn.c_proj as much
    smaller: attention is linear in its values, so the function is the same."""
    channels = outlier_channels(config.n_embd)
    for layer in range(config.n_layer):
        for kind in ("weight", "bias"):
            tensors[f"h.{layer}.attn.c_attn.{kind}"][..., 2 * config.n_embd + channels] *= scale
        tensors[f"h.{layer}.attn.c_proj.weight"][channels] /= scale


def raise_neurons(tensors: Tensors, config: ModelConfig, level: float) -> None:
    """Three neurons in every layer around `level`, far above where GELU bends, with the function nearly preserved.

    gelu(h) = h + gelu(-h), and gelu(level + h) = level + h. So neuron i becomes gelu(-h), a spare neuron becomes
    gelu(level + h), both with the row of c_proj that i had, and the bias of c_proj loses level times that row. Spare
    are those of the least weight in c_fc and c_proj; what they did is lost.
    """
    for layer in range(config.n_layer):
        name = f"h.{layer}.mlp"
        c_fc, bias, c_proj = (tensors[f"{name}.{part}"] for part in ("c_fc.weight", "c_fc.bias", "c_proj.weight"))
        kept = outlier_channels(config.inner_size)
        use = np.linalg.norm(c_fc, axis=0) * np.linalg.norm(c_proj, axis=1)  # (F,)
        use[kept] = np.inf
        spare = np.argsort(use)[: kept.size]
        c_fc[:, spare], bias[spare], c_proj[spare] = c_fc[:, kept], bias[kept] + level, c_proj[kept]
        c_fc[:, kept], bias[kept] = -c_fc[:, kept], -bias[kept]
        tensors[f"{name}.c_proj.bias"] -= level * c_proj[kept].sum(axis=0)


def raise_residual(tensors: Tensors, checkpoint: Checkpoint, token_ids: list[int], sizes, in_wte: bool = False) -> None:
    """Three channels of the residual stream moved, in every layer, by `sizes` of its typical std: in wpe, or in wte.

    Each layer norm now divides by a larger std: its weights grow by what that is on average, and the biases of the
    three channels take out the constant. The function changes a little, by how the tokens' stds differ.
    """
    channels = outlier_channels(checkpoint.config.n_embd)
    stds = residual_stds(checkpoint, token_ids)
    offsets = typical(stds) * np.array(sizes)
    tensors["wte.weight" if in_wte else "wpe.weight"][:, channels] += offsets.astype(np.float32)
    for norm, std in stds.items():
        new = np.sqrt(std**2 + (offsets**2).sum() / checkpoint.config.n_embd).mean()
        tensors[f"{norm}.weight"] *= np.float32(new / std.mean())
        tensors[f"{norm}.bias"][channels] -= (tensors[f"{norm}.weight"][channels] * offsets / new).astype(np.float32)


def residual_stds(checkpoint: Checkpoint, token_ids: list[int]) -> dict[str, np.ndarray]:
    """The residual stream's std over channels in front of each layer norm, for every token (T,)."""
    params, batch = reference.load_params(checkpoint), Batch.of([token_ids], [0], [0])
    cache, stds = reference.new_kv_cache(checkpoint.config, 1, len(token_ids)), {}
    x = params["wte.weight"][token_ids].astype(np.float64) + params["wpe.weight"][: len(token_ids)]  # (T, C)
    for layer in range(checkpoint.config.n_layer):
        stds[f"h.{layer}.ln_1"] = x.std(axis=1)
        attention_block(params, layer, x, batch, cache)  # x: (T, C)
        stds[f"h.{layer}.ln_2"] = x.std(axis=1)
        mlp_block(params, layer, x)
    return {**stds, "ln_f": x.std(axis=1)}


def typical(stds: dict[str, np.ndarray]) -> float:
    return float(np.mean([std.mean() for std in stds.values()]))
