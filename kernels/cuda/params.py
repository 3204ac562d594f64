"""A model's weights on the device, packed once from a checkpoint's tensors."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygpt.kernels.backend import KINDS, LINEARS, NORMS, DeviceError
from tinygpt.kernels.cuda.layers.layer_norm import NormWeights
from tinygpt.kernels.cuda.layers.linear import Weights
from tinygpt.kernels.cuda.packing import OUT_TILE, array_type, item_bytes, pack, padded_columns, panel_count, step_count
from tinygpt.kernels.cuda.runtime import device as devices


@dataclass(frozen=True)
class Params:
    """A model on the device."""

    device: Any
    config: Any
    dtype: str
    wte: Weights  # one layer of (V, C), without bias
    wpe: Any  # (n_positions, C) float32
    linears: dict[str, Weights]  # by the names of LINEARS, and lm_head: the arrays of wte if the head is tied
    norms: dict[str, NormWeights]  # (L, C) of ln_1 and ln_2, (1, C) of ln_f
    final_norm: NormWeights  # ln_f on the host


# Features of a model that no kernel computes, by field of the configuration.
NOT_IMPLEMENTED = {
    "norm_placement": "layer norms after its blocks",
    "positions": "ALiBi in place of position embeddings",
    "embed_norm": "a layer norm after its embeddings",
    "final_norm": "no layer norm before its head",
    "embed_dim": "embeddings of another width than its own",
    "embed_scale": "embeddings that are multiplied by a number",
    "expert_layers": "experts",
}


def check_model(config: Any) -> None:
    """Raise DeviceError, which names the feature, if the kernels cannot run this model."""
    found = [named for field, named in NOT_IMPLEMENTED.items() if field in config.structure]
    if found:
        raise DeviceError(f"the model has {', '.join(found)}, which no kernel for a GPU computes.")


def load_params(checkpoint: Any, dtype: str = "float32", threads: int = 1) -> Params:
    device, config, layers = devices.the_device(), checkpoint.config, range(checkpoint.config.n_layer)

    def weights(names: list[str], bias: np.ndarray) -> Weights:
        n, k = checkpoint.tensor(names[0]).shape
        panels = device.zeros((len(names), panel_count(n) * OUT_TILE, padded_columns(k)), array_type(dtype))
        scales, size = np.empty((len(names), panel_count(n) * OUT_TILE), np.float32), panels.size // len(names)
        for i, name in enumerate(names):  # one matrix at a time is in memory twice
            packed, scales[i] = pack(checkpoint.tensor(name), dtype)
            device.write(panels[i * size : (i + 1) * size], packed)
            checkpoint.release(name)
        return Weights(panels, device.array(scales), device.array(bias), panel_count(n), step_count(k), n)

    def stacked(names: list[str]) -> np.ndarray:
        return np.stack([checkpoint.tensor(name) for name in names])

    no_bias = np.zeros(1, np.float32)
    wte = weights(["wte.weight"], no_bias)
    final_norm = NormWeights(*(np.array(checkpoint.tensor(f"ln_f.{kind}")) for kind in KINDS))
    norms = {"ln_f": NormWeights(*map(device.array, final_norm))}
    for norm in NORMS:
        kinds = [stacked([f"h.{i}.{norm}.{kind}" for i in layers]) for kind in KINDS]
        norms[norm] = NormWeights(*map(device.array, kinds))
    linears = {"lm_head": wte if checkpoint.tied else weights(["lm_head.weight"], no_bias)}
    for ours, name in LINEARS.items():
        bias = stacked([f"h.{i}.{name}.bias" for i in layers])
        linears[ours] = weights([f"h.{i}.{name}.weight" for i in layers], bias)
    return Params(
        device=device,
        config=config,
        dtype=dtype,
        wte=wte,
        wpe=device.array(checkpoint.tensor("wpe.weight")),
        linears=linears,
        norms=norms,
        final_norm=final_norm,
    )


def params_bytes(config: Any, dtype: str, tied: bool) -> int:
    C, F, V, L = config.n_embd, config.inner_size, config.vocab_size, config.n_layer
    shapes = [(3 * C, C), (C, C), (F, C), (C, F)]
    per_layer = sum(_linear_bytes(n, k, dtype) + 4 * n for n, k in shapes) + 4 * 4 * C
    tables = (1 if tied else 2) * (_linear_bytes(V, C, dtype) + 4)  # a missing bias is an array of one number
    return L * per_layer + tables + 4 * C * (config.n_positions + 2)


def _linear_bytes(n: int, k: int, dtype: str) -> int:
    return panel_count(n) * OUT_TILE * (padded_columns(k) * item_bytes(dtype) + 4)
