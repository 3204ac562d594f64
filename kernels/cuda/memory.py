"""What a model takes of a card's memory, counted before anything is allocated."""

from typing import Any

from tinygpt.kernels.cuda import params as load
from tinygpt.kernels.cuda.sizes import sizes_of
from tinygpt.kernels.cuda.workspace import workspace_bytes


def bytes_needed(
    config: Any, dtype: str, tied: bool, kv_cache_dtype: str, num_slots: int, max_model_len: int, *step: int
) -> dict[str, int]:
    """By what it is for. num_slots and max_model_len: of the KV cache. step: new_workspace's tokens and logits."""
    return {
        "weights": load.params_bytes(config, dtype, tied),
        "KV cache": load.kv_cache_bytes(config, num_slots, max_model_len, kv_cache_dtype),
        "buffers": workspace_bytes(config, sizes_of(config, *step), dtype),
    }
