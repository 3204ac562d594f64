"""A model's arrays: one table, from which loading, converted files and ranks derive; and Params, which kernels read."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..backend import KINDS, LINEARS, NORMS
from ..numbers import even_run
from ..rank_share import RankShare
from .dtypes import DTYPES, new_weight, panel_count, unpack, weight_layout
from .layers.activations import ACTIVATIONS
from .layers.linear import MAX_SEGMENTS, Linear, quarters, whole
from .simd.tiles import OUT_TILE
from .simd.vector_ir import SCALE_GROUP, WEIGHT_GROUP, zeros

# Numbers of a converted file: a reader refuses other values. Count `packing` up when one layout means other numbers.
PACKING = {"packing": 3, "panel": OUT_TILE, "group": SCALE_GROUP, "weight_group": WEIGHT_GROUP}
# The smoothing factors of a c_proj's input.
FACTORS_BEFORE = {"attn_proj": "attended_factors", "mlp_proj": "inner_factors"}
NO_BIAS = NO_FACTORS = np.empty((1, 0), np.float32)
COLUMNS, INPUTS = "columns", "inputs"
FLOAT32 = np.dtype(np.float32)
ALL_POSITIONS = 2**31 - 1


class Norm(NamedTuple):
    weight: np.ndarray  # (L, C) float32
    bias: np.ndarray  # (L, C) float32


class Projection(NamedTuple):
    """A matrix between the embeddings' width and the model's."""

    linear: Linear
    segments: np.ndarray  # (2,)  all of K


class Distances(NamedTuple):
    """What a key's distance from a query does to its score."""

    slopes: np.ndarray  # (H,) float32: ALiBi's, or 0
    windows: np.ndarray  # (L,) int64: how many positions a query sees


class Experts(NamedTuple):
    places: np.ndarray  # (L,) int64: place among the layers with experts, or -1 - place among the others
    gate: np.ndarray  # (M, E, C) float32, of M layers with experts
    c_fc: Linear  # (M * E, F, C)
    mlp_proj: Linear  # (M * E, C, F)
    sums_to_one: bool  # whether chosen experts' weights are scaled


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
    distances: Any  # Distances, of ALiBi or local layers
    attention_scales: np.ndarray  # (L,)
    embd_segments: np.ndarray  # (2,)  all of C
    embedding_segments: np.ndarray  # (2,)  all of E
    head_segments: np.ndarray  # (5,)  C in four runs of whole heads
    inner_segments: np.ndarray  # (5,)  F in four runs; a rank has some of them
    epsilon: np.float32
    activation: int
    adapters: Any = None  # Adapters


@dataclass(frozen=True)
class Array:
    """An array of float32, or a weight in panels."""

    shape: tuple[int, ...]  # of a layer; a weight's (N, K)
    layers: int = 0  # 0: the model has one
    dtype: str | None = None  # of a weight
    side: str = ""  # on which a tensor-parallel rank keeps some: COLUMNS or INPUTS
    run: str = ""  # that it keeps: of RankShare.runs
    stages: str = ""  # of a pipeline that have it: "first", "last" or "ends"; else all

    def layout(self, name: str) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return shape and dtype of each array in a file: a weight's are c_attn.panels and so on."""
        if self.dtype is None:
            return {name: ((self.layers, *self.shape) if self.layers else self.shape, FLOAT32)}
        layout = weight_layout(self.dtype, max(self.layers, 1), *self.shape)
        return {f"{name}.{field}": array for field, array in layout.items()}

    def of_file(self, name: str, arrays: dict[str, np.ndarray]) -> Any:
        """Return the array, or the weight's record, without copies."""
        if self.dtype is None:
            return arrays[name]
        return DTYPES[self.dtype].record(*(arrays[place] for place in self.layout(name)))


