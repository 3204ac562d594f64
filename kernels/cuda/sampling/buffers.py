"""The buffers on the device in which tokens are chosen."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygpt.kernels.cuda.runtime.parts import Parts
from tinygpt.kernels.cuda.sampling.warpers import NUM_SETTINGS
from tinygpt.kernels.cuda.sizes import Sizes

SLICES = 32  # of a row at most, which are searched for the greatest logit side by side
MAX_STEPS = 32  # of a multi-step: their tokens are kept until the host reads them


@dataclass(frozen=True)
class SamplingBuffers:
    """R rows, the most that a step has. `settings` to `positions` are parts of one array: one copy brings them."""

    whole: Any
    parts: Parts
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
    history: Any  # (MAX_STEPS, tokens of a decode step) int32

    def write(self, device: Any, rows, warpers, seeds, sample_indices, positions) -> None:
        """Bring the settings of len(rows) draws to the device; the other rows are none."""
        padded_rows = np.full(self.rows.size, -1, np.int32)
        padded_rows[: len(rows)] = rows
        values = {
            "settings": np.stack(warpers, 1),
            "seeds": seeds,
            "sample_indices": sample_indices,
            "rows": padded_rows,
            "positions": positions,
        }
        device.write(self.whole, self.parts.join(values))


def new_sampling_buffers(device: Any, config: Any, sizes: Sizes) -> SamplingBuffers:
    parts = _parts(sizes)
    whole = device.zeros((parts.num_bytes,), np.uint8)
    arrays = {name: device.zeros(shape, kind) for name, (shape, kind) in _shapes(config, sizes).items()}
    return SamplingBuffers(whole, parts, **parts.split(whole), **arrays)


def sampling_bytes(config: Any, sizes: Sizes) -> int:
    """What `new_sampling_buffers` takes of the GPU's memory."""
    arrays = (math.prod(shape) * np.dtype(kind).itemsize for shape, kind in _shapes(config, sizes).values())
    return sum(arrays) + _parts(sizes).num_bytes


def _parts(sizes: Sizes) -> Parts:
    r = sizes.logits
    return Parts(
        {
            "settings": (r * NUM_SETTINGS, np.float64),
            "seeds": (r, np.uint64),
            "sample_indices": (r, np.uint64),
            "rows": (r, np.int32),
            "positions": (r, np.int32),
        }
    )


def _shapes(config: Any, sizes: Sizes) -> dict[str, tuple[tuple[int, ...], Any]]:
    r, v = sizes.logits, config.vocab_size
    return {
        "scores": ((r, v), np.float32),
        "ids": ((r, v), np.int32),
        "counts": ((r, v), np.int32),
        "keys": ((r, SLICES), np.int64),
        "arrivals": ((r,), np.uint32),
        "token_ids": ((r,), np.int32),
        "history": ((MAX_STEPS, sizes.decode_tokens), np.int32),
    }
