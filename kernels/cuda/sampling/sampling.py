"""From logits to tokens on the device. R rows, V vocabulary.

Kernels do argmax, temperature, top-k, top-p, min-p, penalties and bias.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64

from ... import reference
from ..runtime.jit import device_function, kernel
from ..runtime.ptx import rounded_product
from ..shapes import MaxShape, PackedArrays, rounded_up
from .draw import DRAW_THREADS, NUM_SETTINGS, draw_tokens, take_greatest

CHOOSE_THREADS = 256
PER_THREAD = 4  # logits of a row a thread, at least
SLICES = 32  # of a row, at most, that blocks search side by side
NUM_PENALTIES = 3
REPETITION, FREQUENCY, PRESENCE = range(NUM_PENALTIES)
MAX_STEPS = 32  # of a multi-step


class DeviceLogits:
    """Rows of a step's logits (R, V) float32, on the device until the next step.

    logits[r] copies a row to the host, logits[r] = row writes it, and logits[array] selects rows on the device.
    """

    def __init__(self, workspace: Any, rows: np.ndarray, vocab_size: int):
        """rows: (R,), indices of the workspace's logits."""
        self.workspace = workspace
        self.rows = rows
        self.vocab_size = vocab_size

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
    """Buffers for R rows. `settings` to `positions` are parts of `whole`: one copy."""

    whole: Any
    parts: PackedArrays
    settings: Any  # (R, NUM_SETTINGS) float64
    seeds: Any  # (R,) uint64
    sample_indices: Any  # (R,) uint64
    rows: Any  # (R,) int32, indices of logits; negative for none
    positions: Any  # (R,) int32, the token's in its sequence
    scores: Any  # (R, V) float32
    ids: Any  # (R, V) int32
    counts: Any  # (R, V) int32, 0 between uses
    keys: Any  # (R, SLICES) int64
    arrivals: Any  # (R,) uint32, 0 between steps
    token_ids: Any  # (R,) int32, the chosen tokens
    history: Any  # (MAX_STEPS, tokens of a decode step) int32

    def write(self, device: Any, rows, warpers, seeds, sample_indices, positions) -> None:
        """Copy the settings of draws to the device."""
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


def new_sampling_buffers(device: Any, config: Any, max_shape: MaxShape) -> SamplingBuffers:
    parts = _parts(max_shape)
    whole = device.zeros((parts.num_bytes,), np.uint8)
    arrays = {name: device.zeros(shape, kind) for name, (shape, kind) in _shapes(config, max_shape).items()}
    return SamplingBuffers(whole, parts, **parts.split(whole), **arrays)


def sampling_bytes(config: Any, max_shape: MaxShape) -> int:
    arrays = (
        math.prod(shape) * np.dtype(kind).itemsize for shape, kind in _shapes(config, max_shape).values()
    )
    return sum(arrays) + _parts(max_shape).num_bytes


def sample(logits: DeviceLogits, warpers: Any, seeds: Any, sample_indices: Any, positions: Any) -> np.ndarray:
    """Return tokens (R,) int32, -1 for a row that is not finite."""
    w = logits.workspace
    count = len(logits)
    w.sampling.write(w.device, logits.rows, warpers, seeds, sample_indices, positions)
    queue_choice(w, count, logits.vocab_size, is_greedy(warpers))
    return w.device.read(w.sampling.token_ids[:count])


def process_logits(logits: Any, processors: Any) -> None:
    p = processors
    if isinstance(logits, np.ndarray):
        reference.process_logits(logits, p)
        return
    w = logits.workspace
    arrays = pack_processors(w.device, p, logits.rows[p.rows])
    more = logits.vocab_size, arrays, w.sampling.counts
    w.device.launch(process_rows, len(p.rows), CHOOSE_THREADS, w.logits, *more)


def filter_logits(logits: DeviceLogits, warpers: Any) -> np.ndarray:
    return reference.filter_logits(logits.copy(), warpers)


def is_greedy(warpers: Any) -> bool:
    return bool((warpers.temperature == 0).all())


