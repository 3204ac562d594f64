"""The arrays of a weight in each dtype, and packing them in several threads."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tinygpt.kernels.cpu.layers.formats import BFloat16Weight, Float32Weight, Int4Weight, Int8Weight
from tinygpt.kernels.cpu.packing.pack import pack_bfloat16, pack_float32, pack_int4, pack_int8, panel_count
from tinygpt.kernels.cpu.simd.grouped_tiles import SCALE_GROUP, WEIGHT_GROUP
from tinygpt.kernels.cpu.simd.panels import zeros
from tinygpt.kernels.cpu.simd.tiles import OUT_TILE

PACK_SHARES = 16  # of a matrix


class Packers:
    def __init__(self, threads: int):
        self._pool = ThreadPoolExecutor(threads)

    def __enter__(self) -> "Packers":
        return self

    def __exit__(self, *error) -> None:
        self._pool.shutdown()

    def pack(self, kernel: Callable, panels: int, *arguments) -> None:
        bounds = [i * panels // PACK_SHARES for i in range(PACK_SHARES + 1)]
        for share in [self._pool.submit(kernel, *arguments, *pair) for pair in itertools.pairwise(bounds)]:
            share.result()


FORMATS = {
    "float32": (Float32Weight, pack_float32),
    "bfloat16": (BFloat16Weight, pack_bfloat16),
    "int8": (Int8Weight, pack_int8),
    "int4": (Int4Weight, pack_int4),
}
DTYPES = tuple(FORMATS)
K_UNIT = {
    "float32": 1,
    "bfloat16": 2,
    "int8": SCALE_GROUP,
    "int4": SCALE_GROUP,
}  # the unit of segments of K


def head_dtype_of(dtype: str) -> str:
    """Return the dtype of wte and the head: four bits are too few for them."""
    return "int8" if dtype == "int4" else dtype


def pack_layers(
    checkpoint,
    names,
    dtype: str,
    packers: Packers,
    factors_of: Callable | None = None,
    keep: Callable | None = None,
) -> tuple[tuple, np.ndarray]:
    """Pack weights of one shape (N, K). Return their record and factors (L, K). keep(weight) cuts a layer."""
    n, k = checkpoint.tensor(names[0]).shape
    record, pack = FORMATS[dtype]
    arrays, kept = new_weight(dtype, 1 if keep else len(names), n, k), None
    all_factors = np.ones((len(names), k), np.float32)
    for layer, name in enumerate(names):
        weight = checkpoint.tensor(name)  # (N, K)
        if factors_of is not None:
            all_factors[layer] = factors_of(layer, weight)
        is_transposed = not weight.flags.c_contiguous
        source = np.ascontiguousarray(weight.T if is_transposed else weight)
        places = [array[0 if keep else layer] for array in arrays]
        packers.pack(pack, panel_count(n), source, is_transposed, all_factors[layer], *places)
        checkpoint.release(name)
        if keep:
            piece = keep(record(*arrays))
            kept = kept or [zeros((len(names), *array.shape[1:]), array.dtype) for array in piece]
            for target, array in zip(kept, piece, strict=True):
                target[layer] = array[0]
    return record(*(kept or arrays)), all_factors


def new_weight(dtype: str, layers: int, n: int, k: int) -> tuple[np.ndarray, ...]:
    return tuple(zeros(shape, array_dtype) for shape, array_dtype in weight_layout(dtype, layers, n, k))


def weight_layout(dtype: str, layers: int, n: int, k: int) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
    """Return shape and dtype of each array of a record, for weights (N, K)."""
    p, groups = panel_count(n), -(-k // SCALE_GROUP)
    if dtype == "float32":
        return (((layers, p, k, OUT_TILE), np.dtype(np.float32)),)
    if dtype == "bfloat16":
        return (((layers, p, -(-k // 2), OUT_TILE, 2), np.dtype(np.uint16)),)
    if dtype == "int8":
        panels = (layers, p, groups * SCALE_GROUP // 4, OUT_TILE, 4)
        return (panels, np.dtype(np.uint8)), ((layers, p * OUT_TILE), np.dtype(np.float32))
    panels = (layers, p, groups * SCALE_GROUP // 8, OUT_TILE, 4)
    return (panels, np.dtype(np.uint8)), (
        (layers, p, groups * SCALE_GROUP // WEIGHT_GROUP, 2, OUT_TILE),
        np.dtype(np.uint16),
    )
