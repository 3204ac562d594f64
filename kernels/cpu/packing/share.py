"""A rank's part of a model, cut from whole packed weights: scales and factors are the same on every rank."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..layers.formats import BFloat16Weight, Float32Weight, Int4Weight, Int8Weight
from ..simd.grouped_tiles import WEIGHT_GROUP
from ..simd.panels import zeros
from ..simd.tiles import OUT_TILE

# Of a weight's arrays: the values of K for an index of axis 2, and the axis of a panel's columns.
LAYOUTS = {
    Float32Weight: {"panels": (1, 3)},
    BFloat16Weight: {"panels": (2, 3)},
    Int8Weight: {"panels": (4, 3), "scales": None},  # (L, P * OUT_TILE): a value for each column
    Int4Weight: {"panels": (8, 3), "group_scales": (WEIGHT_GROUP, 4)},
}


@dataclass(frozen=True)
class RankShare:
    """A rank's layers, heads, hidden units and tokens, in place of the model's config."""

    layers: range
    heads: range
    inner: range
    vocab: range  # tokens whose rows of wte, or of the head, are here
    segments: range  # which of the four segments of K
    n_embd: int
    head_size: int
    is_first: bool  # stage: it embeds
    is_last: bool  # stage: it has ln_f and the head
    tensor_size: int  # ranks that share these layers

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    @property
    def n_head(self) -> int:
        return len(self.heads)

    @property
    def inner_size(self) -> int:
        return len(self.inner)

    @property
    def vocab_size(self) -> int:
        """Return the logits' columns; 1 for a stage without a head."""
        return len(self.vocab) if self.is_last else 1

    def columns(self, name: str) -> list[range] | None:
        """Return a linear layer's outputs that are here; None: all."""
        if self.tensor_size == 1:
            return None
        if name == "c_attn":  # of q, of k, of v
            start = self.heads.start * self.head_size
            stop = self.heads.stop * self.head_size
            return [range(i * self.n_embd + start, i * self.n_embd + stop) for i in range(3)]
        return {"c_fc": [self.inner], "lm_head": [self.vocab], "wte": [self.vocab]}.get(name)

    def inputs(self, name: str) -> range | None:
        """Return a linear layer's inputs that are here; None: all."""
        if self.tensor_size == 1:
            return None
        if name == "attn_proj":
            return range(self.heads.start * self.head_size, self.heads.stop * self.head_size)
        return self.inner if name == "mlp_proj" else None

    def keep(self, name: str) -> Callable | None:
        return None if self.tensor_size == 1 else partial(self.weight, name)

    def weight(self, name: str, weight: Any) -> Any:
        columns = self.columns(name)
        inputs = self.inputs(name)
        cut = {}
        if columns is None and inputs is None:
            return weight
        for field, layout in LAYOUTS[type(weight)].items():
            array = getattr(weight, field)
            if layout is None:
                if columns is not None:
                    array = take_columns(array.reshape(len(array), -1, OUT_TILE), 2, columns).reshape(
                        len(array), -1
                    )
                cut[field] = array
                continue
            per_index, axis = layout
            if inputs is not None:
                array = array[:, :, inputs.start // per_index : -(-inputs.stop // per_index)]
                aligned = zeros(array.shape, array.dtype)
                aligned[...] = array
                array = aligned
            cut[field] = array if columns is None else take_columns(array, axis, columns)
        return type(weight)(**cut)

    def values(self, name: str, array: np.ndarray) -> np.ndarray:
        columns = self.columns(name)
        return (
            array
            if columns is None
            else np.concatenate([array[:, c.start : c.stop] for c in columns], axis=1)
        )

    def factors(self, name: str, array: np.ndarray) -> np.ndarray:
        inputs = self.inputs(name)
        return array if inputs is None else array[:, inputs.start : inputs.stop]


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