def queue_choice(workspace: Any, count: int, vocab_size: int, greedy: bool) -> None:
    w = workspace
    s = workspace.sampling
    count = min(rounded_up(count), workspace.max_shape.logits)
    slices = min(-(-vocab_size // (CHOOSE_THREADS * PER_THREAD)), SLICES)
    found = s.keys, s.arrivals, s.token_ids
    w.device.launch(take_greatest, (slices, count), CHOOSE_THREADS, w.logits, vocab_size, s.rows, *found)
    if not greedy:
        settings = s.rows, s.settings, s.seeds, s.sample_indices, s.positions, s.scores, s.ids
        w.device.launch(draw_tokens, count, DRAW_THREADS, w.logits, vocab_size, *settings, s.token_ids)


def _parts(max_shape: MaxShape) -> PackedArrays:
    r = max_shape.logits
    kinds = {"settings": np.float64, "seeds": np.uint64, "sample_indices": np.uint64}
    kinds |= {"rows": np.int32, "positions": np.int32}
    return PackedArrays(
        {name: (r * (NUM_SETTINGS if name == "settings" else 1), kind) for name, kind in kinds.items()}
    )


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


class ProcessorArrays(NamedTuple):
    """Settings of P rows on the device, by one copy."""

    rows: Any  # (P,) int32, indices of logits; a negative row stays as it is
    num_prompt_tokens: Any  # (P,) int32
    penalties: Any  # (P, NUM_PENALTIES) float32
    token_bounds: Any  # (P + 1,) int32, of the rows' parts of token_ids
    token_ids: Any  # int32, prompts and outputs
    bias_bounds: Any  # (P + 1,) int32, of the rows' parts of bias_ids
    bias_ids: Any  # int32
    biases: Any  # float32


class Row(NamedTuple):
    logits: Any
    start: int
    counts: Any
    counts_start: int


def pack_processors(device: Any, processors: Any, rows: np.ndarray) -> ProcessorArrays:
    p = processors
    values = {
        "rows": rows.astype(np.int32),
        "num_prompt_tokens": p.num_prompt_tokens.astype(np.int32),
        "penalties": np.stack((p.repetition_penalty, p.frequency_penalty, p.presence_penalty), 1).astype(
            np.float32
        ),
        "token_bounds": p.token_ids.bounds.astype(np.int32),
        "token_ids": p.token_ids.values.astype(np.int32),
        "bias_bounds": p.bias_ids.bounds.astype(np.int32),
        "bias_ids": p.bias_ids.values.astype(np.int32),
        "biases": p.biases.values.astype(np.float32),
    }
    parts = PackedArrays({name: (max(value.size, 1), value.dtype) for name, value in values.items()})
    return ProcessorArrays(**parts.split(device.array(parts.join(values))))


@kernel
def process_rows(logits, vocab_size, processors, counts):
    """Add biases and apply penalties to rows of logits (any, V) float32, in place. Grid: P.

    counts: (P, V), 0 before and after: a block counts a row's tokens and takes each count back as it uses it.
    """
    p = int32(cuda.blockIdx.x)
    a = processors
    if a.rows[p] < 0:
        return
    row = Row(logits, int64(a.rows[p]) * int64(vocab_size), counts, int64(p) * int64(vocab_size))
    begin = a.token_bounds[p]
    end = a.token_bounds[p + 1]
    first = p * NUM_PENALTIES
    for i in range(int32(a.bias_bounds[p] + cuda.threadIdx.x), a.bias_bounds[p + 1], cuda.blockDim.x):
        row.logits[row.start + a.bias_ids[i]] += a.biases[i]
    cuda.syncthreads()
    _penalize_repetition(row, a.token_ids, begin, end, a.penalties[first + REPETITION])
    frequency = a.penalties[first + FREQUENCY]
    presence = a.penalties[first + PRESENCE]
    _penalize_presence(row, a.token_ids, int32(begin + a.num_prompt_tokens[p]), end, frequency, presence)


@device_function
def _penalize_repetition(row, token_ids, begin, end, penalty):
    if penalty == float32(1):
        return
    _count(row, token_ids, begin, end)
    for i in range(int32(begin + cuda.threadIdx.x), end, cuda.blockDim.x):
        if _take_count(row, token_ids[i]) > 0:
            score = row.logits[row.start + token_ids[i]]
            row.logits[row.start + token_ids[i]] = score * penalty if score < float32(0) else score / penalty
    cuda.syncthreads()


@device_function
def _penalize_presence(row, token_ids, begin, end, frequency, presence):
    if frequency == float32(0) and presence == float32(0):
        return
    _count(row, token_ids, begin, end)
    for i in range(int32(begin + cuda.threadIdx.x), end, cuda.blockDim.x):
        count = _take_count(row, token_ids[i])
        if count > 0:
            score = row.logits[row.start + token_ids[i]] - rounded_product(frequency, float32(count))
            row.logits[row.start + token_ids[i]] = score - presence


@device_function
def _count(row, token_ids, begin, end):
    for i in range(int32(begin + cuda.threadIdx.x), end, cuda.blockDim.x):
        cuda.atomic.add(row.counts, row.counts_start + token_ids[i], int32(1))
    cuda.syncthreads()


@device_function
def _take_count(row, token_id):
    """Return the token's count, to one thread alone."""
    return cuda.atomic.exch(row.counts, row.counts_start + token_id, int32(0))
