"""A name for the kernels that a model runs on the CPU, by which it is remembered that they have been compiled."""

from tinygpt.weights.config import ModelConfig

# What sets a model apart by a number that kernels are given.
_NUMBERS = ("embed_scale",)


def kernels_name(config: ModelConfig, dtype: str, kv_cache_dtype: str, shares_layers: bool = False) -> str:
    """They are compiled for the dtypes of weights and KV cache, for what sets the model apart from GPT-2, and anew for
    ranks that share layers. kv_cache_dtype "auto" is the dtype's own."""
    dtypes = dtype if kv_cache_dtype == "auto" else f"{dtype}-{kv_cache_dtype}"
    return "-".join([dtypes, *(name for name in config.structure if name not in _NUMBERS), *["ranks"] * shares_layers])
