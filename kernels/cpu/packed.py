"""Params as named arrays, which is how a file keeps them, and back: nothing is computed on the way."""

import numpy as np

from tinygpt.kernels.cpu.model import Params
from tinygpt.kernels.cpu.params import FORMATS, KINDS, LAYER_NORMS, LINEARS, head_dtype_of, new_params, weight_layout
from tinygpt.kernels.cpu.simd.tiles import GROUP, PANEL, WEIGHT_GROUP

# What a reader must share with the writer. Count `packing` up when the same layout comes to mean other numbers.
PACKING = {"packing": 2, "panel": PANEL, "group": GROUP, "weight_group": WEIGHT_GROUP}


def arrays_of(params: Params) -> dict[str, np.ndarray]:
    """Every array that comes from the checkpoint, a record's as c_attn.panels and so on. A tied wte is left out."""
    arrays = {}
    for name in _stored_fields(params.wte is params.lm_head):
        value = getattr(params, name)
        if isinstance(value, np.ndarray):
            arrays[name] = value
        else:
            arrays |= {f"{name}.{field}": array for field, array in value._asdict().items()}
    return arrays


def layout_of(config, dtype: str, tied: bool) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """The shape and the dtype of each of `arrays_of`, for this model."""
    C, F, V, L = config.n_embd, config.inner_size, config.vocab_size, config.n_layer
    float32 = np.dtype(np.float32)
    layout = {name: ((C,), float32) for name in ("wte_factors", "head_factors")}
    layout |= {"wpe": ((config.n_positions, C), float32)}
    layout |= {f"{norm}_{kind}": ((L, C), float32) for norm in LAYER_NORMS for kind in KINDS}
    layout |= {f"ln_f_{kind}": ((C,), float32) for kind in KINDS}
    for name, (n, k) in {"c_attn": (3 * C, C), "attn_proj": (C, C), "c_fc": (F, C), "mlp_proj": (C, F)}.items():
        layout |= _record_layout(name, dtype, L, n, k) | {f"{name}_bias": ((L, n), float32)}
    for name in ["lm_head"] if tied else ["lm_head", "wte"]:
        layout |= _record_layout(name, head_dtype_of(dtype), 1, V, C)
    return layout


def params_of(arrays: dict[str, np.ndarray], config, dtype: str) -> Params:
    """The Params whose `arrays_of` these are; they are used as they lie, so panels start on a vector's boundary."""
    fields = {name: array for name, array in arrays.items() if "." not in name}
    for name in [*LINEARS, "lm_head", "wte"]:
        record, _ = FORMATS[dtype if name in LINEARS else head_dtype_of(dtype)]
        if f"{name}.panels" in arrays:
            fields[name] = record(*(arrays[f"{name}.{field}"] for field in record._fields))
    return new_params(config, dtype, {"wte": fields["lm_head"], **fields})


def _stored_fields(tied: bool) -> list[str]:
    computed = ("attention_scales", "embd_segments", "head_segments", "inner_segments", "epsilon", "activation")
    return [name for name in Params._fields if name not in computed and not (tied and name == "wte")]


def _record_layout(name: str, dtype: str, layers: int, n: int, k: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    record, _ = FORMATS[dtype]
    return {
        f"{name}.{field}": array
        for field, array in zip(record._fields, weight_layout(dtype, layers, n, k), strict=True)
    }
