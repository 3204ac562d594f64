"""Draws: the buffers that choosing tokens needs on the device."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygpt.kernels.cuda.sizes import Sizes

NUM_SETTINGS = 8  # fields of Warpers
SLICES = 32  # of a row at most, which are searched for the greatest logit side by side
MAX_AHEAD = 32  # steps whose tokens are kept until the host reads them


@dataclass(frozen=True)
class Draws:
    """R rows, the most that a step has. The first five are parts of one array, so that one copy brings them."""

    everything: Any
    settings: Any  # (R, NUM_SETTINGS) float64, what is between logits and a draw: fields of Warpers
    seeds: Any  # (R,) uint64
    sample_indices: Any  # (R,) uint64
    rows: Any  # (R,) int32, which row of the logits each is; below 0 is none
    positions: Any  # (R,) int32, where the token will be in its sequence
    scores: Any  # (R, V) float32
    ids: Any  # (R, V) int32
    counts: Any  # (R, V) int32, 0 between uses
    keys: Any  # (R, SLICES) int64
    arrivals: Any  # (R,) uint32, 0 between steps
    token_ids: Any  # (R,) int32, what is chosen
    history: Any  # (MAX_AHEAD, tokens of a decode step) int32

    def write(self, device: Any, rows, warpers, seeds, sample_indices, positions) -> None:
        """Bring the settings of len(rows) draws to the device; the other rows are none."""
        size = self.rows.size
        values = np.zeros(self.everything.size, np.uint8)
        parts, start = (np.stack(warpers, 1), seeds, sample_indices, rows, positions), 0
        for part, array in zip(
            parts, (self.settings, self.seeds, self.sample_indices, self.rows, self.positions), strict=True
        ):
            given = np.ascontiguousarray(part, array.dtype).ravel().view(np.uint8)
            values[start : start + given.size] = given
            start += array.size * array.dtype.itemsize
        first = size * (8 * NUM_SETTINGS + 16)
        values[first : first + 4 * size].view(np.int32)[len(rows) :] = -1
        device.write(self.everything, values)


def new_draws(device: Any, config: Any, sizes: Sizes) -> Draws:
    size, start, parts = sizes.logits, 0, {}
    everything = device.zeros((size * (8 * NUM_SETTINGS + 8 + 8 + 4 + 4),), np.uint8)
    for name, length, kind in (
        ("settings", size * NUM_SETTINGS, np.float64),
        ("seeds", size, np.uint64),
        ("sample_indices", size, np.uint64),
        ("rows", size, np.int32),
        ("positions", size, np.int32),
    ):
        stop = start + length * np.dtype(kind).itemsize
        parts[name], start = everything[start:stop].view(kind), stop
    arrays = {name: device.zeros(shape, kind) for name, (shape, kind) in _shapes(config, sizes).items()}
    return Draws(everything, **parts, **arrays)


def draws_bytes(config: Any, sizes: Sizes) -> int:
    """What `new_draws` takes of the card's memory."""
    arrays = sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in _shapes(config, sizes).values())
    return arrays + sizes.logits * (8 * NUM_SETTINGS + 8 + 8 + 4 + 4)


def _shapes(config: Any, sizes: Sizes) -> dict[str, tuple[tuple[int, ...], Any]]:
    r, v = sizes.logits, config.vocab_size
    return {
        "scores": ((r, v), np.float32),
        "ids": ((r, v), np.int32),
        "counts": ((r, v), np.int32),
        "keys": ((r, SLICES), np.int64),
        "arrivals": ((r,), np.uint32),
        "token_ids": ((r,), np.int32),
        "history": ((MAX_AHEAD, sizes.decode_tokens), np.int32),
    }
