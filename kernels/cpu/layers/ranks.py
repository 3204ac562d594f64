"""Tensor-parallel ranks: processes that sum the parts of their products.

A rank has some of the four segments of K, and the sum over ranks ends (s0 + s1) + (s2 + s3). So ranks gather parts by
the C function MPI_Allgather: 0.4 % of a step.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir

from ..jit import kernel
from ..simd.vector_ir import I32, I64, address, emits, float32_at
from ..team import claim, claim_rows, complete, complete_rows, finish_phase

# indices into Ranks.allgather
FUNCTION = 0
DATATYPE = 1
COMMUNICATOR = 2
ONE_ITEM = np.int64(1)


class Ranks(NamedTuple):
    partial: np.ndarray  # (N, C) float32: this rank's part of a product
    gathered: np.ndarray  # (ranks * N * C,) float32
    owners: np.ndarray  # (N,) int32: the rank of a token's embedding; -1: x is complete
    allgather: np.ndarray  # (3,) int64: function address, datatype, communicator
    status: np.ndarray  # (ranks,) int64; the first: a failed call's status
    no_bias: np.ndarray  # (1, 0) float32


@kernel
def exchange(team, ranks, values, count):
    """Gather the first `count` float32 of each rank, unless a call has failed. A phase of one item."""
    if claim(team, ONE_ITEM) == 0:
        if ranks.status[0] == 0:
            function = ranks.allgather[FUNCTION]
            datatype = ranks.allgather[DATATYPE]
            send = address(values)
            receive = address(ranks.gathered)
            ranks.status[0] = call_allgather(
                function, send, count, datatype, receive, count, datatype, ranks.allgather[COMMUNICATOR]
            )
        complete(team, ONE_ITEM)
    finish_phase(team)


@kernel
def add_partials(team, x, gathered, ranks, bias, layer):
    """x (N, C) += the partials in the order of one rank's segments, + bias (L, C). A phase."""
    columns = x.shape[1]
    first, last = claim_rows(team, x.shape[0])
    while first >= 0:
        for n in range(first, last):
            row = float32_at(address(x) + n * columns * 4, columns)
            a = float32_at(address(gathered) + n * columns * 4, columns)
            b = float32_at(address(gathered) + (x.size + n * columns) * 4, columns)
            biases = float32_at(address(bias) + layer * columns * 4, columns)
            if ranks == 2:  # a rank has two segments
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
    columns = x.shape[1]
    first, last = claim_rows(team, x.shape[0])
    while first >= 0:
        for n in range(first, last):
            row = float32_at(address(x) + n * columns * 4, columns)
            gathered = float32_at(
                address(ranks.gathered) + (ranks.owners[n] * x.size + n * columns) * 4, columns
            )
            for c in range(columns):
                row[c] = gathered[c]
        complete_rows(team, x.shape[0])
        first, last = claim_rows(team, x.shape[0])
    finish_phase(team)


@kernel
def share_rows(team, x, ranks):
    """Complete x (N, C), of which each rank embedded its own tokens. None: one rank."""
    if ranks is None:
        return
    if ranks.owners[0] >= 0:
        exchange(team, ranks, x, x.size)
        take_rows(team, x, ranks)


@emits("int64", *["int64"] * 8)
def call_allgather(
    builder, function, send, count, datatype, receive, receive_count, receive_type, communicator
):
    """Call MPI_Allgather at an address. Its handles, an int or a pointer, fit in 64 bits."""
    arguments = send, count, datatype, receive, receive_count, receive_type, communicator
    kind = ir.FunctionType(I32, [I64] * len(arguments))
    return builder.sext(builder.call(builder.inttoptr(function, kind.as_pointer()), arguments), I64)
