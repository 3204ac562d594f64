"""Points at which a step calls Python between two phases, while all threads wait: a caller's Hooks see its buffers.

Only steps whose buffers hold HookBuffers have them; the type decides, so that others have no trace of them.
"""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from ..jit import kernel
from ..simd.vector_ir import I64, address, emits, float32_at, zeros
from ..team import claim, claim_rows, complete, complete_rows, finish_phase
from .activations import NONE, activate
from .linear import C_FC, REPLACE, Linear, add_adapters, linear, linear_to_operand
from .operands import Float32Operand, quantize_activations

# Points in the order of a layer; the stream after the last layer is that of layer L.
STREAM, HEADS, ATTENDED, MIDDLE, INNER, ACTIVATED, SUMMAND = POINTS = np.arange(7)
# The points at which each kind is seen, and how many layers later: a summand is set aside, then seen and added.
SEEN_AT = {
    "resid_pre": [(STREAM, 0)],
    **{kind: [(HEADS, 0)] for kind in "qkv"},
    "z": [(ATTENDED, 0)],
    "attn_out": [(ATTENDED, 0), (MIDDLE, 0)],
    "resid_mid": [(MIDDLE, 0)],
    "pre": [(INNER, 0)],
    "post": [(ACTIVATED, 0)],
    "mlp_out": [(SUMMAND, 0), (STREAM, 1)],
    "resid_post": [(STREAM, 1)],
}
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)  # of a point and a layer
ONE = np.int64(1)
MINUS_ZERO = np.float32(-0.0)


class HookBuffers(NamedTuple):
    call: np.ndarray  # (1,) int64: the address of a CALLBACK
    wanted: np.ndarray  # (points, L + 1) int8: whether it is called there
    first: np.ndarray  # (1,) int64: the layer to begin with, one for a team's steps of the same arguments
    inner: np.ndarray  # (N, F) float32: input and output of the activation


