"""From logits to tokens, on the device.

Shapes: R rows, one for each token to choose, V vocabulary.
"""

from typing import Any

import numpy as np

from tinygpt.kernels.cuda.sampling.argmax import take_greatest
from tinygpt.kernels.cuda.sampling.buffers import SLICES
from tinygpt.kernels.cuda.sampling.controls import pack_controls
from tinygpt.kernels.cuda.sampling.draw import DRAW_THREADS, draw_tokens
from tinygpt.kernels.cuda.sampling.logits import DeviceLogits
from tinygpt.kernels.cuda.sampling.processors import process_rows
from tinygpt.kernels.cuda.sizes import rounded_up
from tinygpt.kernels.reference import sampling as on_host

CHOOSE_THREADS = 256
PER_THREAD = 4  # logits of a row, at least, where it is cut into slices


def sample(logits: DeviceLogits, warpers: Any, seeds: Any, sample_indices: Any, positions: Any) -> np.ndarray:
    """As the reference's: (R,) int32 tokens, -1 for a row that is not finite. Waits for the GPU."""
    w, count = logits.workspace, len(logits)
    w.sampling.write(w.device, logits.rows, warpers, seeds, sample_indices, positions)
    queue_choice(w, count, logits.vocab_size, is_greedy(warpers))
    return w.device.read(w.sampling.token_ids[:count])


def process_logits(logits: Any, controls: Any) -> None:
    """As the reference's: rows of `logits` (R, V) float32 change in place, of DeviceLogits or on the host."""
    if isinstance(logits, np.ndarray):
        on_host.process_logits(logits, controls)
        return
    w, rows = logits.workspace, logits.rows[controls.rows]
    arrays = (w.device.array(part) for part in pack_controls(controls._replace(rows=rows)))
    w.device.launch(process_rows, len(rows), CHOOSE_THREADS, w.logits, logits.vocab_size, *arrays, w.sampling.counts)


def filter_logits(logits: DeviceLogits, warpers: Any) -> np.ndarray:
    """As the reference's, which computes it: it is asked for where its rows are wanted on the host."""
    return on_host.filter_logits(logits.copy(), warpers)


def top_logprobs(logits: np.ndarray, token_id: int, n: int) -> tuple[np.ndarray, np.ndarray, float]:
    """As the reference's, of a row (V,) that is on the host."""
    return on_host.top_logprobs(logits, token_id, n)


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
