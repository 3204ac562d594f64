"""Steps that a caller looks into: its Hooks see the step's own buffers, at the points of layers/hooks.py."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from .layers.hooks import ACTIVATED, ATTENDED, HEADS, INNER, MIDDLE, POINTS, STREAM, SUMMAND, Hooks
from .layers.operands import Float32Operand
from .simd.panels import zeros
from .workspace import Buffers, Workspace

MINUS_ZERO = np.float32(-0.0)
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
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)


def run(take_steps: Callable, params, batch, kv_cache, workspace: Workspace, look: Any) -> None:
    """Take the filled step with a kernels.backend.Look, and raise its error."""
    layers = params.attention_scales.size
    rows = batch.token_ids.size
    team = workspace.team
    if look.points == {("resid_post", layers - 1)} and not look.changes:  # needs no kernel of its own
        team.run(take_steps, params, kv_cache, workspace.buffers)
        look("resid_post", layers - 1, workspace.buffers.x[:rows])
        return
    if look.first not in workspace.looking:
        workspace.looking[look.first] = _looking(workspace, params, layers, look.first)
    buffers = workspace.looking[look.first]
    buffers.look.wanted[:] = 0
    for kind, layer in look.points:
        for point, later in SEEN_AT[kind]:
            buffers.look.wanted[point, layer + later] = 1
    step = HookedStep(look, buffers, rows, kv_cache.k.shape[2])
    callback = CALLBACK(step)
    buffers.look.call[0] = ctypes.cast(callback, ctypes.c_void_p).value
    team.run(take_steps, params, kv_cache, buffers)
    if step.error is not None:
        raise step.error


def _looking(workspace: Workspace, params, layers: int, first: int) -> Buffers:
    buffers = workspace.buffers
    others = [*workspace.looking.values()]
    if isinstance(buffers.inner, Float32Operand):
        inner = buffers.inner.values
    else:
        inner = others[0].look.inner if others else zeros((len(buffers.x), params.c_fc.bias.shape[1]))
    wanted = np.zeros((POINTS.size, layers + 1), np.int8)
    return buffers._replace(look=Hooks(np.zeros(1, np.int64), wanted, np.array([first]), inner))


class HookedStep:
    """The callback of one step. Any thread of the team may call it, with all others waiting."""

    def __init__(self, look: Any, buffers: Buffers, rows: int, num_heads: int):
        self._look, self._x = look, buffers.x[:rows]
        self._qkv = buffers.qkv[:rows].reshape(rows, 3, num_heads, -1)  # (N, 3, H, D)
        self._z = buffers.attended[:rows].reshape(rows, num_heads, -1)  # (N, H, D)
        self._inner = buffers.look.inner[:rows]  # (N, F)
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
