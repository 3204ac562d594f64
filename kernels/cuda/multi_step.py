"""Several decode steps without the host, and the final layer norm by itself."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numba import cuda, int32

from ..reference.layers import normalize
from .kv_cache import KVCache
from .model import queue_step
from .params import Params
from .runtime.jit import kernel
from .runtime.ptx import wait_for_kernel_before
from .sampling.sampling import MAX_STEPS, is_greedy, queue_choice
from .shapes import NUM_STEPS_DONE, NUM_TOKENS, StepShape
from .workspace import Workspace, fill

ADVANCE_THREADS = 256
READ_STEPS = 4  # whose tokens the host reads together


def multi_step(
    params: Params,
    batch,
    kv_cache: KVCache,
    workspace: Workspace,
    warpers,
    seeds,
    sample_indices,
    num_steps: int,
    ends,
) -> Iterable[np.ndarray]:
    """Queue all steps at once, in spite of `ends`. Return the tokens (S,) of each."""
    if num_steps > MAX_STEPS:
        raise ValueError(f"num_steps is {num_steps} and must be at most {MAX_STEPS}.")
    return _queued_steps(params, batch, kv_cache, workspace, warpers, seeds, sample_indices, num_steps)


def stop_early(workspace: Workspace, is_wanted: bool) -> None:
    """Do nothing: queued steps are taken."""


def _queued_steps(
    params: Params,
    batch,
    kv_cache: KVCache,
    workspace: Workspace,
    warpers,
    seeds,
    sample_indices,
    num_steps: int,
) -> Iterator[np.ndarray]:
    w = workspace
    count = batch.token_ids.size
    vocab_size = params.config.vocab_size
    shape = StepShape.of(batch, w.max_shape, num_steps)
    greedy = is_greedy(warpers)
    fill(w, batch)
    w.sampling.write(w.device, np.arange(count), warpers, seeds, sample_indices, batch.context_lens)

    def step() -> None:
        queue_step(params, shape, kv_cache, w)
        queue_choice(w, shape.tokens, vocab_size, greedy)
        inputs, s = w.inputs, w.sampling
        arrays = inputs.token_ids, inputs.positions, s.positions, s.token_ids, s.history, inputs.sizes
        w.device.launch(advance, 1, ADVANCE_THREADS, *arrays, w.max_shape.decode_tokens)

    marks = []
    for first in range(0, num_steps, READ_STEPS):
        for _ in range(min(READ_STEPS, num_steps - first)):
            w.graphs.run((shape, greedy), step)
        marks.append(w.device.mark())
    return _read_tokens(w, marks, num_steps, count)


def _read_tokens(workspace: Workspace, marks: list[Any], num_steps: int, count: int) -> Iterator[np.ndarray]:
    """Yield the tokens (count,) of each step. marks: of every READ_STEPS steps."""
    w = workspace
    size = workspace.max_shape.decode_tokens
    for number, mark in enumerate(marks):
        first = number * READ_STEPS
        stop = min(first + READ_STEPS, num_steps)
        yield from w.device.read_at(mark, w.sampling.history[first * size : stop * size]).reshape(-1, size)[
            :, :count
        ]


@kernel
def advance(token_ids, positions, draw_positions, chosen, history, sizes, capacity):
    """Make the chosen tokens the next step's, 0 for -1, and note them in history[steps done]. One block."""
    wait_for_kernel_before()
    thread = int32(cuda.threadIdx.x)
    count = sizes[NUM_TOKENS]
    step = sizes[NUM_STEPS_DONE]
    for n in range(thread, count, int32(ADVANCE_THREADS)):
        history[step * capacity + n] = chosen[n]
        token_ids[n] = max(chosen[n], int32(0))
        positions[n] += int32(1)
        draw_positions[n] += int32(1)
    cuda.syncthreads()
    if thread == 0:
        sizes[NUM_STEPS_DONE] = step + int32(1)


def final_norm(params: Params, x: np.ndarray) -> np.ndarray:
    return normalize(x, *params.final_norm, params.config.layer_norm_epsilon)
