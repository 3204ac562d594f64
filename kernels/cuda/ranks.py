"""Ranks that share a stage's layers, each with a GPU: each computes some features of every linear layer, with all of K.

So a number has the bits of one GPU's, whatever the ranks. They gather features through the host, by MPI_Allgather.
"""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..backend import RankShare
from .layers.epilogue import ADD, LOGITS, QKV
from .params import padded_columns, share_of

READS = {"attn_proj": "c_attn", "mlp_proj": "c_fc"}  # the linear layer before a projection
HALF = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64  # buffer, count, datatype
ALLGATHER = ctypes.CFUNCTYPE(ctypes.c_int, *HALF, *HALF, ctypes.c_int64)


@dataclass(frozen=True)
class Ranks:
    rank: int
    columns: dict[
        str, list[range]
    ]  # of each rank, in the array of a linear layer's features; c_attn: in `attended`
    allgather: np.ndarray  # (3,) int64: function address, datatype of float32, communicator
    status: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))  # of a failed call

    @classmethod
    def of(cls, config: Any, dtype: str, share: RankShare, allgather: np.ndarray) -> "Ranks":
        shares = [
            share_of(config, dtype, share.layers, i, share.tensor_size) for i in range(share.tensor_size)
        ]
        runs = {"c_attn": "heads", "attn_proj": "stream", "c_fc": "inner", "mlp_proj": "stream"}
        columns = {name: [each.runs[run][0] for each in shares] for name, run in runs.items()}
        return cls(share.tensor_rank, columns, allgather)

    def place(self, name: str, array: Any) -> Any:
        """Return the array from this rank's first column on."""
        return array[self.columns[name][self.rank].start :]

    def exchange(self, sent: np.ndarray, found: np.ndarray) -> None:
        """Gather equal parts of whole float32, unless a call has failed."""
        if not self.status[0]:
            address, datatype, communicator = self.allgather.tolist()
            sizes = sent.nbytes // 4, datatype
            buffers = sent.ctypes.data, *sizes, found.ctypes.data, *sizes
            self.status[0] = ALLGATHER(address)(*buffers, communicator)


def place_of(params: Any, name: str, target: Any, step: Any, epilogue: str) -> tuple[Any, int]:
    """Return a linear layer's target, from a rank's first feature on, and its width."""
    ranks = step.workspace.ranks
    features = params.linears[name].features
    if ranks is not None and epilogue not in (QKV, LOGITS):
        target, features = ranks.place(name, target), ranks.columns[name][-1].stop
    is_float32 = epilogue in (ADD, LOGITS)  # the stream and logits are, and not padded
    return target, features if is_float32 else padded_columns(features)


def gather(workspace: Any, name: str, array: Any) -> None:
    """Complete the rows of an array, of which each rank has its columns. Wait for the kernels before."""
    ranks = workspace.ranks
    if ranks is None:
        return
    columns = ranks.columns[name]
    count = workspace.num_tokens
    width = array.size // workspace.max_shape.tokens
    rows = workspace.device.read(array, count * width).reshape(count, width)
    longest = max(map(len, columns))
    own = columns[ranks.rank]
    sent = np.zeros((count, longest + longest % 2), rows.dtype)  # two float16 are a float32
    sent[:, : len(own)] = rows[:, own.start : own.stop]
    found = np.empty((len(columns), *sent.shape), rows.dtype)
    ranks.exchange(sent, found)
    for part, of_rank in zip(columns, found, strict=True):
        rows[:, part.start : part.stop] = of_rank[:, : len(part)]
    workspace.device.write(array, rows)


def share_embedding(workspace: Any, token_ids: np.ndarray, starts: np.ndarray, rank: int) -> np.ndarray:
    """Return all tokens (N,): each rank has the whole embedding."""
    return token_ids
