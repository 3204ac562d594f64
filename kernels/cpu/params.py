"""A model's packed weights, made from a checkpoint's tensors."""

from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..backend import KINDS, LINEARS, NORM_BEFORE, NORMS
from ..numbers import even_bounds, stacked
from .layers.activations import ACTIVATIONS
from .layers.epilogue import MAX_SEGMENTS
from .layers.formats import Alibi, Experts, Linear, Norm, Projection
from .layers.linear import quarters, whole
from .packing.share import RankShare
from .packing.smoothing import BALANCE, Smoothing, bias_correction, unpack
from .packing.weights import FORMATS, K_UNIT, head_dtype_of, new_weight, pack_layers, panel_count
from .simd.tiles import OUT_TILE

# The smoothing factors of a c_proj's input.
FACTORS_BEFORE = {"attn_proj": "attended_factors", "mlp_proj": "inner_factors"}
NO_BIAS = NO_FACTORS = np.empty((1, 0), np.float32)
EXPERT_LINEARS = {"c_fc": "c_fc", "mlp_proj": "c_proj"}
PROJECTIONS = ("project_in", "project_out")


class Params(NamedTuple):
    """Packed weights, a record for all layers of a kind; None for a part that a model lacks."""

    wte: Any  # (V, E)  a weight, one layer
    wte_factors: np.ndarray  # (E,)    embed_scale, without the smoothing of a tied head
    project_in: Any  # (C, E), a Projection
    wpe: Any  # (n_positions, C), an array
    embed_norm: Any  # (1, C), a Norm
    ln_1_before: Any  # (L, C), a Norm before the block, or None
    ln_1_after: Any  # (L, C), a Norm after it, or None
    c_attn: Linear  # (L, 3C, C)   to q, k, v
    attended_factors: np.ndarray  # (L, C)    smoothing factors, or (1, 0)
    attn_proj: Linear  # (L, C, C)
    ln_2_before: Any  # (L, C), as ln_1
    ln_2_after: Any
    c_fc: Linear  # (L, F, C)
    mlp_proj: Linear  # (L, C, F)
    experts: Any  # Experts
    ln_f: Any  # (1, C), a Norm
    head_factors: np.ndarray  # (E,)    the head's smoothing factors
    project_out: Any  # (E, C), a Projection
    lm_head: Linear  # (1, V, E), no bias; wte if the head is tied
    alibi: Any  # (H,), an Alibi
    attention_scales: np.ndarray  # (L,)
    embd_segments: np.ndarray  # (2,)  all of C
    embedding_segments: np.ndarray  # (2,)  all of E
    head_segments: np.ndarray  # (5,)  C in four runs of whole heads
    inner_segments: np.ndarray  # (5,)  F in four runs; a rank has some of them
    epsilon: np.float32
    activation: int
    adapters: Any = None  # Adapters

    def norm(self, name: str) -> Norm:
        """Return ln_1 or ln_2, before its block or after."""
        return getattr(self, f"{name}_before") or getattr(self, f"{name}_after")


def load_params(checkpoint, dtype: str = "float32", threads: int = 1, calibration=None, part=None) -> Params:
    """calibration: measured sizes, of tinygpt/evaluation. part: a rank's Part, else all."""
    part = part or part_of(checkpoint.config, dtype)
    config, layers = checkpoint.config, part.layers
    with ThreadPoolExecutor(threads) as packers:
        arrays = _outside_of_layers(checkpoint, dtype, packers, part)
        smoothing = Smoothing(checkpoint, dtype, calibration, layers.start)
        for ours, name in LINEARS.items():
            names = _linear_names(config, ours, layers)
            weights = [f"{n}.weight" for n in names]
            factors_of = partial(smoothing.factors, ours)
            arrays[ours], factors = pack_layers(
                checkpoint, weights, dtype, packers, factors_of, part.keep(ours)
            )
            arrays[f"{ours}_bias"] = part.values(ours, stacked(checkpoint, [f"{n}.bias" for n in names]))
            if calibration is not None:
                given = name, arrays[ours], factors, calibration.means
                arrays[f"{ours}_bias"] += _corrections(checkpoint, dtype, *given)
            if ours in NORM_BEFORE:
                norms = [f"h.{i}.{NORM_BEFORE[ours]}" for i in layers]
                norm_factors = (
                    factors if len(factors) == len(norms) else np.float32(1)
                )  # with experts, all are 1
                for kind in KINDS:
                    arrays[f"{NORM_BEFORE[ours]}_{kind}"] = _divided(
                        checkpoint, norms, kind, norm_factors
                    )  # (L, C)
            elif dtype in BALANCE:
                arrays[FACTORS_BEFORE[ours]] = to_panels(part.factors(ours, 1 / factors))
        if config.expert_layers:
            arrays["experts"] = _experts(checkpoint, dtype, packers)
    return new_params(config, dtype, arrays, part)


