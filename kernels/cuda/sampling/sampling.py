"""From logits to tokens on the device: buffers, and the functions of a backend.

Compiled are the settings that most requests use: greedy, temperature, top-k, top-p, min-p, penalties and logit bias.
The reference computes any other setting on rows copied to the host.
Shapes: R rows, one for each token to choose, V vocabulary, P processed rows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygpt.kernels import reference
from tinygpt.kernels.cuda.runtime.device import Parts
from tinygpt.kernels.cuda.sampling.choose import DRAW_THREADS, NUM_SETTINGS, draw_tokens, take_greatest
from tinygpt.kernels.cuda.sampling.processors import pack_processors, process_rows
from tinygpt.kernels.cuda.sizes import MaxShape, rounded_up
from tinygpt.kernels.reference.sampling import process_row

CHOOSE_THREADS = 256
PER_THREAD = 4  # logits of a row, at least, when a row is split into slices
SLICES = 32  # of a row at most, which are searched for the greatest logit side by side
MAX_STEPS = 32  # of a multi-step: their tokens are kept until the host reads them
# Warpers of the reference, and the values that change nothing.
RARE = {"top_p_rule": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}


class DeviceLogits:
    """Rows of logits (R, V) float32. They may be written over, and the next step does so.

    logits[r] is a copy of row r on the host, and logits[r] = row writes it; logits[some rows] is those, on the device.
    """

    def __init__(self, workspace: Any, rows: np.ndarray, vocab_size: int):
        """rows: (R,), of the workspace's logits."""
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
        """All rows, (R, V), on the host."""
        return np.stack(list(self)) if len(self) else np.empty((0, self.vocab_size), np.float32)

    def _part(self, row: int) -> Any:
        start = int(row) * self.vocab_size
        return self.workspace.logits[start : start + self.vocab_size]


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


def new_sampling_buffers(device: Any, config: Any, sizes: MaxShape) -> SamplingBuffers:
    parts = _parts(sizes)
    whole = device.zeros((parts.num_bytes,), np.uint8)
    arrays = {name: device.zeros(shape, kind) for name, (shape, kind) in _shapes(config, sizes).items()}
    return SamplingBuffers(whole, parts, **parts.split(whole), **arrays)


def sampling_bytes(config: Any, sizes: MaxShape) -> int:
    """What `new_sampling_buffers` takes of the GPU's memory."""
    arrays = (math.prod(shape) * np.dtype(kind).itemsize for shape, kind in _shapes(config, sizes).values())
    return sum(arrays) + _parts(sizes).num_bytes


def _parts(sizes: MaxShape) -> Parts:
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


def _shapes(config: Any, sizes: MaxShape) -> dict[str, tuple[tuple[int, ...], Any]]:
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


def sample(logits: DeviceLogits, warpers: Any, seeds: Any, sample_indices: Any, positions: Any) -> np.ndarray:
    """Return a token (R,) int32 for each row, -1 for a row that is not finite. Waits for the GPU."""
    w, count, rare = logits.workspace, len(logits), rare_rows(warpers)
    rows = logits.rows.copy()
    rows[rare] = -1  # none
    w.sampling.write(w.device, rows, warpers, seeds, sample_indices, positions)
    queue_choice(w, count, logits.vocab_size, is_greedy(warpers))
    token_ids = w.device.read(w.sampling.token_ids[:count])
    if rare.size:
        columns = (np.asarray(column)[rare] for column in (seeds, sample_indices, positions))
        warpers_of_rare = [column[rare] for column in warpers]
        token_ids[rare] = reference.sample(logits[rare].copy(), warpers_of_rare, *columns)
    return token_ids


def rare_rows(warpers: Any) -> np.ndarray:
    """Return the indices of the rows that draw with a warper that is not compiled."""
    is_rare = np.any([getattr(warpers, name) != off for name, off in RARE.items()], 0)
    return np.flatnonzero(is_rare & (warpers.temperature != 0))


def process_logits(logits: Any, processors: Any) -> None:
    """Change rows of `logits` (R, V) float32 in place, of DeviceLogits or on the host."""
    if isinstance(logits, np.ndarray):
        reference.process_logits(logits, processors)
        return
    w, p = logits.workspace, processors
    rows = logits.rows[p.rows]  # (P,)
    is_rare = p.no_repeat_ngram_size > 0
    for bounds in (p.word_bounds, p.allowed_ids.bounds, p.forbidden_ids.bounds):
        is_rare = is_rare | (np.diff(bounds) > 0)
    for i in np.flatnonzero(is_rare):
        row = np.array(logits[p.rows[i]])
        process_row(row, p, i)
        logits[p.rows[i]] = row
    if not is_rare.all():
        arrays = (w.device.array(part) for part in pack_processors(p, np.where(is_rare, -1, rows)))
        arguments = w.logits, logits.vocab_size, *arrays, w.sampling.counts
        w.device.launch(process_rows, len(rows), CHOOSE_THREADS, *arguments)


def filter_logits(logits: DeviceLogits, warpers: Any) -> np.ndarray:
    """Return filtered scores (R, V) on the host, which the reference computes."""
    return reference.filter_logits(logits.copy(), warpers)


def is_greedy(warpers: Any) -> bool:
    """Whether no row draws a token."""
    return bool((warpers.temperature == 0).all())


def queue_choice(workspace: Any, count: int, vocab_size: int, greedy: bool) -> None:
    """Queue the choice of a token for up to `count` rows: the device knows which are none."""
    w, s, count = workspace, workspace.sampling, min(rounded_up(count), workspace.sizes.logits)
    slices = min(-(-vocab_size // (CHOOSE_THREADS * PER_THREAD)), SLICES)
    found = s.keys, s.arrivals, s.token_ids
    w.device.launch(take_greatest, (slices, count), CHOOSE_THREADS, w.logits, vocab_size, s.rows, *found)
    if not greedy:
        settings = s.rows, s.settings, s.seeds, s.sample_indices, s.positions, s.scores, s.ids
        w.device.launch(draw_tokens, count, DRAW_THREADS, w.logits, vocab_size, *settings, s.token_ids)
