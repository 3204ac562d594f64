"""What the CPU and the GPU both read from a batch, made on the host."""

import numpy as np


def query_tiles(seq_starts: np.ndarray, size: int) -> np.ndarray:
    """Cut each sequence's new tokens into runs of up to `size`; the bounds of the runs, (tiles + 1,)."""
    starts, stops = seq_starts[:-1], seq_starts[1:]
    if stops[-1] == starts.size:  # one token each, as in decoding
        return seq_starts
    runs = [np.arange(start, stop, size) for start, stop in zip(starts, stops, strict=True)]
    return np.concatenate([*runs, seq_starts[-1:]])


def slots_of_tokens(batch) -> np.ndarray:
    """The KV slot of each new token, (N,)."""
    return np.repeat(batch.slots, np.diff(batch.seq_starts))
