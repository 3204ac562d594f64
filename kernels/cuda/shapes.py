"""Sizes of a step, which decide kernels and grids, and arrays in one copy."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend import query_tiles
from .layers.attention_products import KEY_BLOCK

# Indices into `Inputs.sizes`: tokens, rows with logits, and steps done without the host.
NUM_TOKENS = 0
NUM_LOGITS = 1
NUM_STEPS_DONE = 2
NUM_SIZES = 4
QUERY_TILE = 64  # tokens of one sequence that TILE_BLOCKS blocks of prefill attention take


@dataclass(frozen=True)
class MaxShape:
    """The largest step: new tokens, rows with logits, sequences that decode, positions of a sequence."""

    tokens: int
    logits: int
    decode_tokens: int
    positions: int

    @classmethod
    def of(cls, config: Any, max_num_tokens: int, max_num_logits: int) -> "MaxShape":
        """A decode step has no more tokens than rows of logits."""
        return cls(max_num_tokens, max_num_logits, min(max_num_tokens, max_num_logits), config.n_positions)

    @property
    def max_blocks(self) -> int:
        return -(-self.positions // KEY_BLOCK)


@dataclass(frozen=True)
class StepShape:
    """A step's sizes, rounded up: similar steps share a graph."""

    tokens: int
    logits: int
    key_blocks: int  # of a decoding token
    tiles: int  # of queries; 0 if each sequence has one new token

    @classmethod
    def of(cls, batch: Any, max_shape: MaxShape, num_steps: int = 1) -> "StepShape":
        """num_steps: steps of this shape, each with one more position."""
        tokens = batch.token_ids.size
        positions = int(batch.context_lens.max()) + num_steps - 1
        key_blocks = min(rounded_up(-(-positions // KEY_BLOCK)), max_shape.max_blocks)
        is_decode = tokens == batch.slots.size and tokens <= max_shape.decode_tokens
        tiles = 0 if is_decode else rounded_up(query_tiles(batch.seq_starts, QUERY_TILE).size - 1)
        return cls(rounded_up(tokens), rounded_up(batch.logit_rows.size), key_blocks, tiles)


def rounded_up(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0


@dataclass(frozen=True)
class PackedArrays:
    """The length and dtype of each array in a larger one, larger items first."""

    shapes: dict[str, tuple[int, Any]]

    @property
    def num_bytes(self) -> int:
        return sum(length * np.dtype(dtype).itemsize for length, dtype in self.shapes.values())

    def split(self, whole: Any) -> dict[str, Any]:
        found, start = {}, 0
        for name, (length, dtype) in self.shapes.items():
            stop = start + length * np.dtype(dtype).itemsize
            found[name] = whole[start:stop].view(dtype)
            start = stop
        return found

    def join(self, values: dict[str, np.ndarray]) -> np.ndarray:
        """Return num_bytes uint8: each part holds its values, then zeros."""
        whole = np.zeros(self.num_bytes, np.uint8)
        for name, part in self.split(whole).items():
            given = np.ravel(values[name])
            part[: given.size] = given
        return whole
