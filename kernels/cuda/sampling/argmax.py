"""The greatest logit of each row, by many blocks."""

from tinygpt.kernels.cuda.runtime.block import MAX_WARPS, block_greatest, warp_greatest
from tinygpt.kernels.cuda.runtime.jit import kernel
from tinygpt.kernels.cuda.runtime.ptx import arrive, let_next_kernel_begin, wait_for_kernel_before
from tinygpt.kernels.cuda.runtime.warp import ALL_LANES, WARP
from tinygpt.kernels.cuda.sampling.keys import greatest_key, token_of

from numba import cuda, int32, int64, uint32  # isort: skip


@kernel
def take_greatest(logits, vocab_size, rows, keys, arrivals, token_ids):
    """The token with the greatest logit, ties to the lowest id; -1 for NaN, +inf or nothing but -inf in the row.

    Grid: slices of a row, R. The last block of a row that arrives reads what the others have found; whichever it is,
    the token is the same.

    Args:
        logits: (any, V) float32
        rows: (R,) int32, which rows of the logits; below 0 is none, and leaves its token as it is
        keys: (R, slices) int64, of any content
        arrivals: (R,) uint32, 0 before and after
        token_ids: (R,) int32
    """
    let_next_kernel_begin()
    piece, pieces, r = int32(cuda.blockIdx.x), int32(cuda.gridDim.x), int32(cuda.blockIdx.y)
    thread = int32(cuda.threadIdx.x)
    if rows[r] < 0:
        return
    wait_for_kernel_before()
    base = int64(rows[r]) * int64(vocab_size)
    length = int32((vocab_size + pieces - 1) // pieces)
    key = int64(-1)
    for i in range(int32(piece * length + thread), min(vocab_size, int32((piece + 1) * length)), cuda.blockDim.x):
        key = max(key, greatest_key(logits[base + i], i))
    key = block_greatest(key, cuda.shared.array(MAX_WARPS, int64))
    if thread >= WARP:
        return
    is_last = int32(0)
    if thread == 0:
        keys[r * pieces + piece] = key
        is_last = int32(arrive(arrivals, r) == uint32(pieces - 1))
    is_last = cuda.shfl_sync(uint32(ALL_LANES), is_last, 0)
    cuda.syncwarp()  # what lane 0 has acquired, all lanes may read
    if is_last == 0:
        return
    for i in range(thread, pieces, WARP):
        key = max(key, keys[r * pieces + i])
    key = warp_greatest(key)
    if thread == 0:
        token_ids[r] = token_of(key)
        arrivals[r] = uint32(0)
