"""Hooks of a step on a GPU: arrays come to the host, and go back if a caller writes. The host waits at each."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..reference.layers import ACTIVATIONS
from .kv_cache import KVCache, read_positions, write_positions
from .layers.epilogue import FLOATS
from .params import DTYPES, FLOAT32, Numbers, padded_columns
from .workspace import Workspace

SUMMANDS = ("attn_out", "mlp_out")


@dataclass(frozen=True)
class Looks:
    """Called at each point of a step. N new tokens, C n_embd, H heads, D head size, F inner size."""

    hooks: Any
    params: Any
    batch: Any
    kv_cache: KVCache
    workspace: Workspace

    def __call__(self, kind: str, layer: int, compute: Callable[[Any, str], None] | None = None) -> bool:
        """Show a point, if it is wanted, and return whether.

        compute: (target, epilogue), of a kind that no buffer holds; a summand is then added to the stream.
        """
        if (kind, layer) not in self.hooks.points:
            return False
        w = self.workspace
        config = self.params.config
        numbers = DTYPES[self.params.dtype].numbers
        c = self.kv_cache
        heads = c.num_heads, config.head_size
        buffers = {
            "q": (w.q, numbers, heads, c.padded_head),
            "z": (w.attended, numbers, heads, padded_columns(config.n_embd)),
            "post": (w.inner, numbers, (config.inner_size,), padded_columns(config.inner_size)),
        }
        if kind in "qkv" and c.is_int8:  # before it is filled
            columns = c.num_heads * c.head_size
            first = "qkv".index(kind) * columns
            self._show(kind, layer, w.qkv, numbers, heads, padded_columns(3 * columns), first)
        elif kind in "kv":
            self._show_cached(kind, layer)
        elif kind == "pre":
            before, after = self._computed(kind, layer, compute, config.inner_size)
            self._activate(np.flatnonzero((before != after).any(1)), after, numbers)
        elif kind in SUMMANDS:
            _, summand = self._computed(kind, layer, compute, config.n_embd)
            w.device.write(w.x, w.device.read(w.x, summand.size) + summand.ravel())
        else:
            stream = w.x, FLOAT32, (config.n_embd,), config.n_embd
            self._show(kind, layer, *buffers.get(kind, stream))
        return True

    def _show(
        self, kind: str, layer: int, array, numbers: Numbers, shape: tuple, width: int, first: int = 0
    ) -> np.ndarray:
        """Show an array's rows (N, *shape), which the device keeps from `first` on in `width` numbers; return them.

        Of w.q, each row's last axis has `width` numbers.
        """
        device = self.workspace.device
        count = self.batch.token_ids.size
        rows = count * shape[0] if array is self.workspace.q else count
        stored = numbers.decode(device.read(array, rows * width)).reshape(rows, width)
        size = count * math.prod(shape) // rows
        shown = stored[:, first : first + size].reshape(count, *shape)  # not copied
        self.hooks(kind, layer, shown)
        if self.hooks.changes:
            device.write(array, numbers.encode(stored))
        return shown

    def _computed(
        self, kind: str, layer: int, compute: Callable, columns: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows (N, columns) before and after they were shown."""
        device = self.workspace.device
        count = self.batch.token_ids.size
        width = padded_columns(columns)
        array = device.zeros((count, width), np.float32)
        compute(array, FLOATS)
        before = device.read(array).reshape(count, width)[:, :columns]
        return before, self._show(kind, layer, array, FLOAT32, (columns,), width)

    def _activate(self, rows: np.ndarray, inner: np.ndarray, numbers: Numbers) -> None:
        """Set rows of the activated units: the others keep the device's bits."""
        w = self.workspace
        width = padded_columns(inner.shape[1])
        for row in rows.tolist():
            values = ACTIVATIONS[self.params.config.activation](inner[row].astype(np.float64))
            w.device.write(w.inner, numbers.encode(np.float32(values)), row * width)

    def _show_cached(self, kind: str, layer: int) -> None:
        """Show new keys or values (N, H, D), which are in the cache already."""
        c = self.kv_cache
        size = c.k.size // c.num_layers
        part = slice(layer * size, (layer + 1) * size)
        of_layer = replace(c, k=c.k[part], v=c.v[part], num_layers=1)
        b = self.batch
        starts = b.positions[b.seq_starts[:-1]].tolist()
        places = list(zip(b.slots.tolist(), starts, b.context_lens.tolist(), strict=True))
        pairs = [read_positions(of_layer, *place, c.head_size) for place in places]  # (1, H, n, D)
        index = "kv".index(kind)
        decode = DTYPES[self.params.dtype].numbers.decode
        new = [decode(pair[index])[0].transpose(1, 0, 2) for pair in pairs]
        shown = np.concatenate(new)
        self.hooks(kind, layer, shown)
        if not self.hooks.changes:
            return
        for (slot, start, _), pair, first in zip(places, pairs, b.seq_starts.tolist(), strict=False):
            changed = shown[first : first + pair[0].shape[2]].transpose(1, 0, 2)[None]
            both = (changed, pair[1]) if kind == "k" else (pair[0], changed)
            write_positions(of_layer, slot, start, *both)