def model_arrays(config, dtype: str, tied: bool) -> dict[str, Array]:
    """Return a model's arrays in the order of a converted file; experts are apart."""
    C = config.n_embd
    F = config.inner_size
    V = config.vocab_size
    E = config.embedding_size
    L = config.n_layer
    head = DTYPES[dtype].head
    linears = {
        "c_attn": Array((3 * C, C), L, dtype, COLUMNS, "qkv"),
        "attn_proj": Array((C, C), L, dtype, INPUTS, "heads"),
        "c_fc": Array((F, C), L, dtype, COLUMNS, "inner"),
        "mlp_proj": Array((C, F), L, dtype, INPUTS, "inner"),
    }
    arrays = {"wte_factors": Array((E,)), "head_factors": Array((E,))}
    if not config.has_alibi:
        arrays["wpe"] = Array((config.n_positions, C), stages="first")
    arrays |= {f"{norm}_{kind}": Array((C,), L) for norm in NORMS for kind in KINDS}
    if config.final_norm:
        arrays |= {f"ln_f_{kind}": Array((C,)) for kind in KINDS}
    if config.embed_norm:
        arrays |= {f"ln_e_{kind}": Array((C,), stages="first") for kind in KINDS}
    for name, linear in linears.items():
        run = (COLUMNS, linear.run) if linear.side == COLUMNS else ()
        arrays[f"{name}_bias"] = Array(linear.shape[:1], L, None, *run)
    if DTYPES[dtype].balance is not None:
        for name, factors in FACTORS_BEFORE.items():
            columns = panel_count(linears[name].shape[1]) * OUT_TILE
            arrays[factors] = Array((columns,), L, None, INPUTS, linears[name].run)
    arrays |= linears
    arrays["lm_head"] = Array((V, E), 0, head, COLUMNS, "vocab", "ends" if tied else "last")
    if not tied:
        arrays["wte"] = Array((V, E), 0, head, COLUMNS, "vocab", "first")
    if config.embed_dim:
        arrays |= {"project_in": Array((C, E), 0, dtype), "project_out": Array((E, C), 0, dtype)}
    return arrays


def layout_of(config, dtype: str, tied: bool) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return shape and dtype of each array of a converted file."""
    table = model_arrays(config, dtype, tied).items()
    return {place: part for name, array in table for place, part in array.layout(name).items()}


def to_file(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return a converted file's arrays, of those that `load_arrays` returns."""
    parts = {}
    for name, array in arrays.items():
        weight = {"": array} if isinstance(array, np.ndarray) else array._asdict()
        parts |= {f"{name}.{field}" if field else name: part for field, part in weight.items()}
    return parts


def params_of(arrays: dict[str, np.ndarray], config, dtype: str, share: "CpuShare | None" = None) -> Params:
    """Return Params of a file's arrays, without copies: panels must start on a vector's boundary. share: a rank's."""
    share = share or share_of(config, dtype)
    table = model_arrays(config, dtype, "wte.panels" not in arrays)
    parts = {
        name: share.cut(array, array.of_file(name, arrays))
        for name, array in table.items()
        if share.has(array)
    }
    return new_params(config, dtype, parts, share)


def parameter_of(arrays: dict[str, np.ndarray], config, dtype: str, name: str) -> np.ndarray:
    """Return a parameter of a file's arrays, by its name in a checkpoint, in float32.

    A layer norm and the linear layer after it keep the factors that even out the channels between them.
    """
    table = model_arrays(config, dtype, "wte.panels" not in arrays)
    *place, kind = name.split(".")
    is_of_layer = place[0] == "h"
    layer = int(place[1]) if is_of_layer else 0
    part = ".".join(place[2:]) if is_of_layer else place[0]
    ours = next((ours for ours, theirs in LINEARS.items() if theirs == part), part)
    if ours == "wte" and ours not in table:  # tied
        ours = "lm_head"
    place = ours if kind == "weight" and ours in table else f"{ours}_{kind}"
    array = table[place]
    value = array.of_file(place, arrays)
    if array.dtype is not None:
        n, k = array.shape
        value = unpack(array.dtype, tuple(part[layer] for part in value), n, k)
        if ours in FACTORS_BEFORE and FACTORS_BEFORE[ours] in table:
            value = value * arrays[FACTORS_BEFORE[ours]][layer, :k]
        return value / arrays["head_factors"] if ours == "lm_head" else value
    if ours == "ln_f" and config.embed_dim is None:
        return value * arrays["head_factors"]
    return value[layer] if array.layers else value