@emits("void", "int64", "int64", "int64")
def _call(builder, function, point, layer):
    kind = ir.FunctionType(ir.VoidType(), [I64, I64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [point, layer])


@kernel
def call_hooks(team, hooks, point, layer):
    """Call Python, if this point is wanted. A phase of one item, if there are hooks."""
    if hooks is None:
        return
    if claim(team, ONE) >= 0:
        if hooks.wanted[point, layer]:
            _call(hooks.call[0], point, np.int64(layer))
        complete(team, ONE)
    finish_phase(team)


@kernel
def first_layer(hooks):
    if hooks is None:
        return np.int64(0)
    return hooks.first[0]


@kernel
def inner_linear(team, hooks, adapters, params, row, layer, slots, buffers):
    """Compute the first half of an MLP, `row` of its linears, with adapters and hooks around its activation."""
    x = buffers.normed
    out = buffers.inner
    if hooks is None:
        if adapters is None:
            segments = params.embd_segments
            linear_to_operand(team, out, x, params.c_fc, row, segments, params.activation, slots.size)
        else:
            inner = out.values[: slots.size]  # of float32, which adapters need
            _inner_in_phases(team, hooks, adapters, params, row, layer, slots, inner, out, x)
    else:
        inner = hooks.inner[: slots.size]
        _inner_in_phases(team, hooks, adapters, params, row, layer, slots, inner, out, x)


@kernel
def _inner_in_phases(team, hooks, adapters, params, row, layer, slots, inner, out, x):
    c_fc = params.c_fc
    plain = Linear(c_fc.weight, c_fc.bias, params.attn_proj.factors)  # which are none
    linear(team, inner, x, plain, row, params.embd_segments, NONE, REPLACE)
    add_adapters(team, inner, x.values, adapters, C_FC, layer, slots)
    call_hooks(team, hooks, INNER, layer)
    activate_rows(team, inner, params.activation)
    call_hooks(team, hooks, ACTIVATED, layer)
    quantize_activations(team, out, inner, c_fc.factors, row)


@kernel
def activate_rows(team, x, kind):
    first, last = claim_rows(team, x.shape[0])
    while first >= 0:
        for n in range(first, last):
            activate(float32_at(address(x) + n * x.shape[1] * 4, x.shape[1]), kind)
        complete_rows(team, x.shape[0])
        first, last = claim_rows(team, x.shape[0])
    finish_phase(team)


def run_with_hooks(take_steps: Callable, params: Any, batch: Any, kv_cache: Any, workspace: Any, look: Any):
    """Take the filled step with a kernels.backend.Hooks, and raise its error."""
    layers = params.attention_scales.size
    rows = batch.token_ids.size
    team = workspace.team
    if look.points == {("resid_post", layers - 1)} and not look.changes:  # needs no kernel of its own
        team.run(take_steps, params, kv_cache, workspace.buffers)
        look("resid_post", layers - 1, workspace.buffers.x[:rows])
        return
    if look.first not in workspace.hooked:
        workspace.hooked[look.first] = _with_hooks(workspace, params, layers, look.first)
    buffers = workspace.hooked[look.first]
    buffers.hooks.wanted[:] = 0
    for kind, layer in look.points:
        for point, later in SEEN_AT[kind]:
            buffers.hooks.wanted[point, layer + later] = 1
    step = HookedStep(look, buffers, rows, kv_cache.k.shape[2])
    callback = CALLBACK(step)
    buffers.hooks.call[0] = ctypes.c_void_p.from_buffer(callback).value  # a cast would make a cycle
    team.run(take_steps, params, kv_cache, buffers)
    if step.error is not None:
        raise step.error


def _with_hooks(workspace: Any, params: Any, layers: int, first: int) -> Any:
    """Return the step's buffers with hooks for steps that begin with this layer."""
    buffers = workspace.buffers
    others = [*workspace.hooked.values()]
    if isinstance(buffers.inner, Float32Operand):
        inner = buffers.inner.values
    else:
        inner = others[0].hooks.inner if others else zeros((len(buffers.x), params.c_fc.bias.shape[1]))
    wanted = np.zeros((POINTS.size, layers + 1), np.int8)
    return buffers._replace(hooks=HookBuffers(np.zeros(1, np.int64), wanted, np.array([first]), inner))


class HookedStep:
    """The callback of one step. Any thread of the team may call it, with all others waiting."""

    def __init__(self, look: Any, buffers: Any, rows: int, num_heads: int):
        self._look = look
        self._x = buffers.x[:rows]
        self._qkv = buffers.qkv[:rows].reshape(rows, 3, num_heads, -1)  # (N, 3, H, D)
        self._z = buffers.attended[:rows].reshape(rows, num_heads, -1)  # (N, H, D)
        self._inner = buffers.hooks.inner[:rows]  # (N, F)
        self._stream: np.ndarray | None = None  # while a summand is added to -0 in its place
        self.error: BaseException | None = None

    def __call__(self, point: int, layer: int) -> None:
        try:
            if self.error is None:
                self._see(point, layer)
        except BaseException as error:  # raised once all threads have ended the step
            self.error = error

    def _see(self, point: int, layer: int) -> None:
        if point == STREAM:
            self._take_back("mlp_out", layer - 1)
            self._look("resid_post", layer - 1, self._x)
            self._look("resid_pre", layer, self._x)
        elif point == HEADS:
            for i, kind in enumerate("qkv"):
                self._look(kind, layer, self._qkv[:, i])
        elif point == ATTENDED:
            self._look("z", layer, self._z)
            self._set_aside("attn_out", layer)
        elif point == MIDDLE:
            self._take_back("attn_out", layer)
            self._look("resid_mid", layer, self._x)
        elif point == INNER:
            self._look("pre", layer, self._inner)
        elif point == ACTIVATED:
            self._look("post", layer, self._inner)
        else:
            self._set_aside("mlp_out", layer)

    def _set_aside(self, kind: str, layer: int) -> None:
        if (kind, layer) in self._look.points:
            self._stream = self._x.copy()
            self._x[:] = MINUS_ZERO

    def _take_back(self, kind: str, layer: int) -> None:
        if self._stream is not None:
            self._look(kind, layer, self._x)
            self._x += self._stream
            self._stream = None
