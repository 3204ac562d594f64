"""From logits to tokens on the device. R rows, V vocabulary.

Kernels do argmax, temperature, top-k, top-p, min-p, penalties and bias.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from .. import reference
from .draw import ALL_ONES, DRAW_THREADS, ID_BITS, draw_tokens, index_of, key_of, rank_of
from .jit import (
    MAX_WARPS,
    WARP,
    block_greatest,
    device_function,
    is_last_warp,
    kernel,
    let_next_kernel_begin,
    of_thread,
    rounded_product,
    wait_for_kernel_before,
    warp_greatest,
)
from .workspace import SLICES, Mirror, rounded_up

CHOOSE_THREADS = 256
PER_THREAD = 4  # logits of a row a thread, at least
KEY_OF_MINUS_INFINITY = 0x007FFFFF
KEY_OF_REFUSED = ALL_ONES
NUM_PENALTIES = 3
REPETITION, FREQUENCY, PRESENCE = range(NUM_PENALTIES)


class DeviceLogits:
    """Rows of a step's logits (R, V) float32, on the device until the next step.

    logits[r] copies a row to the host, logits[r] = row writes it, and logits[array] selects rows on the device.
    """

    def __init__(self, workspace: Any, rows: np.ndarray, vocab_size: int, changed: set[int] | None = None):
        """rows: (R,), indices of the workspace's logits. changed: those that the step's own choice has not seen."""
        self.workspace = workspace
        self.rows = rows
        self.vocab_size = vocab_size
        self.changed = set() if changed is None else changed

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.vocab_size

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Any) -> "np.ndarray | DeviceLogits":
        rows = self.rows[key]
        if rows.ndim:
            return DeviceLogits(self.workspace, rows, self.vocab_size, self.changed)
        return self.workspace.device.read(self.workspace.logits, self.vocab_size, self._start(key))

    def __setitem__(self, r: int, row: np.ndarray) -> None:
        self.changed.add(int(self.rows[r]))
        self.workspace.device.write(self.workspace.logits, row, self._start(r))

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[r] for r in range(len(self)))

    def copy(self) -> np.ndarray:
        return np.stack(list(self)) if len(self) else np.empty((0, self.vocab_size), np.float32)

    def _start(self, r: int) -> int:
        return int(self.rows[r]) * self.vocab_size


def sample(logits: DeviceLogits, warpers: Any, seeds: Any, sample_indices: Any, positions: Any) -> np.ndarray:
    """Return tokens (R,) int32, -1 for a row that is not finite."""
    w = logits.workspace
    s = w.sampling
    rows = logits.rows
    greedy = is_greedy(warpers)
    if greedy and logits.changed.isdisjoint(rows.tolist()):
        token_ids = w.device.read(s.step_token_ids, int(rows.max(initial=-1)) + 1)[rows]
        is_of_tokens = (token_ids >= 0) & (
            token_ids < warpers.num_tokens
        )  # `forward` takes them of all scores
        if is_of_tokens.all():
            return token_ids
    s.write(rows, warpers, seeds, sample_indices, positions)
    count = min(rounded_up(len(rows)), w.max_shape.logits)
    choice = s.rows, s.num_tokens, s.token_ids, count, logits.vocab_size
    w.graphs.run((count, greedy), lambda: queue_choice(w, *choice, greedy))
    return w.device.read(s.token_ids, len(rows))


def logits_of(workspace: Any, logits: np.ndarray, first_row: int) -> DeviceLogits:
    """Return the host's logits (R, V) in rows of the workspace."""
    workspace.device.write(workspace.logits, logits, first_row * logits.shape[1])
    rows = np.arange(first_row, first_row + len(logits))
    return DeviceLogits(workspace, rows, logits.shape[1], set(rows.tolist()))


def process_logits(logits: Any, processors: Any) -> None:
    p = processors
    if isinstance(logits, np.ndarray):
        reference.process_logits(logits, p)
        return
    w = logits.workspace
    rows = logits.rows[p.rows]
    logits.changed.update(rows.tolist())
    arrays = pack_processors(w.device, p, rows)
    more = logits.vocab_size, arrays, w.sampling.ids
    blocks = min(len(rows), w.device.multiprocessors)
    w.device.launch(process_rows, blocks, CHOOSE_THREADS, w.logits, *more)


def filter_logits(logits: DeviceLogits, warpers: Any) -> np.ndarray:
    return reference.filter_logits(logits.copy(), warpers)


def is_greedy(warpers: Any) -> bool:
    return bool((warpers.temperature == 0).all())