def new_params(config, dtype: str, arrays: dict[str, Any], share: "CpuShare") -> Params:
    """Build Params from arrays by their names in `model_arrays`."""
    norms = {norm: Norm(*(arrays[f"{norm}_{kind}"] for kind in KINDS)) for norm in NORMS}
    is_after = config.norm_placement == "post"
    C, E = config.n_embd, config.embedding_size
    factors = {"c_fc": arrays.get("inner_factors", NO_FACTORS)}
    head = arrays.get("lm_head") or new_weight(DTYPES[dtype].head, 1, 1, C)  # of a stage without
    return Params(
        **{name: arrays[name] for name in ("wte_factors", "head_factors")},
        wpe=arrays["wpe"] if "wpe" in arrays else _no_positions(config),
        distances=_distances(config, share),
        embed_norm=_one_norm("ln_e", arrays),
        project_in=_projection("project_in", arrays, C, E),
        project_out=_projection("project_out", arrays, E, C),
        experts=arrays.get("experts"),
        **{f"{name}_before": None if is_after else norm for name, norm in norms.items()},
        **{f"{name}_after": norm if is_after else None for name, norm in norms.items()},
        **{
            name: Linear(arrays[name], arrays[f"{name}_bias"], factors.get(name, NO_FACTORS))
            for name in LINEARS
        },
        attended_factors=arrays.get("attended_factors", NO_FACTORS),
        ln_f=_one_norm("ln_f", arrays),
        wte=arrays.get("wte", head),
        lm_head=Linear(head, NO_BIAS, NO_FACTORS),
        attention_scales=np.array([config.attention(i).scale for i in share.layers], np.float32),
        embd_segments=whole(C),
        embedding_segments=whole(E),
        head_segments=share.segments_of(head_segments(config, dtype)),
        inner_segments=share.segments_of(inner_segments(config, dtype)),
        epsilon=np.float32(config.layer_norm_epsilon),
        activation=ACTIVATIONS[config.activation],
    )


def _distances(config, share: "CpuShare") -> Distances | None:
    if not (config.has_alibi or config.local_layers):
        return None
    slopes = config.alibi_slopes or (0.0,) * config.n_head
    windows = [config.attention(i).window or ALL_POSITIONS for i in share.layers]
    return Distances(
        np.array(slopes[share.heads.start : share.heads.stop], np.float32), np.array(windows, np.int64)
    )


def _no_positions(config) -> np.ndarray | None:
    """Return positions of a stage that is given its input: -0 adds nothing to any number. None: ALiBi."""
    if config.has_alibi:
        return None
    return np.full((config.n_positions, config.n_embd), -0.0, np.float32)


def _one_norm(name: str, arrays: dict[str, Any]) -> Norm | None:
    return Norm(*(arrays[f"{name}_{kind}"][None] for kind in KINDS)) if f"{name}_weight" in arrays else None


def _projection(name: str, arrays: dict[str, Any], n: int, k: int) -> Projection | None:
    if name not in arrays:
        return None
    return Projection(Linear(arrays[name], np.zeros((1, n), np.float32), NO_FACTORS), whole(k))


def can_share(config, dtype: str) -> bool:
    """Return whether both sums over K have segments, so that ranks compute the same bits."""
    return min(bounds(config, dtype).size for bounds in (head_segments, inner_segments)) == MAX_SEGMENTS + 1


def head_segments(config, dtype: str) -> np.ndarray:
    return _segments(config.n_head * config.head_size, config.head_size, dtype)


def inner_segments(config, dtype: str) -> np.ndarray:
    return _segments(config.inner_size, DTYPES[dtype].k_unit, dtype)