def _outside_of_layers(checkpoint, dtype: str, packers: Executor, part: RankShare) -> dict[str, Any]:
    config = checkpoint.config
    head_dtype = head_dtype_of(dtype)
    arrays = {}
    # The largest first: it is in memory twice while it is packed.
    if part.is_last or (part.is_first and checkpoint.tied):
        names = ["wte.weight" if checkpoint.tied else "lm_head.weight"]
        factors_of = partial(Smoothing(checkpoint, head_dtype).factors, "lm_head")
        keep = part.keep("lm_head")
        arrays["lm_head"], factors = pack_layers(checkpoint, names, head_dtype, packers, factors_of, keep)
    else:
        arrays["lm_head"], factors = (
            no_head(config, head_dtype),
            np.ones((1, config.embedding_size), np.float32),
        )
    arrays["head_factors"] = factors[0]
    smoothed = factors[0] if checkpoint.tied else np.ones(config.embedding_size, np.float32)
    arrays["wte_factors"] = np.float32(config.embed_scale) / smoothed
    if part.is_first and not checkpoint.tied:
        arrays["wte"], _ = pack_layers(checkpoint, ["wte.weight"], head_dtype, packers, keep=part.keep("wte"))
    if not config.has_alibi:
        arrays["wpe"] = stacked(checkpoint, ["wpe.weight"])[0] if part.is_first else no_positions(config)
    for kind in KINDS if config.embed_norm and part.is_first else ():
        arrays[f"ln_e_{kind}"] = stacked(checkpoint, [f"ln_e.{kind}"])[0]
    for kind in KINDS if config.final_norm else ():
        divisor = factors if config.embed_dim is None else np.float32(1)
        arrays[f"ln_f_{kind}"] = _divided(checkpoint, ["ln_f"], kind, divisor)[0]
    for name in PROJECTIONS if config.embed_dim else ():
        arrays[name], _ = pack_layers(checkpoint, [f"{name}.weight"], dtype, packers)
    return arrays


def _linear_names(config, ours: str, layers: range) -> list[str]:
    has_mlp = [i for i in layers if ours not in EXPERT_LINEARS or i not in config.expert_layers]
    return [f"h.{i}.{LINEARS[ours]}" for i in has_mlp] or [f"h.0.mlp.experts.0.{EXPERT_LINEARS[ours]}"]


def _experts(checkpoint, dtype: str, packers: Executor) -> Experts:
    config, linears = checkpoint.config, {}
    for ours, part in EXPERT_LINEARS.items():
        names = [
            f"h.{i}.mlp.experts.{e}.{part}" for i in config.expert_layers for e in range(config.num_experts)
        ]
        weight, _ = pack_layers(checkpoint, [f"{name}.weight" for name in names], dtype, packers)
        linears[ours] = Linear(weight, stacked(checkpoint, [f"{name}.bias" for name in names]), NO_FACTORS)
    others = [i for i in range(config.n_layer) if i not in config.expert_layers]
    places = np.empty(config.n_layer, np.int64)
    places[list(config.expert_layers)] = np.arange(len(config.expert_layers))
    places[others] = -1 - np.arange(len(others))
    gate = stacked(checkpoint, [f"h.{i}.mlp.gate.weight" for i in config.expert_layers])
    return Experts(places, gate, **linears, sums_to_one=config.norm_topk_prob)


def no_positions(config) -> np.ndarray:
    """Return positions of a stage that is given its input: -0 adds nothing to any number."""
    return np.full((config.n_positions, config.n_embd), -0.0, np.float32)


def no_head(config, dtype: str):
    return FORMATS[dtype][0](*new_weight(dtype, 1, 1, config.n_embd))