def queue_choice(
    workspace: Any, rows, num_tokens, token_ids, count: int, vocab_size: int, greedy: bool = True
) -> None:
    """Choose token_ids (count,) for rows (count,) of the logits, negative for none, by their first num_tokens."""
    w = workspace
    s = workspace.sampling
    slices = min(-(-vocab_size // (CHOOSE_THREADS * PER_THREAD)), SLICES)
    arrays = rows, num_tokens, s.keys, s.arrivals, token_ids
    w.device.launch(take_greatest, (slices, count), CHOOSE_THREADS, w.logits, vocab_size, *arrays)
    if not greedy:
        settings = rows, num_tokens, s.settings, s.seeds, s.sample_indices, s.positions, s.scores, s.ids
        blocks = min(count, w.device.multiprocessors)
        w.device.launch(draw_tokens, blocks, DRAW_THREADS, w.logits, vocab_size, count, *settings, token_ids)


class ProcessorArrays(NamedTuple):
    """Settings of P rows on the device, by one copy."""

    rows: Any  # (P,) int32, indices of logits
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
        "rows": rows,
        "num_prompt_tokens": p.num_prompt_tokens,
        "penalties": np.stack((p.repetition_penalty, p.frequency_penalty, p.presence_penalty), 1),
        "token_bounds": p.token_ids.bounds,
        "token_ids": p.token_ids.values,
        "bias_bounds": p.bias_ids.bounds,
        "bias_ids": p.bias_ids.values,
        "biases": p.biases.values,
    }
    kinds = dict.fromkeys(values, np.int32) | {"penalties": np.float32, "biases": np.float32}
    mirror = Mirror(device, {name: ((max(value.size, 1),), kinds[name]) for name, value in values.items()})
    mirror.write(**values)
    return ProcessorArrays(**mirror.arrays)


@kernel
def take_greatest(logits, vocab_size, rows, num_tokens, keys, arrivals, token_ids):
    """Write each row's token of the greatest of its first logits, ties to the lowest id; -1 if it is NaN or infinite.

    Grid: (slices of a row, R). The last block of a row to arrive merges the slices. Arrays: SamplingBuffers.
    """
    let_next_kernel_begin()
    piece = int32(cuda.blockIdx.x)
    pieces = int32(cuda.gridDim.x)
    r = int32(cuda.blockIdx.y)
    thread = int32(cuda.threadIdx.x)
    if rows[r] < 0:
        return
    wait_for_kernel_before()
    base = int64(rows[r]) * int64(vocab_size)
    count = min(int32(vocab_size), num_tokens[r])
    length = int32((count + pieces - 1) // pieces)
    key = int64(-1)
    for i in of_thread(piece * length, min(count, int32((piece + 1) * length))):
        key = max(key, _greatest_key(logits[base + i], i))
    key = block_greatest(key, cuda.shared.array(MAX_WARPS, int64))
    if thread >= WARP:
        return
    if thread == 0:
        keys[r * pieces + piece] = key
    if not is_last_warp(arrivals, r, pieces):
        return
    for i in range(thread, pieces, WARP):
        key = max(key, keys[r * pieces + i])
    key = warp_greatest(key)
    if thread == 0:
        token_ids[r] = _token_of(key)


@device_function
def _greatest_key(value, token_id):
    """Return the rank of a value, greatest for NaN and +inf."""
    return rank_of(key_of(value) if value < float32(math.inf) else uint32(KEY_OF_REFUSED), token_id)


@device_function
def _token_of(key):
    value_key = key >> int64(ID_BITS)
    if value_key <= int64(KEY_OF_MINUS_INFINITY) or value_key == int64(KEY_OF_REFUSED):
        return int64(-1)
    return index_of(key)


@kernel
def process_rows(logits, vocab_size, processors, counts):
    """Add biases and apply penalties to rows of logits (any, V) float32, in place. Grid: B. counts: (B, V)."""
    a = processors
    block = int32(cuda.blockIdx.x)
    p = block
    while p < a.rows.size:
        row = Row(logits, int64(a.rows[p]) * int64(vocab_size), counts, int64(block) * int64(vocab_size))
        begin = a.token_bounds[p]
        end = a.token_bounds[p + 1]
        first = p * NUM_PENALTIES
        for i in of_thread(a.bias_bounds[p], a.bias_bounds[p + 1]):
            row.logits[row.start + a.bias_ids[i]] += a.biases[i]
        cuda.syncthreads()
        _penalize_repetition(row, a.token_ids, begin, end, a.penalties[first + REPETITION])
        frequency = a.penalties[first + FREQUENCY]
        presence = a.penalties[first + PRESENCE]
        _penalize_presence(row, a.token_ids, int32(begin + a.num_prompt_tokens[p]), end, frequency, presence)
        p += int32(cuda.gridDim.x)


@device_function
def _penalize_repetition(row, token_ids, begin, end, penalty):
    if penalty == float32(1):
        return
    _count(row, token_ids, begin, end)
    for i in of_thread(begin, end):
        if _take_count(row, token_ids[i]) > 0:
            score = row.logits[row.start + token_ids[i]]
            row.logits[row.start + token_ids[i]] = score * penalty if score < float32(0) else score / penalty
    cuda.syncthreads()


@device_function
def _penalize_presence(row, token_ids, begin, end, frequency, presence):
    if frequency == float32(0) and presence == float32(0):
        return
    _count(row, token_ids, begin, end)
    for i in of_thread(begin, end):
        count = _take_count(row, token_ids[i])
        if count > 0:
            score = row.logits[row.start + token_ids[i]] - rounded_product(frequency, float32(count))
            row.logits[row.start + token_ids[i]] = score - presence


@device_function
def _count(row, token_ids, begin, end):
    for i in of_thread(begin, end):
        _take_count(row, token_ids[i])
    cuda.syncthreads()
    for i in of_thread(begin, end):
        cuda.atomic.add(row.counts, row.counts_start + token_ids[i], int32(1))
    cuda.syncthreads()


@device_function
def _take_count(row, token_id):
    """Return the token's count, and to other threads 0."""
    return cuda.atomic.exch(row.counts, row.counts_start + token_id, int32(0))