def _segments(k: int, unit: int, dtype: str) -> np.ndarray:
    return quarters(k // unit, unit) if unit % DTYPES[dtype].k_unit == 0 and k % unit == 0 else whole(k)


class CpuShare(RankShare):
    """Weights are cut from whole packed weights: scales and factors are the same on every rank."""

    @property
    def segments(self) -> range:
        """Return which of the four segments of K are here."""
        return even_run(4, self.tensor_rank, self.tensor_size)

    def has(self, array: Array) -> bool:
        ends = {"first": self.is_first, "last": self.is_last, "ends": self.is_first or self.is_last}
        return ends.get(array.stages, True)

    def cut(self, array: Array, value: Any) -> Any:
        """Return this rank's part of an array or of a weight's record of all layers."""
        if array.layers:
            layers = slice(self.layers.start, self.layers.stop)
            is_array = isinstance(value, np.ndarray)
            value = value[layers] if is_array else type(value)(*(part[layers] for part in value))
        return self.keep(array, value)

    def keep(self, array: Array, value: Any) -> Any:
        """Return what a tensor-parallel rank has of this stage's layers."""
        if self.tensor_size == 1 or not array.side:
            return value
        runs = self.runs[array.run]
        if array.dtype is not None:
            return _cut_weight(array, value, runs)
        kept = np.concatenate([value[:, run.start : run.stop] for run in runs], axis=1)
        return to_panels(kept) if array.side == INPUTS else kept

    def segments_of(self, segments: np.ndarray) -> np.ndarray:
        if self.tensor_size == 1:
            return segments
        return segments[self.segments.start : self.segments.stop + 1] - segments[self.segments.start]


def share_of(
    config, dtype: str, layers: range | None = None, tensor_rank: int = 0, tensor_size: int = 1
) -> CpuShare:
    """Return a rank's share of a model, by default all. Ranks share the segments of K."""
    share = CpuShare.even(config, layers, tensor_rank, tensor_size)
    if tensor_size == 1:
        return share
    bounds = [share.segments.start, share.segments.stop]
    heads = head_segments(config, dtype)[bounds] // config.head_size
    inner = inner_segments(config, dtype)[bounds]
    return replace(share, heads=range(*heads.tolist()), inner=range(*inner.tolist()))


def _cut_weight(array: Array, weight: Any, runs: list[range]) -> Any:
    cut = {}
    for name, field in DTYPES[array.dtype].fields.items():
        part = getattr(weight, name)
        if array.side == COLUMNS:
            cut[name] = _take_columns(part, field, runs)
        elif field.per_index:
            (inputs,) = runs
            part = part[:, :, inputs.start // field.per_index : -(-inputs.stop // field.per_index)]
            cut[name] = zeros(part.shape, part.dtype)
            cut[name][...] = part
        else:
            cut[name] = part
    return type(weight)(**cut)


def _take_columns(array: np.ndarray, field: Any, columns: list[range]) -> np.ndarray:
    """Return an array of panels of these columns, end to end."""
    if not field.per_index:
        by_panel = array.reshape(len(array), -1, OUT_TILE)
        return take_columns(by_panel, 2, columns).reshape(len(array), -1)
    return take_columns(array, field.column_axis, columns)


def take_columns(array: np.ndarray, axis: int, columns: list[range]) -> np.ndarray:
    """Return panels (L, P, ...) of these columns, end to end. axis: a panel's columns."""
    count = sum(map(len, columns))
    taken = zeros((array.shape[0], -(-count // OUT_TILE), *array.shape[2:]), array.dtype)
    source = np.moveaxis(array, axis, 2)
    target = np.moveaxis(taken, axis, 2)
    at = 0
    for run in columns:
        first = run.start
        while first < run.stop:
            size = min(OUT_TILE - first % OUT_TILE, OUT_TILE - at % OUT_TILE, run.stop - first)
            piece = source[:, first // OUT_TILE, first % OUT_TILE : first % OUT_TILE + size]
            target[:, at // OUT_TILE, at % OUT_TILE : at % OUT_TILE + size] = piece
            first, at = first + size, at + size
    return taken


def to_panels(factors: np.ndarray) -> np.ndarray:
    """Return factors (L, K) with zeros up to whole panels."""
    return np.pad(factors, [(0, 0), (0, -factors.shape[1] % OUT_TILE)])
