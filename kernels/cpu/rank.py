"""One of several ranks that run a model together: what it holds of the weights, and what it computes with them.

What ranks send one another is tinygpt/parallel's; the sums within a step are layers/ranks.py's.
"""

from dataclasses import replace

import numpy as np

from tinygpt.kernels.cpu.layers.epilogue import MAX_SEGMENTS
from tinygpt.kernels.cpu.layers.ranks import Ranks
from tinygpt.kernels.cpu.packing.part import Part
from tinygpt.kernels.cpu.params import head_segments, inner_segments, load_part, part_of
from tinygpt.kernels.cpu.simd.panels import zeros
from tinygpt.kernels.cpu.steps import final_norm
from tinygpt.kernels.cpu.workspace import Workspace, new_workspace

__all__ = [
    "Part",
    "can_share",
    "final_norm",
    "hidden_rows",
    "load_part",
    "part_of",
    "share_embedding",
    "workspace_of_part",
]


def can_share(config, dtype: str) -> bool:
    """Whether both sums over K are cut into segments, which ranks can share with no other result."""
    return all(
        bounds.size == MAX_SEGMENTS + 1 for bounds in (head_segments(config, dtype), inner_segments(config, dtype))
    )


def workspace_of_part(
    part: Part, max_num_tokens: int, max_num_logits: int, threads: int, dtype: str, allgather: np.ndarray | None
) -> Workspace:
    """As new_workspace. allgather: as Ranks has it, for a rank that shares its layers with others."""
    workspace = new_workspace(part, max_num_tokens, max_num_logits, threads, dtype)
    if allgather is None:
        return workspace
    ranks = Ranks(
        partial=zeros((max_num_tokens, part.n_embd)),
        gathered=zeros((part.tensor_size * max_num_tokens * part.n_embd,)),
        owners=np.full(max_num_tokens, -1, np.int32),
        allgather=allgather,
        status=np.zeros(part.tensor_size, np.int64),
        no_bias=np.empty((1, 0), np.float32),
    )
    return replace(workspace, buffers=workspace.buffers._replace(ranks=ranks))


def hidden_rows(workspace: Workspace, count: int) -> np.ndarray:
    """The residual stream (N, C) behind the last layer of a step, until the next one."""
    return workspace.buffers.x[:count]


def share_embedding(workspace: Workspace, token_ids: np.ndarray, starts: np.ndarray, rank: int) -> np.ndarray:
    """Have the ranks embed a step's tokens (N,) together; the ids to give this rank in their place.

    starts: the first token that each rank has. Below 0 stand rows of the step's `embeds`, which are rank 0's; here they
    stand for whatever another rank has.
    """
    owners = np.maximum(np.searchsorted(starts, token_ids, side="right") - 1, 0)
    workspace.buffers.ranks.owners[: owners.size] = owners
    return np.where(owners == rank, token_ids - starts[rank], -1).astype(np.int32)
