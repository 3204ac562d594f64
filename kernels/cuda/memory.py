"""What a model takes of the GPU's memory, counted before anything is allocated."""

from tinygpt.kernels.backend import DeviceError
from tinygpt.kernels.cuda.kv_cache import kv_cache_bytes
from tinygpt.kernels.cuda.params import params_bytes
from tinygpt.kernels.cuda.runtime import device as devices
from tinygpt.kernels.cuda.sizes import Sizes
from tinygpt.kernels.cuda.workspace import workspace_bytes


def check_memory(config, tied, dtype, kv_cache_dtype, num_slots, max_model_len, max_num_tokens, max_num_logits) -> None:
    """DeviceError, before anything is loaded, if the model takes more memory than the GPU has free."""
    steps = max_num_tokens, max_num_logits
    needed = bytes_needed(config, dtype, tied, kv_cache_dtype, num_slots, max_model_len, *steps)
    free, total = devices.the_device().free_bytes(), sum(needed.values())
    if total > free:
        parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in needed.items())
        raise DeviceError(
            f"this takes {total / 2**30:.2f} GiB of the GPU's memory ({parts}) and {free / 2**30:.2f} GiB are "
            "free: lower max_num_seqs, prefix_cache_seqs, max_model_len or max_num_batched_tokens, or take a smaller "
            "dtype."
        )


def bytes_needed(
    config, dtype: str, tied: bool, kv_cache_dtype: str, num_slots: int, max_model_len: int, *step: int
) -> dict[str, int]:
    """By what it is for. num_slots and max_model_len: of the KV cache. step: new_workspace's tokens and logits."""
    return {
        "weights": params_bytes(config, dtype, tied),
        "KV cache": kv_cache_bytes(config, num_slots, max_model_len, kv_cache_dtype),
        "buffers": workspace_bytes(config, Sizes.of(config, *step), dtype),
    }
