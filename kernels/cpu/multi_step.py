"""Several decode steps in one call: each goes on with what the one before has chosen."""

from collections.abc import Iterable, Iterator

import numpy as np

from tinygpt.kernels.cpu.kv_cache import KVCache
from tinygpt.kernels.cpu.model import forward, take_steps
from tinygpt.kernels.cpu.params import Params
from tinygpt.kernels.cpu.sampling.greatest import MAX_ENDS
from tinygpt.kernels.cpu.sampling.sampling import sample
from tinygpt.kernels.cpu.workspace import MAX_STEPS, Workspace, fill


def multi_step(
    params: Params, batch, kv_cache: KVCache, workspace: Workspace, warpers, seeds, sample_indices, num_steps: int, ends
) -> Iterable[np.ndarray]:
    """Tokens (S,) int32 of each step, which are the next one's input; -1 where logits are not finite.

    At most num_steps: a step is the last in which a token is one of `ends` (E,) int32, behind which nobody may want
    another, or at which `stop_early` is found. The batch has one new token for each sequence. Greedy steps run without
    Python between them. The KV cache then holds the keys and values of all tokens but the last, whether or not the host
    accepts them.
    """
    if num_steps > MAX_STEPS:
        raise ValueError(f"{num_steps} steps at once and the workspace keeps the tokens of {MAX_STEPS}.")
    if warpers.temperature.any():
        return _drawn(params, batch, kv_cache, workspace, warpers, seeds, sample_indices, num_steps)
    buffers, choices = workspace.buffers, workspace.buffers.choices
    fill(buffers, batch, num_steps if ends.size <= MAX_ENDS else 1)
    choices.num_ends[0] = min(ends.size, MAX_ENDS)
    choices.ends[: choices.num_ends[0]] = ends[:MAX_ENDS]
    workspace.team.run(take_steps, params, kv_cache, buffers)
    return choices.token_ids[: choices.counts[0], : batch.token_ids.size].copy()  # (steps, S)


def stop_early(workspace: Workspace, is_wanted: bool) -> None:
    """Whether each call's first step is its last, and that which runs the last of its own."""
    workspace.buffers.choices.stop_early[0] = is_wanted


def _drawn(
    params: Params, batch, kv_cache: KVCache, workspace: Workspace, warpers, seeds, sample_indices, num_steps: int
) -> Iterator[np.ndarray]:
    """The draw is a kernel of its own, which few runs need. Who takes the tokens calls `stop_early` at an end."""
    for _ in range(num_steps):
        logits = forward(params, batch, kv_cache, workspace)  # (S, V)
        token_ids = sample(logits, warpers, seeds, sample_indices, batch.context_lens)  # (S,)
        yield token_ids
        if workspace.buffers.choices.stop_early[0]:
            break
        batch = batch.next_step(token_ids)
