"""From logits to tokens on the device.

Compiled are greedy, temperature, top-k, top-p, min-p, penalties and logit bias; the reference does the rest on copied
rows. R rows, V vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygpt.kernels import reference
from tinygpt.kernels.cuda.sampling.draw import DRAW_THREADS, NUM_SETTINGS, draw_tokens, take_greatest
from tinygpt.kernels.cuda.sampling.processors import pack_processors, process_rows
from tinygpt.kernels.cuda.step import MaxShape, Parts, rounded_up
from tinygpt.kernels.host import is_rare_draw, is_rare_edit
from tinygpt.kernels.reference.sampling import process_row

CHOOSE_THREADS = 256
PER_THREAD = 4  # logits of a row a thread, at least
SLICES = 32  # of a row, at most, that blocks search side by side
MAX_STEPS = 32  # of a multi-step, whose tokens stay on the device until the host reads them


class DeviceLogits:
    """Rows of a step's logits (R, V) float32, on the device until the next step overwrites them.

    logits[r] copies row r to the host, logits[r] = row writes it, and logits[array] selects rows on the device.
    """

    def __init__(self, workspace: Any, rows: np.ndarray, vocab_size: int):
        """rows: (R,), indices of rows of the workspace's logits."""
        self.workspace, self.rows, self.vocab_size = workspace, rows, vocab_size

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.vocab_size

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> "np.ndarray | DeviceLogits":
        rows = self.rows[key]
        if rows.ndim:
            return DeviceLogits(self.workspace, rows, self.vocab_size)
        return self.workspace.device.read(self._part(rows))

    def __setitem__(self, r: int, row: np.ndarray) -> None:
        self.workspace.device.write(self._part(self.rows[r]), row)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[r] for r in range(len(self)))

    def copy(self) -> np.ndarray:
        return np.stack(list(self)) if len(self) else np.empty((0, self.vocab_size), np.float32)

    def _part(self, row: int) -> Any:
        start = int(row) * self.vocab_size
        return self.workspace.logits[start : start + self.vocab_size]


@dataclass(frozen=True)
class SamplingBuffers:
    """Buffers for the R rows of the largest step. `settings` to `positions` are parts of `whole`: one copy."""

    whole: Any
    parts: Parts
    settings: Any  # (R, NUM_SETTINGS) float64
    seeds: Any  # (R,) uint64
    sample_indices: Any  # (R,) uint64
    rows: Any  # (R,) int32, indices of rows of logits; negative for none
    positions: Any  # (R,) int32, the position that the token gets in its sequence
    scores: Any  # (R, V) float32
    ids: Any  # (R, V) int32
    counts: Any  # (R, V) int32, 0 between uses
    keys: Any  # (R, SLICES) int64
    arrivals: Any  # (R,) uint32, 0 between steps
    token_ids: Any  # (R,) int32, the chosen tokens
    history: Any  # (MAX_STEPS, tokens of a decode step) int32

    def write(self, device: Any, rows, warpers, seeds, sample_indices, positions) -> None:
        """Copy the settings of len(rows) draws to the device. A rare draw is greedy here."""
        temperature = np.where(is_rare_draw(warpers), 0.0, warpers.temperature)
        padded_rows = np.full(self.rows.size, -1, np.int32)
        padded_rows[: len(rows)] = rows
        values = {
            "settings": np.stack((temperature, warpers.top_k, warpers.top_p, warpers.min_p), 1),
            "seeds": seeds,
            "sample_indices": sample_indices,
            "rows": padded_rows,
            "positions": positions,
        }
        device.write(self.whole, self.parts.join(values))


def new_sampling_buffers(device: Any, config: Any, max_shape: MaxShape) -> SamplingBuffers:
    parts = _parts(max_shape)
    whole = device.zeros((parts.num_bytes,), np.uint8)
    arrays = {name: device.zeros(shape, kind) for name, (shape, kind) in _shapes(config, max_shape).items()}
    return SamplingBuffers(whole, parts, **parts.split(whole), **arrays)


