"""The NumPy backend: the readable specification of every kernel, and the oracle of the others."""

from tinygpt.kernels.reference.kv_cache import copy_positions, read_positions, write_positions
from tinygpt.kernels.reference.model import (
    forward,
    kv_cache_bytes,
    load_params,
    new_kv_cache,
    new_workspace,
    trace,
)
from tinygpt.kernels.reference.processors import process_logits
from tinygpt.kernels.reference.sampling import sample, top_logprobs
from tinygpt.kernels.reference.warpers import filter_logits

__all__ = [
    "copy_positions",
    "filter_logits",
    "forward",
    "kv_cache_bytes",
    "load_params",
    "new_kv_cache",
    "new_workspace",
    "process_logits",
    "read_positions",
    "sample",
    "top_logprobs",
    "trace",
    "write_positions",
]
