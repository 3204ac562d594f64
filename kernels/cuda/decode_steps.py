"""DecodeSteps: what it takes to decode several steps without the host."""

from typing import Any, NamedTuple

from tinygpt.kernels.cuda.kv_cache import KVCache
from tinygpt.kernels.cuda.params import Params
from tinygpt.kernels.cuda.workspace import Workspace


class DecodeSteps(NamedTuple):
    """The batch has one new token for each of S sequences; warpers, seeds and sample_indices are those of `sample`."""

    params: Params
    batch: Any
    kv_cache: KVCache
    workspace: Workspace
    warpers: Any
    seeds: Any
    sample_indices: Any
    num_steps: int
