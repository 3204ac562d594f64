"""LoRA's updates of a step's rows: out += up @ (down @ x), each row by the adapter of its KV slot.

A sum is one chain in a fixed order, without fused operations: a row has the same bits in any batch.
"""

from typing import Any, NamedTuple

import numpy as np

from ...backend import LINEARS
from ..jit import kernel
from ..simd.vector_ir import address, float32_at
from ..team import claim_rows, complete_rows, finish_phase
from .activations import ZERO

C_ATTN, ATTN_PROJ, C_FC, MLP_PROJ = np.arange(len(LINEARS))  # NumPy scalars: see activations.py


class Factors(NamedTuple):
    """Of A adapters, padded with zeros to the greatest rank r, which is less than a product's scratch."""

    down: np.ndarray  # (A, L, K, r) float32
    up: np.ndarray  # (A, L, r, N) float32


class Adapters(NamedTuple):
    of_slot: np.ndarray  # (slots,) int32: the adapter of each slot of the KV cache, -1 for none
    factors: tuple[Factors, ...]  # by C_ATTN, ATTN_PROJ, ...


def with_adapters(
    params: Any, config: Any, adapters: list[dict[str, tuple]], num_slots: int
) -> tuple[Any, np.ndarray]:
    """Return Params with adapters, and `of_slot`. adapters: {name of a linear layer: (down (r, K), up (N, r))}."""
    factors = tuple(_stacked(adapters, config.n_layer, name) for name in LINEARS.values())
    of_slot = np.full(num_slots, -1, np.int32)
    return params._replace(adapters=Adapters(of_slot, factors)), of_slot


def _stacked(adapters: list[dict[str, tuple]], layers: int, name: str) -> Factors:
    found = {
        (a, layer): adapter[f"h.{layer}.{name}"]
        for a, adapter in enumerate(adapters)
        for layer in range(layers)
        if f"h.{layer}.{name}" in adapter
    }
    shapes = [(down.shape[1], up.shape[0], len(down)) for down, up in found.values()]
    k, n, r = map(max, zip(*shapes, strict=True)) if shapes else (0, 0, 0)
    downs = np.zeros((len(adapters), layers, k, r), np.float32)
    ups = np.zeros((len(adapters), layers, r, n), np.float32)
    for place, (down, up) in found.items():
        downs[place][:, : len(down)] = down.T
        ups[place][: len(down)] = up.T
    return Factors(downs, ups)


@kernel
def add_adapters(team, out, x, adapters, kind, layer, slots):
    """out (N, n) += each row's update of x (N, K). A phase, if there are adapters.

    In the residual stream it comes before hooks set the stream aside: a sum has the same bits with and without hooks.
    """
    if adapters is None:
        return
    down = adapters.factors[kind].down
    up = adapters.factors[kind].up
    low = float32_at(address(team.scratch), up.shape[2])
    k = down.shape[2]
    first, last = claim_rows(team, slots.size)
    while first >= 0:
        for i in range(first, last):
            adapter = adapters.of_slot[slots[i]]
            row = float32_at(address(out) + i * out.strides[0], out.shape[1])
            if adapter >= 0 and low.size:
                values = float32_at(address(x) + i * x.strides[0], k)
                _multiply(row, values, down[adapter, layer], up[adapter, layer], low)
        complete_rows(team, slots.size)
        first, last = claim_rows(team, slots.size)
    finish_phase(team)


@kernel
def _multiply(row, values, down, up, low):
    low[:] = ZERO
    for k in range(values.size):
        for j in range(low.size):
            low[j] += values[k] * down[k, j]
    for j in range(low.size):
        for n in range(row.size):
            row[n] += low[j] * up[j, n]
