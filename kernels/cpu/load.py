"""Loading a checkpoint: weights packed by threads, smoothing factors for quantized ones, and corrected biases.

Trained GPT-2s have channels far larger than the rest. Factors of columns divide a linear layer's input (SmoothQuant:
Xiao et al., 2022). Sizes of channels follow from the weights, or from `convert --calibrate`, which also corrects biases
(Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019).
"""

import itertools
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..backend import KINDS, LINEARS, NORM_BEFORE
from ..numbers import check_range, stacked
from .arrays import (
    FACTORS_BEFORE,
    NO_FACTORS,
    Array,
    CpuShare,
    Experts,
    Params,
    model_arrays,
    new_params,
    share_of,
    to_panels,
)
from .dtypes import DTYPES, new_weight, pack, panel_count, unpack
from .layers.activations import ACTIVATIONS, activate
from .layers.linear import Linear
from .simd.vector_ir import zeros

EXPERT_LINEARS = {"c_fc": "c_fc", "mlp_proj": "c_proj"}
PACK_SHARES = 16  # of a matrix
C_PROJ_BALANCE = 0.5
LEAST = 1e-6  # a channel that a layer norm switches off
LEAST_ESTIMATE = 0.25  # times the median: the estimate may be wrong
# Gauss-Hermite quadrature for the mean of a function of a normal variable.
POINTS, SHARES = np.polynomial.hermite_e.hermegauss(15)
BITS = 8  # of a factor: CPUs differ in the last place


def load_params(checkpoint, dtype: str = "float32", threads: int = 1, calibration=None, share=None) -> Params:
    """calibration: measured sizes, of tinygpt/evaluation. share: a rank's CpuShare, else all."""
    share = share or share_of(checkpoint.config, dtype)
    arrays = load_arrays(checkpoint, dtype, threads, calibration, share)
    return new_params(checkpoint.config, dtype, arrays, share)


def load_arrays(
    checkpoint, dtype: str, threads: int = 1, calibration=None, share: CpuShare | None = None
) -> dict[str, Any]:
    """Return arrays and weights' records by their names in `model_arrays`, and "experts"."""
    config = checkpoint.config
    share = share or share_of(config, dtype)
    table = model_arrays(config, dtype, checkpoint.tied)
    with ThreadPoolExecutor(threads) as packers:
        pack = partial(pack_layers, checkpoint, packers=packers, share=share)
        arrays = _outside_of_layers(checkpoint, dtype, table, share, pack)
        smoothing = Smoothing(checkpoint, dtype, calibration, share.layers.start)
        for ours, name in LINEARS.items():
            names = _linear_names(config, ours, share.layers)
            weights = [f"{n}.weight" for n in names]
            arrays[ours], factors = pack(table[ours], weights, partial(smoothing.factors, ours))
            bias = stacked(checkpoint, [f"{n}.bias" for n in names])
            bias = share.keep(table[f"{ours}_bias"], bias)
            if calibration is not None:
                bias += _corrections(checkpoint, dtype, name, arrays[ours], factors, calibration.means)
            arrays[f"{ours}_bias"] = bias
            if ours in NORM_BEFORE:
                norms = [f"h.{i}.{NORM_BEFORE[ours]}" for i in share.layers]
                # With experts, all are 1.
                divisor = factors if len(factors) == len(norms) else np.float32(1)
                for kind in KINDS:
                    name = f"{NORM_BEFORE[ours]}_{kind}"
                    arrays[name] = _divided(checkpoint, norms, kind, divisor)  # (L, C)
            elif FACTORS_BEFORE[ours] in table:
                place = FACTORS_BEFORE[ours]
                arrays[place] = share.keep(table[place], to_panels(1 / factors))
        experts = {"experts": _experts(checkpoint, table, pack)} if config.expert_layers else {}
    return {name: arrays[name] for name in table if name in arrays} | experts


def _outside_of_layers(
    checkpoint, dtype: str, table: dict[str, Array], share: CpuShare, pack: Callable
) -> dict[str, Any]:
    config = checkpoint.config
    arrays = {}
    factors = np.ones((1, config.embedding_size), np.float32)
    # The largest first: it is in memory twice while it is packed.
    if share.has(table["lm_head"]):
        names = ["wte.weight" if checkpoint.tied else "lm_head.weight"]
        factors_of = partial(Smoothing(checkpoint, table["lm_head"].dtype).factors, "lm_head")
        arrays["lm_head"], factors = pack(table["lm_head"], names, factors_of)
    for name in ("wte", "project_in", "project_out"):
        if name in table and share.has(table[name]):
            arrays[name], _ = pack(table[name], [f"{name}.weight"])
    arrays["head_factors"] = factors[0]
    smoothed = factors[0] if checkpoint.tied else np.ones(config.embedding_size, np.float32)
    arrays["wte_factors"] = np.float32(config.embed_scale) / smoothed
    if "wpe" in table and share.has(table["wpe"]):
        arrays["wpe"] = stacked(checkpoint, ["wpe.weight"])[0]
    divisors = {"ln_e": np.float32(1), "ln_f": factors if config.embed_dim is None else np.float32(1)}
    for norm, divisor in divisors.items():
        for kind in KINDS:
            name = f"{norm}_{kind}"
            if name in table and share.has(table[name]):
                arrays[name] = _divided(checkpoint, [norm], kind, divisor)[0]
    return arrays


