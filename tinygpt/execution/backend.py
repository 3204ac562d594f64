"""Choose the kernel package once; the engine calls it by the same names, whichever it is.

Only the CPU's kernels have a layout to convert a checkpoint to, and are compiled ahead. Hence two exceptions:
converting goes to `kernels.cpu.packed`, here and in the command convert, and compiling to `kernels.cpu.jit`, in the
commands. Only a card may be absent, and has memory of its own: `kernels.cuda.device` and `.memory` are asked here.
"""

import importlib
from types import ModuleType
from typing import Any

from tinygpt import config
from tinygpt.engine_config import EngineConfig
from tinygpt.errors import RequestError
from tinygpt.weights.checkpoint import Checkpoint
from tinygpt.weights.stored.packed import PackedCheckpoint

# Which precisions each backend computes with: weights, and the KV cache.
DTYPES = {"cpu": config.DTYPES, "cuda": ("float32", "bfloat16", "int8"), "reference": ("float32",)}
KV_CACHE_DTYPES = ("float32", "bfloat16")

# New tokens in a step: enough for the matrix products to run at full speed, few enough that a decoding sequence never
# waits long for a neighbour's prompt.
MAX_STEP_TOKENS = {"cpu": 512, "cuda": 2048, "reference": 512}

AnyCheckpoint = Checkpoint | PackedCheckpoint


def load_backend(device: str, dtype: str) -> ModuleType:
    """Import the kernels of `device`; RequestError if it or `dtype` is not implemented."""
    if device not in tuple(DTYPES):
        raise RequestError(f"device is {device!r} and must be one of {', '.join(map(repr, DTYPES))}.")
    if dtype not in ("auto", *DTYPES[device]):
        allowed = ", ".join(map(repr, DTYPES[device]))
        raise RequestError(f"dtype is {dtype!r} and device {device!r} computes in {allowed} only.")
    if device == "cuda":
        _need_card()
    return importlib.import_module(f"tinygpt.kernels.{device}")


def resolve_dtype(dtype: str, device: str, checkpoint: AnyCheckpoint) -> str:
    """The precision of the weights: "auto" is a converted checkpoint's own, and float32 for any other.

    Raises RequestError if a converted checkpoint has another one, or is no use to `device`.
    """
    if not isinstance(checkpoint, PackedCheckpoint):
        return "float32" if dtype == "auto" else dtype
    if device != "cpu":
        raise RequestError(
            f"{checkpoint.path} is converted for device 'cpu' and device is {device!r}: give the checkpoint that it "
            "was made from."
        )
    if dtype not in ("auto", checkpoint.dtype):
        raise RequestError(
            f"dtype is {dtype!r} and {checkpoint.path} is converted to {checkpoint.dtype!r}: leave dtype at 'auto', or "
            "give the checkpoint that it was made from."
        )
    return checkpoint.dtype


def load_params(backend: ModuleType, checkpoint: AnyCheckpoint, dtype: str, threads: int) -> Any:
    """The backend's Params: packed now, or as they lie in a converted checkpoint.

    Raises CheckpointError if that is damaged, or packed for other kernels.
    """
    if not isinstance(checkpoint, PackedCheckpoint):
        return backend.load_params(checkpoint, dtype, threads)
    from tinygpt.kernels.cpu import packed

    layout = packed.layout_of(checkpoint.config, dtype, checkpoint.tied)
    return packed.params_of(checkpoint.arrays(layout, packed.PACKING), checkpoint.config, dtype)


def check_memory(device: str, checkpoint: AnyCheckpoint, dtype: str, kv_cache_dtype: str, limits: EngineConfig) -> None:
    """RequestError, before anything is loaded, if a model takes more memory than a card has free.

    Other devices share the machine's memory, of which nobody knows how much it can give until it is asked.
    """
    if device != "cuda":
        return
    from tinygpt.kernels.cuda.memory import bytes_needed
    from tinygpt.kernels.cuda.runtime.device import card

    rows, steps = (limits.num_slots, limits.max_model_len), (limits.max_num_batched_tokens, limits.max_num_logits)
    needed = bytes_needed(checkpoint.config, dtype, checkpoint.tied, kv_cache_dtype, *rows, *steps)
    free, total = card().free_bytes(), sum(needed.values())
    if total > free:
        parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in needed.items())
        raise RequestError(
            f"this takes {total / 2**30:.2f} GiB of the card's memory ({parts}) and {free / 2**30:.2f} GiB are "
            "free: lower max_num_seqs, prefix_cache_seqs, max_model_len or max_num_batched_tokens, or take a smaller "
            "dtype."
        )


def _need_card() -> None:
    from tinygpt.kernels.cuda.runtime.device import DeviceError, card

    try:
        card()
    except DeviceError as error:
        raise RequestError(f"device is 'cuda' and cannot be used: {error} Or use device 'cpu'.") from None


def new_workspace(
    backend: ModuleType, config: config.ModelConfig, num_tokens: int, num_logits: int, threads: int, dtype: str
) -> Any:
    """The backend's Workspace for steps of num_tokens; RequestError if memory does not suffice."""
    try:
        return backend.new_workspace(config, num_tokens, num_logits, threads, dtype)
    except MemoryError:
        raise RequestError(
            f"this machine cannot give the memory for steps of {num_tokens} tokens: lower max_num_batched_tokens."
        ) from None


def resolve_kv_cache_dtype(kv_cache_dtype: str, device: str, dtype: str) -> str:
    """The precision of the KV cache: "auto" is float32 for float32 weights, and bfloat16 for all others."""
    usual = "float32" if dtype == "float32" else "bfloat16"
    allowed = KV_CACHE_DTYPES if device == "cpu" else (usual,)
    if kv_cache_dtype == "auto":
        return usual
    if kv_cache_dtype not in allowed:
        listed = ", ".join(map(repr, ("auto", *allowed)))
        raise RequestError(
            f"kv_cache_dtype is {kv_cache_dtype!r} and must be one of {listed} for {dtype} weights on device "
            f"{device!r}."
        )
    return kv_cache_dtype