def new_params(config, dtype: str, arrays: dict[str, Any], part: RankShare | None = None) -> Params:
    """Build Params from arrays under their names in `packed.py`. part: None for all."""
    part = part or part_of(config, dtype)
    norms = {norm: Norm(*(arrays[f"{norm}_{kind}"] for kind in KINDS)) for norm in NORMS}
    is_after = config.norm_placement == "post"
    slopes = np.array(config.alibi_slopes[part.heads.start : part.heads.stop], np.float32)
    C, E = config.n_embd, config.embedding_size
    return Params(
        **{name: arrays[name] for name in ("wte_factors", "head_factors")},
        wpe=arrays.get("wpe"),
        alibi=Alibi(slopes) if config.has_alibi else None,
        embed_norm=_one_norm("ln_e", arrays),
        project_in=_projection("project_in", arrays, C, E),
        project_out=_projection("project_out", arrays, E, C),
        experts=arrays.get("experts"),
        **{f"{name}_before": None if is_after else norm for name, norm in norms.items()},
        **{f"{name}_after": norm if is_after else None for name, norm in norms.items()},
        **{
            name: Linear(arrays[name], arrays[f"{name}_bias"], NO_FACTORS)
            for name in LINEARS
            if name != "c_fc"
        },
        c_fc=Linear(arrays["c_fc"], arrays["c_fc_bias"], arrays.get("inner_factors", NO_FACTORS)),
        attended_factors=arrays.get("attended_factors", NO_FACTORS),
        ln_f=_one_norm("ln_f", arrays),
        wte=arrays.get("wte", arrays["lm_head"]),
        lm_head=Linear(arrays["lm_head"], NO_BIAS, NO_FACTORS),
        attention_scales=np.array([config.attention_scale(i) for i in part.layers], np.float32),
        embd_segments=whole(C),
        embedding_segments=whole(E),
        head_segments=_of_rank(head_segments(config, dtype), part),
        inner_segments=_of_rank(inner_segments(config, dtype), part),
        epsilon=np.float32(config.layer_norm_epsilon),
        activation=ACTIVATIONS[config.activation],
    )


def _one_norm(name: str, arrays: dict[str, Any]) -> Norm | None:
    return Norm(*(arrays[f"{name}_{kind}"][None] for kind in KINDS)) if f"{name}_weight" in arrays else None


def _projection(name: str, arrays: dict[str, Any], n: int, k: int) -> Projection | None:
    if name not in arrays:
        return None
    return Projection(Linear(arrays[name], np.zeros((1, n), np.float32), NO_FACTORS), whole(k))


def part_of(
    config, dtype: str, layers: range | None = None, tensor_rank: int = 0, tensor_size: int = 1
) -> RankShare:
    """Return a rank's part of a model, by default all. Ranks share the segments of K."""
    layers = range(config.n_layer) if layers is None else layers
    heads = head_segments(config, dtype)
    inner = inner_segments(config, dtype)
    segments = _share(4, tensor_rank, tensor_size)
    if tensor_size == 1:
        heads = heads[[0, -1]]
        inner = inner[[0, -1]]
        segments = range(1)
    return RankShare(
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


def can_share(config, dtype: str) -> bool:
    """Return whether both sums over K have segments, so that ranks compute the same bits."""
    return min(bounds(config, dtype).size for bounds in (head_segments, inner_segments)) == MAX_SEGMENTS + 1


def head_segments(config, dtype: str) -> np.ndarray:
    return _segments(config.n_head * config.head_size, config.head_size, dtype)


def inner_segments(config, dtype: str) -> np.ndarray:
    return _segments(config.inner_size, K_UNIT[dtype], dtype)


def _of_rank(segments: np.ndarray, part: RankShare) -> np.ndarray:
    if part.tensor_size == 1:
        return segments
    return segments[part.segments.start : part.segments.stop + 1] - segments[part.segments.start]


def _share(count: int, rank: int, ranks: int) -> range:
    bounds = even_bounds(count, ranks)
    return range(bounds[rank], bounds[rank + 1])


def _segments(k: int, unit: int, dtype: str) -> np.ndarray:
    return quarters(k // unit, unit) if unit % K_UNIT[dtype] == 0 and k % unit == 0 else whole(k)


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


def to_panels(factors: np.ndarray) -> np.ndarray:
    layers, n = factors.shape
    padded = np.zeros((layers, panel_count(n) * OUT_TILE), np.float32)
    padded[:, :n] = factors
    return padded
