"""Ranks that share a stage's layers, each with a GPU: each computes some features of every linear layer, with all of K.

So a number has the bits of one GPU's, whatever the ranks. They gather features through the host, by MPI_Allgather.
"""

import ctypes
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..backend import Batch
from ..rank_share import RankShare
from .layers.epilogue import ADD, LOGITS, QKV, QKV_ROWS
from .params import padded_columns, share_of

READS = {"attn_proj": "c_attn", "mlp_proj": "c_fc"}  # the linear layer before a projection
# Of RankShare: a linear layer's columns; those of c_attn are in `attended`.
RUNS = {"c_attn": "heads", "attn_proj": "stream", "c_fc": "inner", "mlp_proj": "stream"}
HALF = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64  # buffer, count, datatype
ALLGATHER = ctypes.CFUNCTYPE(ctypes.c_int, *HALF, *HALF, ctypes.c_int64)


@dataclass(frozen=True)
class Ranks:
    rank: int
    shares: list[RankShare]  # of all
    allgather: np.ndarray  # (3,) int64: function address, datatype of float32, communicator
    status: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))  # of a failed call

    @classmethod
    def of(cls, config: Any, dtype: str, share: RankShare, allgather: np.ndarray) -> "Ranks":
        size = share.tensor_size
        shares = [share_of(config, dtype, share.layers, rank, size) for rank in range(size)]
        return cls(share.tensor_rank, shares, allgather)

    def columns(self, name: str) -> list[range]:
        """Return each rank's, in the array of a linear layer's features."""
        return [share.runs[RUNS[name]][0] for share in self.shares]

    def place(self, name: str, array: Any) -> Any:
        """Return the array from this rank's first column on."""
        return array[self.columns(name)[self.rank].start :]

    def exchange(self, sent: np.ndarray) -> np.ndarray:
        """Return all ranks' parts, of one shape and whole float32; anything after a call that failed."""
        found = np.empty((len(self.shares), *sent.shape), sent.dtype)
        if not self.status[0]:
            address, datatype, communicator = self.allgather.tolist()
            sizes = sent.nbytes // 4, datatype
            buffers = sent.ctypes.data, *sizes, found.ctypes.data, *sizes
            self.status[0] = ALLGATHER(address)(*buffers, communicator)
        return found


def place_of(params: Any, name: str, target: Any, step: Any, epilogue: str) -> tuple[Any, int]:
    """Return a linear layer's target, from a rank's first feature on, and its width."""
    ranks = step.workspace.ranks
    features = params.linears[name].features
    if ranks is not None and epilogue not in (QKV, QKV_ROWS, LOGITS):
        target, features = ranks.place(name, target), ranks.columns(name)[-1].stop
    is_float32 = epilogue in (ADD, LOGITS)  # the stream and logits are, and not padded
    return target, features if is_float32 else padded_columns(features)


def gather(workspace: Any, name: str, array: Any) -> None:
    """Complete the rows of an array, of which each rank has its columns. Wait for the kernels before."""
    ranks = workspace.ranks
    if ranks is None:
        return
    columns = ranks.columns(name)
    own = columns[ranks.rank]
    rows = workspace.read_tokens(array)
    longest = max(map(len, columns))
    sent = np.zeros((len(rows), longest + longest % 2), rows.dtype)  # two float16 are a float32
    sent[:, : len(own)] = rows[:, own.start : own.stop]
    for part, of_rank in zip(columns, ranks.exchange(sent), strict=True):
        rows[:, part.start : part.stop] = of_rank[:, : len(part)]
    workspace.device.write(array, rows)


def share_embedding(workspace: Any, batch: Batch, starts: np.ndarray, rank: int) -> Batch:
    """Return the batch with rank 0's embeds, if there are some: each rank has the whole embedding."""
    count = -int(batch.token_ids.min())
    if count <= 0:
        return batch
    sent = (
        batch.embeds[:count] if rank == 0 else np.zeros((count, workspace.ranks.shares[0].n_embd), np.float32)
    )
    return replace(batch, embeds=workspace.ranks.exchange(np.ascontiguousarray(sent, np.float32))[0])
