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
from tinygpt.kernels.cpu.packing.part import Part
from tinygpt.kernels.cpu.packing.smoothing import BALANCE, Smoothing
from tinygpt.kernels.cpu.packing.weights import FORMATS, K_UNIT, head_dtype_of, new_weight, pack_layers
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
    inner_segments: np.ndarray  # (5,)  F in four runs; of a tensor-parallel rank, some of these and of those above
    epsilon: np.float32
    activation: int


def load_params(checkpoint, dtype: str = "float32", threads: int = 1) -> Params:
    """Pack every weight once. `checkpoint` has config, tensor(name) -> float32 array, (out, in) for matrices,
    and release(name), called as soon as a tensor has been packed so that its file pages may leave memory."""
    return load_calibrated(checkpoint, dtype, threads, None)


def load_calibrated(checkpoint, dtype: str, threads: int, calibration) -> Params:
    """As load_params. A Calibration of tinygpt/evaluation takes the place of what int8 and int4 gather from weights."""
    return _load(checkpoint, dtype, threads, calibration, part_of(checkpoint.config, dtype))


def load_part(checkpoint, dtype: str, threads: int, part: Part) -> Params:
    """As load_params, of one of several ranks: besides what it holds, there is never more than one matrix in memory."""
    return _load(checkpoint, dtype, threads, None, part)


def _load(checkpoint, dtype: str, threads: int, calibration, part: Part) -> Params:
    config, layers, head_dtype = checkpoint.config, part.layers, head_dtype_of(dtype)
    arrays = {"wpe": _stack(checkpoint, ["wpe.weight"])[0] if part.is_first else no_positions(config)}
    with ThreadPoolExecutor(threads) as pool:
        # First the largest, while little else is in memory: it alone is there twice while it is packed.
        head_name = "wte.weight" if checkpoint.tied else "lm_head.weight"
        factors_of = partial(Smoothing(checkpoint, head_dtype).factors, "lm_head")
        if part.is_last or (part.is_first and checkpoint.tied):
            arrays["lm_head"], factors = pack_layers(
                checkpoint, [head_name], head_dtype, pool, factors_of, part.keep("lm_head")
            )
        else:
            arrays["lm_head"], factors = no_head(config, head_dtype), np.ones((1, config.n_embd), np.float32)
        arrays |= {f"ln_f_{kind}": _divided(checkpoint, ["ln_f"], kind, factors)[0] for kind in KINDS}
        arrays["head_factors"] = factors[0]
        arrays["wte_factors"] = (1 / factors[0]) if checkpoint.tied else np.ones(config.n_embd, np.float32)
        if part.is_first and not checkpoint.tied:
            arrays["wte"], _ = pack_layers(checkpoint, ["wte.weight"], head_dtype, pool, keep=part.keep("wte"))
        smoothing = Smoothing(checkpoint, dtype, calibration)
        for ours, name in LINEARS.items():
            names = [f"h.{i}.{name}.weight" for i in layers]
            factors_of = partial(_factors_of_layer, smoothing, ours, layers)
            arrays[ours], factors = pack_layers(checkpoint, names, dtype, pool, factors_of, part.keep(ours))
            biases = _stack(checkpoint, [f"h.{i}.{name}.bias" for i in layers])
            arrays[f"{ours}_bias"] = part.values(ours, biases)
            if calibration is not None:
                arrays[f"{ours}_bias"] += _corrections(
                    checkpoint, dtype, name, arrays[ours], factors, calibration.means
                )
            if ours in NORM_BEFORE:
                norms = [f"h.{i}.{NORM_BEFORE[ours]}" for i in layers]
                for kind in KINDS:
                    arrays[f"{NORM_BEFORE[ours]}_{kind}"] = _divided(checkpoint, norms, kind, factors)  # (L, C)
            elif dtype in BALANCE:
                arrays[FACTORS_BEFORE[ours]] = to_panels(part.factors(ours, 1 / factors))
    return new_params(config, dtype, arrays, part)


