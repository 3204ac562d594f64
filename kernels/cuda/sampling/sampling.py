"""From logits to tokens, on the device, for one step or several.

Shapes: R rows, one for each token to choose, V vocabulary.
"""

from typing import Any

import numpy as np

from tinygpt.kernels.cuda.layers.linear import FUSED_TOKENS
from tinygpt.kernels.cuda.model import Shape, fill_inputs, queue_step, rounded_up
from tinygpt.kernels.cuda.params import KVCache, Params
from tinygpt.kernels.cuda.persistent.contest import Contest
from tinygpt.kernels.cuda.persistent.kernel import can_persist, new_persistent, run_persistent
from tinygpt.kernels.cuda.runtime.jit import kernel
from tinygpt.kernels.cuda.sampling.argmax import take_greatest
from tinygpt.kernels.cuda.sampling.controls import pack_controls
from tinygpt.kernels.cuda.sampling.draw import THREADS as DRAW_THREADS
from tinygpt.kernels.cuda.sampling.draw import draw_tokens
from tinygpt.kernels.cuda.sampling.logits import DeviceLogits
from tinygpt.kernels.cuda.sampling.processors import process_rows
from tinygpt.kernels.cuda.sampling.state import MAX_AHEAD, SLICES
from tinygpt.kernels.cuda.workspace import STEPS_DONE, TOKENS, Workspace
from tinygpt.kernels.reference import processors as processors_on_host
from tinygpt.kernels.reference import sampling as on_host
from tinygpt.kernels.reference import warpers as warpers_on_host

from numba import cuda, int32  # isort: skip

CHOOSE_THREADS, ADVANCE_THREADS = 256, 256
ENOUGH_STEPS = 8  # to time
PER_THREAD = 4  # logits of a row, at least, where it is cut into slices


def sample(logits: DeviceLogits, warpers: Any, seeds: Any, sample_indices: Any, positions: Any) -> np.ndarray:
    """As the reference's: (R,) int32 tokens, -1 for a row that is not finite. Waits for the card."""
    w, count = logits.workspace, len(logits)
    w.draws.write(w.device, logits.rows, warpers, seeds, sample_indices, positions)
    queue_choice(w, count, logits.vocab_size, bool((warpers.temperature == 0).all()))
    return w.device.read(w.draws.token_ids[:count])


def process_logits(logits: Any, controls: Any) -> None:
    """As the reference's: rows of `logits` (R, V) float32 change in place, of DeviceLogits or on the host."""
    if isinstance(logits, np.ndarray):
        processors_on_host.process_logits(logits, controls)
        return
    w, rows = logits.workspace, logits.rows[controls.rows]
    arrays = (w.device.array(part) for part in pack_controls(controls._replace(rows=rows)))
    w.device.launch(process_rows, len(rows), CHOOSE_THREADS, w.logits, logits.vocab_size, *arrays, w.draws.counts)


def filter_logits(logits: DeviceLogits, warpers: Any) -> np.ndarray:
    """As the reference's, which computes it: it is asked for where its rows are wanted on the host."""
    return warpers_on_host.filter_logits(logits.copy(), warpers)


def top_logprobs(logits: np.ndarray, token_id: int, n: int) -> tuple[np.ndarray, np.ndarray, float]:
    """As the reference's, of a row (V,) that is on the host."""
    return on_host.top_logprobs(logits, token_id, n)


