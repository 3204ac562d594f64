"""Several decode steps in a call, and the final layer norm by itself."""

from collections.abc import Iterable, Iterator

import numpy as np

from ..reference.layers import normalize
from .arrays import Params
from .kv_cache import KVCache
from .model import forward, take_steps
from .sampling import sample
from .sampling_rows import MAX_ENDS
from .workspace import MAX_STEPS, Workspace, fill


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
    if num_steps > MAX_STEPS:
        raise ValueError(f"{num_steps} steps at once and the workspace keeps the tokens of {MAX_STEPS}.")
    if warpers.temperature.any():
        draws = warpers, seeds, sample_indices
        return _drawn(params, batch, kv_cache, workspace, draws, num_steps)
    buffers = workspace.buffers
    choices = workspace.buffers.choices
    fill(buffers, batch, num_steps if ends.size <= MAX_ENDS else 1)
    choices.num_ends[0] = min(ends.size, MAX_ENDS)
    choices.ends[: choices.num_ends[0]] = ends[:MAX_ENDS]
    workspace.team.run(take_steps, params, kv_cache, buffers)
    return choices.token_ids[: choices.counts[0], : batch.token_ids.size].copy()  # (steps, S)


def stop_early(workspace: Workspace, is_wanted: bool) -> None:
    workspace.buffers.choices.stop_early[0] = is_wanted


def _drawn(
    params: Params, batch, kv_cache: KVCache, workspace: Workspace, draws: tuple, num_steps: int
) -> Iterator[np.ndarray]:
    for _ in range(num_steps):
        logits = forward(params, batch, kv_cache, workspace)  # (S, V)
        token_ids = sample(logits, *draws, batch.context_lens)  # (S,)
        yield token_ids
        if workspace.buffers.choices.stop_early[0]:
            break
        batch = batch.next_step(token_ids)


def final_norm(params: Params, x: np.ndarray) -> np.ndarray:
    """Return ln_f of x (N, C) without the head's smoothing, which divided its weight and bias."""
    if params.ln_f is None:
        return x
    x = normalize(x, params.ln_f.weight[0], params.ln_f.bias[0], params.epsilon)
    return x * params.head_factors if params.project_in is None else x
