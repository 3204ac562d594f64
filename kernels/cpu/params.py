"""A model's packed weights, made once from a checkpoint's tensors."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tinygpt.kernels.cpu.layers.activations import ACTIVATIONS
from tinygpt.kernels.cpu.layers.formats import Linear, Norm
from tinygpt.kernels.cpu.layers.linear import quarters, whole
from tinygpt.kernels.cpu.packing.bias_correction import bias_correction, unpack
from tinygpt.kernels.cpu.packing.pack import panel_count
from tinygpt.kernels.cpu.packing.smoothing import BALANCE, Smoothing
from tinygpt.kernels.cpu.packing.weights import K_UNIT, head_dtype_of, pack_layers
from tinygpt.kernels.cpu.simd.tiles import PANEL
from tinygpt.kernels.names import KINDS, LINEARS, NORM_BEFORE, NORMS

# What evens out the inputs of a c_proj, by its name: quantised activations are multiplied by them.
FACTORS_BEFORE = {"attn_proj": "attended_factors", "mlp_proj": "inner_factors"}
NO_BIAS = NO_FACTORS = np.empty((1, 0), np.float32)


class Params(NamedTuple):
    """Packed weights, one record for all layers of a kind, and the numbers that shape the arithmetic."""

    wte: Any  # (V, C)  a weight of formats.py, one layer
    wte_factors: np.ndarray  # (C,)    what undoes the head's smoothing where it shares wte
    wpe: np.ndarray  # (n_positions, C)
    ln_1: Norm  # (L, C)
    c_attn: Linear  # (L, 3C, C)   to q, k, v
    attended_factors: np.ndarray  # (L, C)    what attended values are multiplied by for attn_proj, or (1, 0): none
    attn_proj: Linear  # (L, C, C)
    ln_2: Norm  # (L, C)
    c_fc: Linear  # (L, F, C)
    mlp_proj: Linear  # (L, C, F)
    ln_f: Norm  # (1, C)
    head_factors: np.ndarray  # (C,)    what ln_f was divided by, and the head multiplied
    lm_head: Linear  # (1, V, C), no bias; the same arrays as wte where the head is tied
    attention_scales: np.ndarray  # (L,)
    embd_segments: np.ndarray  # (2,)  all of C
    head_segments: np.ndarray  # (5,)  C in four runs of whole heads
    inner_segments: np.ndarray  # (5,)  F in four runs
    epsilon: np.float32
    activation: int


def load_params(checkpoint, dtype: str = "float32", threads: int = 1) -> Params:
    """Pack every weight once. `checkpoint` has config, tensor(name) -> float32 array, (out, in) for matrices,
    and release(name), called as soon as a tensor has been packed so that its file pages may leave memory."""
    return load_calibrated(checkpoint, dtype, threads, None)


def load_calibrated(checkpoint, dtype: str, threads: int, calibration) -> Params:
    """As load_params. A Calibration of tinygpt/evaluation takes the place of what int8 and int4 gather from weights."""
    config = checkpoint.config
    layers, head_dtype = range(config.n_layer), head_dtype_of(dtype)
    arrays = {"wpe": _stack(checkpoint, ["wpe.weight"])[0]}
    with ThreadPoolExecutor(threads) as pool:
        # First the largest, while little else is in memory: it alone is there twice while it is packed.
        head_name = "wte.weight" if checkpoint.tied else "lm_head.weight"
        factors_of = partial(Smoothing(checkpoint, head_dtype).factors, "lm_head")
        arrays["lm_head"], factors = pack_layers(checkpoint, [head_name], head_dtype, pool, factors_of)
        arrays |= {f"ln_f_{kind}": _divided(checkpoint, ["ln_f"], kind, factors)[0] for kind in KINDS}
        arrays["head_factors"] = factors[0]
        arrays["wte_factors"] = (1 / factors[0]) if checkpoint.tied else np.ones(config.n_embd, np.float32)
        if not checkpoint.tied:
            arrays["wte"], _ = pack_layers(checkpoint, ["wte.weight"], head_dtype, pool)
        for ours, name in LINEARS.items():
            names = [f"h.{i}.{name}.weight" for i in layers]
            factors_of = partial(Smoothing(checkpoint, dtype, calibration).factors, ours)
            arrays[ours], factors = pack_layers(checkpoint, names, dtype, pool, factors_of)
            arrays[f"{ours}_bias"] = _stack(checkpoint, [f"h.{i}.{name}.bias" for i in layers])
            if calibration is not None:
                arrays[f"{ours}_bias"] += _corrections(
                    checkpoint, dtype, name, arrays[ours], factors, calibration.means
                )
            if ours in NORM_BEFORE:
                norms = [f"h.{i}.{NORM_BEFORE[ours]}" for i in layers]
                for kind in KINDS:
                    arrays[f"{NORM_BEFORE[ours]}_{kind}"] = _divided(checkpoint, norms, kind, factors)  # (L, C)
            elif dtype in BALANCE:
                arrays[FACTORS_BEFORE[ours]] = _to_panels(1 / factors)
    return new_params(config, dtype, arrays)


def new_params(config, dtype: str, arrays: dict[str, Any]) -> Params:
    """From what comes from a checkpoint, by the names that `packed.py` stores it under, and from the configuration."""
    norms = {norm: Norm(*(arrays[f"{norm}_{kind}"] for kind in KINDS)) for norm in NORMS}
    return Params(
        **{name: arrays[name] for name in ("wte_factors", "wpe", "head_factors")},
        **norms,
        **{name: Linear(arrays[name], arrays[f"{name}_bias"], NO_FACTORS) for name in LINEARS if name != "c_fc"},
        c_fc=Linear(arrays["c_fc"], arrays["c_fc_bias"], arrays.get("inner_factors", NO_FACTORS)),
        attended_factors=arrays.get("attended_factors", NO_FACTORS),
        ln_f=Norm(*(arrays[f"ln_f_{kind}"][None] for kind in KINDS)),
        wte=arrays.get("wte", arrays["lm_head"]),
        lm_head=Linear(arrays["lm_head"], NO_BIAS, NO_FACTORS),
        attention_scales=np.array([config.attention_scale(i) for i in range(config.n_layer)], np.float32),
        embd_segments=whole(config.n_embd),
        head_segments=_segments(config.n_head, config.head_size, dtype),
        inner_segments=_segments(config.inner_size // K_UNIT[dtype], K_UNIT[dtype], dtype, config.inner_size),
        epsilon=np.float32(config.layer_norm_epsilon),
        activation=ACTIVATIONS[config.activation],
    )


def _segments(units: int, unit: int, dtype: str, k: int | None = None) -> np.ndarray:
    """Four segments of K where its pieces are whole for the dtype's tiles, else one."""
    k = units * unit if k is None else k
    return quarters(units, unit) if unit % K_UNIT[dtype] == 0 and units * unit == k else whole(k)


