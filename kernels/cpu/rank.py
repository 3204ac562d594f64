"""A tensor- or pipeline-parallel rank: its weights, its workspace, and its share of the embedding."""

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
    """Return whether both sums over K have segments, so that ranks compute the same bits."""
    return all(
        bounds.size == MAX_SEGMENTS + 1 for bounds in (head_segments(config, dtype), inner_segments(config, dtype))
    )


def workspace_of_part(
    part: Part, max_num_tokens: int, max_num_logits: int, threads: int, dtype: str, allgather: np.ndarray | None
) -> Workspace:
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
    return workspace.buffers.x[:count]


def share_embedding(workspace: Workspace, token_ids: np.ndarray, starts: np.ndarray, rank: int) -> np.ndarray:
    """Note the owners of tokens (N,). Return this rank's ids. starts: each rank's first token."""
    owners = np.maximum(np.searchsorted(starts, token_ids, side="right") - 1, 0)
    workspace.buffers.ranks.owners[: owners.size] = owners
    return np.where(owners == rank, token_ids - starts[rank], -1).astype(np.int32)