def _linear_names(config, ours: str, layers: range) -> list[str]:
    has_mlp = [i for i in layers if ours not in EXPERT_LINEARS or i not in config.expert_layers]
    return [f"h.{i}.{LINEARS[ours]}" for i in has_mlp] or [f"h.0.mlp.experts.0.{EXPERT_LINEARS[ours]}"]


def _experts(checkpoint, table: dict[str, Array], pack: Callable) -> Experts:
    config = checkpoint.config
    linears = {}
    for ours, part in EXPERT_LINEARS.items():
        experts = range(config.num_experts)
        names = [f"h.{i}.mlp.experts.{e}.{part}" for i in config.expert_layers for e in experts]
        weight, _ = pack(table[ours], [f"{name}.weight" for name in names])
        linears[ours] = Linear(weight, stacked(checkpoint, [f"{name}.bias" for name in names]), NO_FACTORS)
    others = [i for i in range(config.n_layer) if i not in config.expert_layers]
    places = np.empty(config.n_layer, np.int64)
    places[list(config.expert_layers)] = np.arange(len(config.expert_layers))
    places[others] = -1 - np.arange(len(others))
    gate = stacked(checkpoint, [f"h.{i}.mlp.gate.weight" for i in config.expert_layers])
    return Experts(places, gate, **linears, sums_to_one=config.norm_topk_prob)