def _divided(checkpoint, norms: list[str], kind: str, factors: np.ndarray) -> np.ndarray:
    return _stack(checkpoint, [f"{norm}.{kind}" for norm in norms]) / factors


def _corrections(checkpoint, dtype: str, name: str, record, factors: np.ndarray, means) -> np.ndarray:
    """(L, N) to add to the biases of a kind of linear layer, whose inputs have these means (K,) by the layer's name."""
    corrections = []
    for i in range(checkpoint.config.n_layer):
        weight = checkpoint.tensor(f"h.{i}.{name}.weight")  # (N, K)
        mean = means.get(f"h.{i}.{name}", np.zeros(weight.shape[1]))
        packed = unpack(dtype, tuple(array[i] for array in record), *weight.shape)
        corrections.append(bias_correction(weight, factors[i], packed, mean))
        checkpoint.release(f"h.{i}.{name}.weight")
    return np.stack(corrections)


def _to_panels(factors: np.ndarray) -> np.ndarray:
    """(L, N) to (L, P * PANEL), as kernels read whole panels."""
    layers, n = factors.shape
    padded = np.zeros((layers, panel_count(n) * PANEL), np.float32)
    padded[:, :n] = factors
    return padded


def _stack(checkpoint, names: list[str]) -> np.ndarray:
    return np.stack([checkpoint.tensor(name) for name in names])