def _factors_of_layer(smoothing: Smoothing, ours: str, layers: range, index: int, weight: np.ndarray) -> np.ndarray:
    return smoothing.factors(ours, layers[index], weight)


def no_positions(config) -> np.ndarray:
    """For a stage that is given its input: what adds nothing to any number, -0 included."""
    return np.full((config.n_positions, config.n_embd), -0.0, np.float32)


def no_head(config, dtype: str):
    """For a stage without a head, whose steps ask for no logits: as little as a kernel can be given."""
    return FORMATS[dtype][0](*new_weight(dtype, 1, 1, config.n_embd))


def new_params(config, dtype: str, arrays: dict[str, Any], part: Part | None = None) -> Params:
    """From what comes from a checkpoint, by the names that `packed.py` stores it under, and from the configuration.

    part: what the arrays are of the model; None is all.
    """
    part = part or part_of(config, dtype)
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
        attention_scales=np.array([config.attention_scale(i) for i in part.layers], np.float32),
        embd_segments=whole(config.n_embd),
        head_segments=_of_rank(head_segments(config, dtype), part),
        inner_segments=_of_rank(inner_segments(config, dtype), part),
        epsilon=np.float32(config.layer_norm_epsilon),
        activation=ACTIVATIONS[config.activation],
    )


def part_of(config, dtype: str, layers: range | None = None, tensor_rank: int = 0, tensor_size: int = 1) -> Part:
    """What a rank holds of layers of a model: all of it, unless `tensor_size` ranks share them.

    These share the segments of K, so that the first ones have more heads: 25 are 13 + 12, or 13 + 6 + 6.
    """
    layers = range(config.n_layer) if layers is None else layers
    heads, inner = head_segments(config, dtype), inner_segments(config, dtype)
    segments = _share(4, tensor_rank, tensor_size)
    if tensor_size == 1:
        heads, inner, segments = heads[[0, -1]], inner[[0, -1]], range(1)
    return Part(
        layers=layers,
        heads=range(heads[segments.start] // config.head_size, heads[segments.stop] // config.head_size),
        inner=range(inner[segments.start], inner[segments.stop]),
        vocab=_share(config.vocab_size, tensor_rank, tensor_size),
        segments=segments,
        n_embd=config.n_embd,
        head_size=config.head_size,
        is_first=layers.start == 0,
        is_last=layers.stop == config.n_layer,
        tensor_size=tensor_size,
    )


def head_segments(config, dtype: str) -> np.ndarray:
    """The bounds of the segments of attn_proj's K, in whole heads."""
    return _segments(config.n_head, config.head_size, dtype)


def inner_segments(config, dtype: str) -> np.ndarray:
    """The bounds of the segments of mlp_proj's K."""
    return _segments(config.inner_size // K_UNIT[dtype], K_UNIT[dtype], dtype, config.inner_size)


def _of_rank(segments: np.ndarray, part: Part) -> np.ndarray:
    """The bounds within what a rank has of K."""
    if part.tensor_size == 1:
        return segments
    return segments[part.segments.start : part.segments.stop + 1] - segments[part.segments.start]


def _share(count: int, rank: int, ranks: int) -> range:
    """Which of `count` things a rank has, the first ranks one more: 50257 are 25129 + 25128."""
    share, longer = divmod(count, ranks)
    bounds = [i * share + min(i, longer) for i in (rank, rank + 1)]
    return range(*bounds)


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


def to_panels(factors: np.ndarray) -> np.ndarray:
    """(L, N) to (L, P * PANEL), as kernels read whole panels."""
    layers, n = factors.shape
    padded = np.zeros((layers, panel_count(n) * PANEL), np.float32)
    padded[:, :n] = factors
    return padded


def _stack(checkpoint, names: list[str]) -> np.ndarray:
    return np.stack([checkpoint.tensor(name) for name in names])