def pack_layers(
    checkpoint,
    array: Array,
    names: list[str],
    factors_of: Callable | None = None,
    *,
    packers: Executor,
    share: CpuShare,
) -> tuple[Any, np.ndarray]:
    """Pack weights (N, K). Return their record, of which a rank keeps its share, and factors (L, K).

    Raises WeightError for a finite number beyond the dtype's largest.
    """
    n, k = checkpoint.tensor(names[0]).shape
    is_whole = share.tensor_size == 1
    row = DTYPES[array.dtype]
    record = new_weight(array.dtype, len(names) if is_whole else 1, n, k)
    kept = None
    all_factors = np.ones((len(names), k), np.float32)
    bounds = [i * panel_count(n) // PACK_SHARES for i in range(PACK_SHARES + 1)]
    for layer, name in enumerate(names):
        weight = checkpoint.tensor(name)  # (N, K)
        check_range(name, weight, row.name, row.largest)
        if factors_of is not None:
            all_factors[layer] = factors_of(layer, weight)
        is_transposed = not weight.flags.c_contiguous
        source = np.ascontiguousarray(weight.T if is_transposed else weight)
        places = [part[layer if is_whole else 0] for part in record]
        weight = source, is_transposed, all_factors[layer]
        for packed in [
            packers.submit(pack, array.dtype, *weight, places, *pair) for pair in itertools.pairwise(bounds)
        ]:
            packed.result()
        checkpoint.release(name)
        if not is_whole:
            piece = share.keep(array, record)
            kept = kept or type(record)(*(zeros((len(names), *part.shape[1:]), part.dtype) for part in piece))
            for target, part in zip(kept, piece, strict=True):
                target[layer] = part[0]
    return kept or record, all_factors


def _divided(checkpoint, norms: list[str], kind: str, factors: np.ndarray) -> np.ndarray:
    return stacked(checkpoint, [f"{norm}.{kind}" for norm in norms]) / factors


def _corrections(checkpoint, dtype: str, name: str, record, factors: np.ndarray, means) -> np.ndarray:
    """Return (L, N) to add to biases of linear layers whose inputs have these means (K,)."""
    corrections = []
    for i in range(checkpoint.config.n_layer):
        weight = checkpoint.tensor(f"h.{i}.{name}.weight")  # (N, K)
        mean = means.get(f"h.{i}.{name}", np.zeros(weight.shape[1]))
        packed = unpack(dtype, tuple(array[i] for array in record), *weight.shape)
        corrections.append(bias_correction(weight, factors[i], packed, mean))
        checkpoint.release(f"h.{i}.{name}.weight")
    return np.stack(corrections)


@dataclass(frozen=True)
class Smoothing:
    checkpoint: Any
    dtype: str
    calibration: Any = None  # of tinygpt/evaluation: measured sizes
    first_layer: int = 0

    def factors(self, ours: str, index: int, weight: np.ndarray) -> np.ndarray:
        """Return factors (K,) float32 of a weight (N, K)."""
        layer = self.first_layer + index
        balance = DTYPES[self.dtype].balance
        if balance is None or not self._can_divide(ours):
            return np.ones(weight.shape[1], np.float32)
        measured = None if self.calibration is None else self.calibration.sizes.get(layer_name(ours, layer))
        if measured is not None:
            return smoothing_factors(weight, measured, self.calibration.share)
        if self.checkpoint.config.norm_placement == "post":
            return np.ones(weight.shape[1], np.float32)
        share = balance if ours in NORM_BEFORE or ours == "lm_head" else C_PROJ_BALANCE
        return smoothing_factors(weight, self._sizes(ours, layer), share)

    def _can_divide(self, ours: str) -> bool:
        config = self.checkpoint.config
        if ours == "lm_head":
            return config.final_norm and config.embed_dim is None
        if config.expert_layers and ours in ("c_fc", "mlp_proj"):  # one norm precedes the gate, too
            return False
        return ours not in NORM_BEFORE or config.norm_placement == "pre"

    def _sizes(self, ours: str, layer: int) -> np.ndarray:
        if ours == "lm_head":
            return np.hypot(*self._norm("ln_f"))
        if ours in NORM_BEFORE:
            return np.hypot(*self._norm(f"h.{layer}.{NORM_BEFORE[ours]}"))
        sizes = self._value_sizes(layer) if ours == "attn_proj" else self._inner_sizes(layer)
        return np.maximum(sizes, LEAST_ESTIMATE * np.median(sizes))

    def _value_sizes(self, layer: int) -> np.ndarray:
        width = self.checkpoint.config.n_embd
        return np.hypot(*self._outputs("c_attn", layer, slice(2 * width, None)))

    def _inner_sizes(self, layer: int) -> np.ndarray:
        mean, spread = self._outputs("c_fc", layer, slice(None))
        values = (mean + spread * POINTS[:, None]).astype(np.float32)  # (points, F)
        activate(values.reshape(-1), ACTIVATIONS[self.checkpoint.config.activation])
        return np.sqrt(np.average(np.square(values, dtype=np.float64), axis=0, weights=SHARES))

    def _outputs(self, ours: str, layer: int, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        name = layer_name(ours, layer)
        weight, bias = (self.checkpoint.tensor(f"{name}.{kind}")[rows] for kind in KINDS)
        norm_weight, norm_bias = self._norm(f"h.{layer}.{NORM_BEFORE[ours]}")
        mean = weight @ norm_bias + bias
        scaled = weight * norm_weight
        self.checkpoint.release(f"{name}.weight")
        return mean, np.sqrt(np.square(scaled, out=scaled).sum(axis=1))

    def _norm(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        weight, bias = (self.checkpoint.tensor(f"{name}.{kind}") for kind in KINDS)
        return weight, bias


def layer_name(ours: str, layer: int) -> str:
    return f"h.{layer}.{LINEARS[ours]}" if ours in LINEARS else ours


def smoothing_factors(weight: np.ndarray, sizes: np.ndarray, share: float) -> np.ndarray:
    """Return factors (K,) float32 of weight (N, K), whose channels have these sizes (K,)."""
    sizes_of_weights = np.abs(weight)
    rows = sizes_of_weights.max(axis=1, keepdims=True)  # (N, 1)
    sizes_of_weights /= np.where(rows > 0, rows, 1)
    largest = sizes_of_weights.max(axis=0)
    largest = np.where(largest > 0, largest, 1)
    factors = np.maximum(sizes, LEAST) ** share / largest ** (1 - share)
    return rounded(factors / np.exp(np.log(factors).mean()))


def rounded(factors: np.ndarray) -> np.ndarray:
    digits, exponents = np.frexp(factors)
    return np.ldexp(np.rint(digits * 2**BITS) / 2**BITS, exponents).astype(np.float32)


def bias_correction(
    weight: np.ndarray, factors: np.ndarray, packed: np.ndarray, means: np.ndarray
) -> np.ndarray:
    """Return (N,) to add to a bias. `packed` (N, K) is weight (N, K) * factors (K,) by `unpack`."""
    return ((weight * factors - packed) @ (means / factors)).astype(np.float32)
