"""Params as named arrays, as a file keeps them, and back."""

import numpy as np

from ..backend import KINDS, LINEARS, NORMS
from .packing.share import RankShare
from .packing.smoothing import BALANCE
from .packing.weights import FORMATS, head_dtype_of, panel_count, weight_layout
from .params import FACTORS_BEFORE, PROJECTIONS, Params, new_params, no_head, no_positions, to_panels
from .simd.grouped_tiles import SCALE_GROUP, WEIGHT_GROUP
from .simd.tiles import OUT_TILE

# A reader refuses other values. Count `packing` up when the same layout means other numbers.
PACKING = {"packing": 3, "panel": OUT_TILE, "group": SCALE_GROUP, "weight_group": WEIGHT_GROUP}


def arrays_of(params: Params) -> dict[str, np.ndarray]:
    """Return a packed file's arrays, a weight's as c_attn.panels; a tied wte is left out."""
    arrays = {name: getattr(params, name) for name in ("wte_factors", "head_factors")}
    arrays |= {} if params.wpe is None else {"wpe": params.wpe}
    once = {"ln_f": params.ln_f, "ln_e": params.embed_norm}
    norms = {norm: params.norm(norm) for norm in NORMS}
    norms |= {norm: [array[0] for array in found] for norm, found in once.items() if found is not None}
    arrays |= {
        f"{name}_{kind}": array
        for name, norm in norms.items()
        for kind, array in zip(KINDS, norm, strict=True)
    }
    arrays |= {f"{name}_bias": getattr(params, name).bias for name in LINEARS}
    factors = {"attended_factors": params.attended_factors, "inner_factors": params.c_fc.factors}
    arrays |= {name: array for name, array in factors.items() if array.size}
    weights = {name: getattr(params, name).weight for name in (*LINEARS, "lm_head")} | {"wte": params.wte}
    projections = {name: getattr(params, name) for name in PROJECTIONS}
    weights |= {name: found.linear.weight for name, found in projections.items() if found is not None}
    if params.wte is params.lm_head.weight:
        del weights["wte"]
    return arrays | {
        f"{name}.{field}": array for name, w in weights.items() for field, array in w._asdict().items()
    }


def layout_of(config, dtype: str, tied: bool) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    C = config.n_embd
    F = config.inner_size
    V = config.vocab_size
    L = config.n_layer
    float32 = np.dtype(np.float32)
    E = config.embedding_size
    once = ["ln_f"] * config.final_norm + ["ln_e"] * config.embed_norm
    layout = {name: ((E,), float32) for name in ("wte_factors", "head_factors")}
    layout |= {} if config.has_alibi else {"wpe": ((config.n_positions, C), float32)}
    layout |= {f"{norm}_{kind}": ((L, C), float32) for norm in NORMS for kind in KINDS}
    layout |= {f"{norm}_{kind}": ((C,), float32) for norm in once for kind in KINDS}
    for name, (n, k) in {"project_in": (C, E), "project_out": (E, C)}.items() if config.embed_dim else ():
        layout |= _weight_layout(name, dtype, 1, n, k)
    for name, (n, k) in {
        "c_attn": (3 * C, C),
        "attn_proj": (C, C),
        "c_fc": (F, C),
        "mlp_proj": (C, F),
    }.items():
        layout |= _weight_layout(name, dtype, L, n, k) | {f"{name}_bias": ((L, n), float32)}
    if dtype in BALANCE:
        sizes = {"attended_factors": C, "inner_factors": F}
        layout |= {name: ((L, panel_count(size) * OUT_TILE), float32) for name, size in sizes.items()}
    for name in ["lm_head"] if tied else ["lm_head", "wte"]:
        layout |= _weight_layout(name, head_dtype_of(dtype), 1, V, E)
    return layout


def params_of(arrays: dict[str, np.ndarray], config, dtype: str) -> Params:
    """Return the Params of `arrays_of`, without copies: panels must start on a vector's boundary."""
    given = {name: array for name, array in arrays.items() if "." not in name}
    for name in [*LINEARS, *PROJECTIONS, "lm_head", "wte"]:
        record, _ = FORMATS[head_dtype_of(dtype) if name in ("lm_head", "wte") else dtype]
        if f"{name}.panels" in arrays:
            given[name] = record(*(arrays[f"{name}.{field}"] for field in record._fields))
    return new_params(config, dtype, given)


def params_of_part(arrays: dict[str, np.ndarray], config, dtype: str, part: RankShare) -> Params:
    whole = params_of(arrays, config, dtype)
    layers = slice(part.layers.start, part.layers.stop)
    given = {name: getattr(whole, name) for name in ("wte_factors", "head_factors")}
    if not config.has_alibi:
        given["wpe"] = whole.wpe if part.is_first else no_positions(config)
    for norm in NORMS:
        given |= {
            f"{norm}_{kind}": array[layers] for kind, array in zip(KINDS, whole.norm(norm), strict=True)
        }
    once = {"ln_f": whole.ln_f, "ln_e": whole.embed_norm if part.is_first else None}
    for norm, found in once.items():
        if found is not None:
            given |= {f"{norm}_{kind}": array[0] for kind, array in zip(KINDS, found, strict=True)}
    for name in LINEARS:
        linear = getattr(whole, name)
        given[name] = part.weight(name, type(linear.weight)(*(array[layers] for array in linear.weight)))
        given[f"{name}_bias"] = part.values(name, linear.bias[layers])
    factors = {"attn_proj": whole.attended_factors, "mlp_proj": whole.c_fc.factors}
    given |= {
        FACTORS_BEFORE[name]: to_panels(part.factors(name, f[layers]))
        for name, f in factors.items()
        if f.size
    }
    is_tied = whole.wte is whole.lm_head.weight
    if part.is_last or (part.is_first and is_tied):
        given["lm_head"] = part.weight("lm_head", whole.lm_head.weight)
    else:
        given["lm_head"] = no_head(config, head_dtype_of(dtype))
    if part.is_first and not is_tied:
        given["wte"] = part.weight("wte", whole.wte)
    return new_params(config, dtype, given, part)


def _weight_layout(
    name: str, dtype: str, layers: int, n: int, k: int
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    record, _ = FORMATS[dtype]
    arrays = zip(record._fields, weight_layout(dtype, layers, n, k), strict=True)
    return {f"{name}.{field}": array for field, array in arrays}