def sampling_bytes(config: Any, max_shape: MaxShape) -> int:
    arrays = (math.prod(shape) * np.dtype(kind).itemsize for shape, kind in _shapes(config, max_shape).values())
    return sum(arrays) + _parts(max_shape).num_bytes


def sample(logits: DeviceLogits, warpers: Any, seeds: Any, sample_indices: Any, positions: Any) -> np.ndarray:
    """Return tokens (R,) int32, -1 for a row that is not finite. Waits for the GPU."""
    w, count, rare = logits.workspace, len(logits), np.flatnonzero(is_rare_draw(warpers))
    w.sampling.write(w.device, logits.rows, warpers, seeds, sample_indices, positions)
    queue_choice(w, count, logits.vocab_size, is_greedy(warpers))
    token_ids = w.device.read(w.sampling.token_ids[:count])
    if rare.size:
        columns = (np.asarray(column)[rare] for column in (seeds, sample_indices, positions))
        token_ids[rare] = reference.sample(logits[rare].copy(), [column[rare] for column in warpers], *columns)
    return token_ids


def process_logits(logits: Any, processors: Any) -> None:
    """Process rows of DeviceLogits, or of an array on the host, in place."""
    p = processors
    if isinstance(logits, np.ndarray):
        reference.process_logits(logits, p)
        return
    w, is_rare = logits.workspace, is_rare_edit(p)
    for i in np.flatnonzero(is_rare):
        row = logits[p.rows[i]]
        process_row(row, p, i)
        logits[p.rows[i]] = row
    if not is_rare.all():
        arrays = pack_processors(w.device, p, np.where(is_rare, -1, logits.rows[p.rows]))
        grid = len(is_rare)
        w.device.launch(process_rows, grid, CHOOSE_THREADS, w.logits, logits.vocab_size, arrays, w.sampling.counts)


def filter_logits(logits: DeviceLogits, warpers: Any) -> np.ndarray:
    return reference.filter_logits(logits.copy(), warpers)


def is_greedy(warpers: Any) -> bool:
    return bool((warpers.temperature == 0).all())


def queue_choice(workspace: Any, count: int, vocab_size: int, greedy: bool) -> None:
    """Queue the choice of a token for up to `count` rows."""
    w, s, count = workspace, workspace.sampling, min(rounded_up(count), workspace.max_shape.logits)
    slices = min(-(-vocab_size // (CHOOSE_THREADS * PER_THREAD)), SLICES)
    found = s.keys, s.arrivals, s.token_ids
    w.device.launch(take_greatest, (slices, count), CHOOSE_THREADS, w.logits, vocab_size, s.rows, *found)
    if not greedy:
        settings = s.rows, s.settings, s.seeds, s.sample_indices, s.positions, s.scores, s.ids
        w.device.launch(draw_tokens, count, DRAW_THREADS, w.logits, vocab_size, *settings, s.token_ids)


def _parts(max_shape: MaxShape) -> Parts:
    r = max_shape.logits
    kinds = {"settings": np.float64, "seeds": np.uint64, "sample_indices": np.uint64}
    kinds |= {"rows": np.int32, "positions": np.int32}
    return Parts({name: (r * (NUM_SETTINGS if name == "settings" else 1), kind) for name, kind in kinds.items()})


def _shapes(config: Any, max_shape: MaxShape) -> dict[str, tuple[tuple[int, ...], Any]]:
    r, v = max_shape.logits, config.vocab_size
    return {
        "scores": ((r, v), np.float32),
        "ids": ((r, v), np.int32),
        "counts": ((r, v), np.int32),
        "keys": ((r, SLICES), np.int64),
        "arrivals": ((r,), np.uint32),
        "token_ids": ((r,), np.int32),
        "history": ((MAX_STEPS, max_shape.decode_tokens), np.int32),
    }
