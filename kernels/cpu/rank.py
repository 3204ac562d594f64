"""One of several ranks that run a model together: what it holds of the weights, and what it computes with them.

What ranks send one another is tinygpt/parallel's; the sums within a step are layers/ranks.py's.
"""

import math
from dataclasses import replace

import numpy as np

from tinygpt.kernels.cpu.layers.epilogue import MAX_SEGMENTS
from tinygpt.kernels.cpu.layers.formats import BFloat16Weight, Int8Weight
from tinygpt.kernels.cpu.layers.ranks import Ranks
from tinygpt.kernels.cpu.packing.part import Part
from tinygpt.kernels.cpu.params import Params, head_segments, inner_segments, load_part, part_of
from tinygpt.kernels.cpu.simd.memory import zeros
from tinygpt.kernels.cpu.simd.tiles import PANEL
from tinygpt.kernels.cpu.trace import final_norm
from tinygpt.kernels.cpu.workspace import Workspace, new_workspace

__all__ = [
    "Part",
    "can_share",
    "embedded",
    "final_norm",
    "hidden_rows",
    "load_part",
    "part_of",
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
        allgather=allgather,
        status=np.zeros(part.tensor_size, np.int64),
        no_bias=np.empty((1, 0), np.float32),
    )
    return replace(workspace, buffers=workspace.buffers._replace(ranks=ranks))


def hidden_rows(workspace: Workspace, count: int) -> np.ndarray:
    """The residual stream (N, C) behind the last layer of a step, until the next one."""
    return workspace.buffers.x[:count]


def embedded(params: Params, rows: np.ndarray) -> np.ndarray:
    """(n, C) float32: these rows of wte, to the bit what the step's kernel makes of a token before its position."""
    weight, (panels, columns) = params.wte, np.divmod(rows, PANEL)
    size = params.wte_factors.size
    found = weight.panels[0][panels, :, columns]  # (n, K or steps of K[, values of a step])
    found = found.reshape(len(rows), math.prod(found.shape[1:]))[:, :size]  # (n, C)
    if isinstance(weight, BFloat16Weight):
        found = (found.astype(np.uint32) << 16).view(np.float32)
    elif isinstance(weight, Int8Weight):
        found = (found.astype(np.int32) - 128).astype(np.float32) * weight.scales[0][rows][:, None]
    return found * params.wte_factors
