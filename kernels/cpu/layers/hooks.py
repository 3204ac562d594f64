"""Points at which a step calls Python between two phases, while all threads wait.

Only steps whose buffers hold a Look have them; the type decides, so that others have no trace of them.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..jit import inline, kernel, overload_by_dtype
from ..simd.vector_ir import address, float32_at
from ..team import claim, claim_rows, complete, complete_rows, finish_phase
from .activations import NONE, activate
from .adapters import C_FC, LowRank, add_low_rank
from .linear import REPLACE, Linear, linear, linear_to_operand
from .operands import quantize_activations

# Points in the order of a layer; the stream after the last layer is that of layer L.
STREAM, HEADS, ATTENDED, MIDDLE, INNER, ACTIVATED, SUMMAND = POINTS = np.arange(7)
ONE = np.int64(1)


class Hooks(NamedTuple):
    call: np.ndarray  # (1,) int64: the address of a C function of a point and a layer
    wanted: np.ndarray  # (points, L + 1) int8: whether it is called there
    first: (
        np.ndarray
    )  # (1,) int64: the layer to begin with. A team's steps of the same arguments have the same.
    inner: np.ndarray  # (N, F) float32: input and output of the activation


@intrinsic
def _call(typingctx, function, point, layer):
    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 2)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@kernel
def call_look(team, looking, point, layer):
    """Call Python, if this point is wanted. A phase of one item."""
    if claim(team, ONE) >= 0:
        if looking.wanted[point, layer]:
            _call(looking.call[0], point, np.int64(layer))
        complete(team, ONE)
    finish_phase(team)


def _look(team, looking, point, layer):
    call_look(team, looking, point, layer)


def _nothing(team, looking, point, layer):
    pass


def _given_layer(looking):
    return looking.first[0]


def _layer_0(looking):
    return np.int64(0)


look = overload_by_dtype({Hooks: _look}, otherwise=_nothing, argument=1)
first_layer = overload_by_dtype({Hooks: _given_layer}, otherwise=_layer_0)


@kernel
def activate_rows(team, x, kind):
    first, last = claim_rows(team, x.shape[0])
    while first >= 0:
        for n in range(first, last):
            activate(float32_at(address(x) + n * x.shape[1] * 4, x.shape[1]), kind)
        complete_rows(team, x.shape[0])
        first, last = claim_rows(team, x.shape[0])
    finish_phase(team)


@inline
def _in_parts(
    team, looking, low_rank, slots, inner, out, x, linears, no_factors, row, layer, segments, activation
):
    linear(team, inner, x, Linear(linears.weight, linears.bias, no_factors), row, segments, NONE, REPLACE)
    add_low_rank(team, inner, x.values, low_rank, C_FC, layer, slots)
    look(team, looking, INNER, layer)
    activate_rows(team, inner, activation)
    look(team, looking, ACTIVATED, layer)
    quantize_activations(team, out, inner, linears.factors, row)


def _seen(team, looking, low_rank, slots, out, x, linears, factors, row, layer, segments, activation):
    inner = looking.inner[: slots.size]
    _in_parts(
        team, looking, low_rank, slots, inner, out, x, linears, factors, row, layer, segments, activation
    )


def _adapted(team, looking, low_rank, slots, out, x, linears, factors, row, layer, segments, activation):
    inner = out.values[: slots.size]
    _in_parts(
        team, looking, low_rank, slots, inner, out, x, linears, factors, row, layer, segments, activation
    )


def _at_once(team, looking, low_rank, slots, out, x, linears, factors, row, layer, segments, activation):
    linear_to_operand(team, out, x, linears, row, segments, activation, slots.size)


def _unseen(team, looking, low_rank, slots, out, x, linears, factors, row, layer, segments, activation):
    _adapted_or_at_once(
        team, looking, low_rank, slots, out, x, linears, factors, row, layer, segments, activation
    )


_adapted_or_at_once = overload_by_dtype({LowRank: _adapted}, otherwise=_at_once, argument=2)
# The first half of an MLP, `row` of linears: in one phase, or with adapters, and looks before and after its activation.
inner_linear = overload_by_dtype({Hooks: _seen}, otherwise=_unseen, argument=1)
