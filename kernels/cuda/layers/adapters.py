"""LoRA by request: a linear layer's sums, then each token's own low-rank product, and the layer's epilogue."""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32

from ...backend import LINEARS
from ...numbers import stacked_adapters
from ..jit import (
    WARP,
    kernel,
    lane_and_warp,
    let_next_kernel_begin,
    load_fresh,
    wait_for_kernel_before,
    warp_sum,
)
from ..params import DTYPES, STEP, Params, linear_layers
from .epilogue import epilogue_of

ADAPT_WARPS = 8


class Factors(NamedTuple):
    """A linear layer's factors: A adapters, L layers, rank r filled up with zeros."""

    down: Any  # (A, L, r, K) float32
    up: Any  # (A, L, r, features) float32
    num_layers: int
    rank: int
    columns: int  # K


@dataclass(frozen=True)
class Adapters:
    linears: dict[str, Factors]
    of_slot: np.ndarray  # (slots,) int32, which the caller sets; -1: none
    on_device: Any  # of_slot as of the last step


def with_adapters(
    params: Params, config: Any, adapters: list[dict[str, tuple]], num_slots: int
) -> tuple[Params, np.ndarray]:
    of_slot = np.full(num_slots, -1, np.int32)
    found = {}
    for name, layer in linear_layers(config, params.dtype, True, params.share).items():
        modules, columns = layer.modules, layer.columns
        if name not in LINEARS or not any(module in adapter for adapter in adapters for module in modules):
            continue
        factors = stacked_adapters(adapters, modules)
        rank = factors[0].shape[2]
        found[name] = Factors(*map(params.device.array, factors), len(modules), rank, columns)
    return replace(params, adapters=Adapters(found, of_slot, params.device.array(of_slot))), of_slot


@functools.cache
def adapt_kernel(dtype: str, epilogue: str):
    """target = epilogue(sums + up @ (down @ inputs)) by each token's adapter. A block a token. No dtype with scales.

    sums (n, features) float32. Grid: n. Shared memory: rank float32.
    """
    locate, find, finish, read, put = epilogue_of(dtype, epilogue)
    load = DTYPES[dtype].load

    def adapt(target, sums, inputs, weights, layer, width, factors, of_slot, token_slots, sizes):
        let_next_kernel_begin()
        products = cuda.shared.array(0, float32)
        (lane, warp) = lane_and_warp()
        n = cuda.blockIdx.x
        if n >= sizes[0]:
            return
        adapter = of_slot[token_slots[n]]
        first = (adapter * factors.num_layers + layer) * factors.rank
        start = n * (weights.num_steps * STEP)
        wait_for_kernel_before()
        if adapter >= 0:
            for j in range(warp, factors.rank, ADAPT_WARPS):
                total = float32(0)
                row = (first + j) * factors.columns
                for k in range(lane, factors.columns, WARP):
                    total = cuda.fma(load(inputs, start + k), factors.down[row + k], total)
                total = warp_sum(total)
                if lane == 0:
                    products[j] = total
        cuda.syncthreads()
        for feature in range(cuda.threadIdx.x, weights.features, int32(ADAPT_WARPS * WARP)):
            # libNVVM fails at a plain load next to a plain store of float32.
            value = load_fresh(sums, n * weights.features + feature)
            if adapter >= 0:
                added = float32(0)
                for j in range(factors.rank):
                    at_rank = (first + j) * weights.features
                    added = cuda.fma(products[j], factors.up[at_rank + feature], added)
                value += added
            place = locate(target, weights, layer, feature)
            at = find(target, layer, width, n, place)
            put(target, at, read(target, at) + finish(value, place), place)

    return kernel(adapt)