def multi_step(
    params: Params,
    batch: Any,
    kv_cache: KVCache,
    workspace: Workspace,
    warpers: Any,
    seeds: Any,
    sample_indices: Any,
    steps: int,
) -> np.ndarray:
    """Tokens (steps, S) of as many steps, each of which goes on with what the one before has chosen.

    The batch has one new token for each sequence. Steps are queued at once, and nobody waits between them. The rows of
    the cache hold the keys and values of all tokens but the last, whether or not the host takes them.

    A small greedy batch may go one of two ways, step by step or all in one kernel: the same tokens, and where there are
    enough of them to tell, the card says which is faster.
    """
    if steps > MAX_AHEAD:
        raise ValueError(f"{steps} steps ahead and the card keeps the tokens of {MAX_AHEAD}.")
    on, draws = (params, batch, kv_cache, workspace), (warpers, seeds, sample_indices)
    is_greedy, count = bool((warpers.temperature == 0).all()), batch.token_ids.size
    if is_greedy and count <= FUSED_TOKENS and steps >= ENOUGH_STEPS and can_persist(params):
        return _contest(params, workspace, rounded_up(count)).run(*on, *draws, steps)
    return run_steps(*on, *draws, steps)


def run_steps(
    params: Params,
    batch: Any,
    cache: KVCache,
    workspace: Workspace,
    warpers: Any,
    seeds: Any,
    sample_indices: Any,
    steps: int,
) -> np.ndarray:
    """`multi_step`, as graphs of a step each."""
    w, count, vocab_size = workspace, batch.token_ids.size, params.config.vocab_size
    shape, is_greedy = Shape.of(batch, w, steps), bool((warpers.temperature == 0).all())
    fill_inputs(w, batch)
    w.draws.write(w.device, np.arange(count), warpers, seeds, sample_indices, batch.context_lens)

    def step() -> None:
        queue_step(params, cache, w, shape)
        queue_choice(w, shape.tokens, vocab_size, is_greedy)
        inputs, draws = w.inputs, w.draws
        places = inputs.token_ids, inputs.positions, draws.positions, draws.token_ids, draws.history, inputs.sizes
        w.device.launch(advance, 1, ADVANCE_THREADS, *places, w.sizes.decode_tokens)

    for _ in range(steps):
        w.graphs.run((shape, is_greedy), step)
    history = w.device.read(w.draws.history[: steps * w.sizes.decode_tokens])
    return history.reshape(steps, -1)[:, :count]


def _contest(params: Params, workspace: Workspace, count: int) -> Contest:
    """Of batches of about this size: run_steps, and run_persistent, which draws nothing."""
    contests = workspace.contests
    if count not in contests:
        persistent = new_persistent(params)

        def run_at_once(params, batch, cache, workspace, warpers, seeds, sample_indices, steps) -> np.ndarray:
            return run_persistent(persistent, params, batch, cache, workspace, steps)

        contests[count] = Contest(run_steps, run_at_once)
    return contests[count]


def queue_choice(workspace: Workspace, count: int, vocab_size: int, is_greedy: bool) -> None:
    """Queue the choice of a token for up to `count` rows: the device knows which are none."""
    w, d, count = workspace, workspace.draws, min(rounded_up(count), workspace.sizes.logits)
    found = d.keys, d.arrivals, d.token_ids
    slices = min(-(-vocab_size // (CHOOSE_THREADS * PER_THREAD)), SLICES)
    w.device.launch(take_greatest, (slices, count), CHOOSE_THREADS, w.logits, vocab_size, d.rows, *found)
    if not is_greedy:
        settings = d.rows, d.settings, d.seeds, d.sample_indices, d.positions, d.scores, d.ids
        w.device.launch(draw_tokens, count, DRAW_THREADS, w.logits, vocab_size, *settings, d.token_ids)


@kernel
def advance(token_ids, positions, draw_positions, chosen, history, sizes, capacity):
    """Make the chosen tokens the next step's, and note them: history[steps done]. One block.

    Where none could be chosen, the sequence goes on with token 0, and nobody looks at it.
    """
    thread, count, step = int32(cuda.threadIdx.x), sizes[TOKENS], sizes[STEPS_DONE]
    for n in range(thread, count, int32(ADVANCE_THREADS)):
        history[step * capacity + n] = chosen[n]
        token_ids[n] = max(chosen[n], int32(0))
        positions[n] += int32(1)
        draw_positions[n] += int32(1)
    cuda.syncthreads()
    if thread == 0:
        sizes[STEPS_DONE] = step + int32(1)
