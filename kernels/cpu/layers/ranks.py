"""Tensor-parallel ranks: processes that have a part of each layer, and sum what their parts give.

A rank has some of the four segments of K of a product, so that a sum over ranks is the end of (s0 + s1) + (s2 + s3).
The order is ours: a library's own reduction may choose another for each size of a message. So ranks gather all parts,
by a C function whose address and arguments a rank brings along, and each adds them up for itself. The call is a phase
of the step: 0.4 % of it, where leaving compiled code for each block took up to 15.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tinygpt.kernels.cpu.jit import kernel
from tinygpt.kernels.cpu.runtime.by_type import by_type
from tinygpt.kernels.cpu.runtime.team import claim, claim_rows, complete, complete_rows, finish_phase
from tinygpt.kernels.cpu.simd.vector_ir import I32, address, float32_at

FUNCTION, DATATYPE, COMMUNICATOR = 0, 1, 2  # indices into Ranks.allgather
ONE_ITEM = np.int64(1)


class Alone(NamedTuple):
    """There is one rank, and nothing to sum."""

    size: np.int64


class Ranks(NamedTuple):
    """What a rank shares with the others of its tensor-parallel group."""

    partial: np.ndarray  # (N, C) float32: this rank's part of a product
    gathered: np.ndarray  # (ranks * N * C,) float32: those of all ranks, one behind another
    owners: np.ndarray  # (N,) int32: the rank that has a token's embedding; -1: the rows of x are here already
    # (3,) int64: where MPI_Allgather lies, or a function that is called as it is; its datatype; its communicator
    allgather: np.ndarray
    status: np.ndarray  # (ranks,) int64; the first: what a call returned that was not 0
    no_bias: np.ndarray  # (1, 0) float32


ALONE = Alone(np.int64(1))


@kernel
def exchange(team, ranks, values, count):
    """Gather the first `count` of each rank's float32 values. A phase of one item. After a failure nothing is called
    any more."""
    if claim(team, ONE_ITEM) == 0:
        if ranks.status[0] == 0:
            function, datatype = ranks.allgather[FUNCTION], ranks.allgather[DATATYPE]
            send, receive = address(values), address(ranks.gathered)
            ranks.status[0] = call_allgather(
                function, send, count, datatype, receive, count, datatype, ranks.allgather[COMMUNICATOR]
            )
        complete(team, ONE_ITEM)
    finish_phase(team)


@kernel
def add_partials(team, x, gathered, ranks, bias, layer):
    """x (N, C) += the partials of `ranks` ranks in the order of one rank's segments, + bias (L, C). A phase."""
    columns = x.shape[1]
    first, last = claim_rows(team, x.shape[0])
    while first >= 0:
        for n in range(first, last):
            row = float32_at(address(x) + n * columns * 4, columns)
            a = float32_at(address(gathered) + n * columns * 4, columns)
            b = float32_at(address(gathered) + (x.size + n * columns) * 4, columns)
            biases = float32_at(address(bias) + layer * columns * 4, columns)
            if ranks == 2:  # (s0 + s1) + (s2 + s3), a rank having two of them
                for c in range(columns):
                    row[c] = row[c] + ((a[c] + b[c]) + biases[c])
            else:
                d = float32_at(address(gathered) + (2 * x.size + n * columns) * 4, columns)
                if ranks == 3:  # the first has s0 + s1
                    for c in range(columns):
                        row[c] = row[c] + ((a[c] + (b[c] + d[c])) + biases[c])
                else:
                    e = float32_at(address(gathered) + (3 * x.size + n * columns) * 4, columns)
                    for c in range(columns):
                        row[c] = row[c] + (((a[c] + b[c]) + (d[c] + e[c])) + biases[c])
        complete_rows(team, x.shape[0])
        first, last = claim_rows(team, x.shape[0])
    finish_phase(team)


@kernel
def take_rows(team, x, ranks):
    """Put into x (N, C) the gathered rows, each of the rank that owns it. A phase."""
    columns = x.shape[1]
    first, last = claim_rows(team, x.shape[0])
    while first >= 0:
        for n in range(first, last):
            row = float32_at(address(x) + n * columns * 4, columns)
            found = float32_at(address(ranks.gathered) + (ranks.owners[n] * x.size + n * columns) * 4, columns)
            for c in range(columns):
                row[c] = found[c]
        complete_rows(team, x.shape[0])
        first, last = claim_rows(team, x.shape[0])
    finish_phase(team)


def _rows_are_here(team, x, ranks):
    pass


def _share_rows(team, x, ranks):
    if ranks.owners[0] >= 0:
        exchange(team, ranks, x, x.size)
        take_rows(team, x, ranks)


# share_rows(team, x, ranks): x (N, C), of which each rank has embedded the tokens that are its own, is whole on all.
share_rows = by_type({Ranks: _share_rows}, otherwise=_rows_are_here, argument=2)


@intrinsic
def call_allgather(typingctx, function, send, count, datatype, receive, receive_count, receive_type, communicator):
    """Call the C function at an address with MPI_Allgather's arguments, each as a 64-bit integer; what it returns.

    MPI's handles are an int in MPICH and a pointer in Open MPI: a 64-bit register holds either.
    """

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(I32, [ir.IntType(64)] * 7)
        return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:]), ir.IntType(64))

    return types.int64(*[types.int64] * 8), codegen
