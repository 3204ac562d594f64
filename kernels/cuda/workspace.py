"""The device's buffers of a step, allocated for the largest one, and the steps' graphs."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend import DeviceError, query_tiles
from .kv_cache import kv_cache_bytes, padded_head
from .params import activation_dtype, array_type, item_bytes, padded_columns, params_bytes
from .runtime import device as devices
from .runtime.device import Graphs
from .runtime.jit import need_capability
from .sampling.sampling import SamplingBuffers, new_sampling_buffers, sampling_bytes
from .shapes import NUM_SIZES, QUERY_TILE, MaxShape, PackedArrays


@dataclass(frozen=True)
class Inputs:
    """A step's batch on the device, by one copy."""

    whole: Any
    parts: PackedArrays
    sizes: Any  # (NUM_SIZES,)
    token_ids: Any  # (N,)
    positions: Any  # (N,)
    token_slots: Any  # (N,) the KV slot of each token
    logit_rows: Any  # (R,)
    tiles: Any  # bounds of runs of up to QUERY_TILE tokens of one sequence; the rest are empty


@dataclass(frozen=True, eq=False)
class Workspace:
    """Buffers of N tokens and R rows of logits. Activations are float32, or bfloat16 as uint16."""

    device: Any
    inputs: Inputs
    embeds: Any  # (N, C) float32, embeddings of tokens with a negative id
    x: Any  # (N, C) float32, the residual stream
    normed: Any  # (max(N, R), Cp)
    q: Any  # (N, H, Dp)
    attended: Any  # (N, Cp)
    partials: Any  # (tokens of a decode step, H, key blocks, Dp + 2) float32
    merges: Any  # (tokens of a decode step, H) int32: key blocks that are done; 0 between steps
    inner: Any  # (N, Fp)
    logits: Any  # (R, V) float32
    every: Any  # (N,) int32: 0, 1, 2, ...
    sampling: SamplingBuffers
    max_shape: MaxShape
    graphs: Graphs


def new_workspace(
    config, max_num_tokens: int, max_num_logits: int, threads: int = 1, dtype: str = "float32"
) -> Workspace:
    device = devices.the_device()
    max_shape = MaxShape.of(config, max_num_tokens, max_num_logits)
    inputs = _input_parts(max_shape)
    whole = device.zeros((inputs.num_bytes,), np.uint8)
    shapes = _shapes(config, max_shape, activation_dtype(dtype))
    return Workspace(
        device=device,
        inputs=Inputs(whole, inputs, **inputs.split(whole)),
        every=device.array(np.arange(max(max_shape.tokens, max_shape.logits), dtype=np.int32)),
        merges=device.zeros((max_shape.decode_tokens * config.n_head,), np.int32),
        sampling=new_sampling_buffers(device, config, max_shape),
        max_shape=max_shape,
        graphs=Graphs(device),
        **{name: device.zeros(shape, array_type(kind)) for name, (shape, kind) in shapes.items()},
    )


def workspace_bytes(config, max_shape: MaxShape, dtype: str) -> int:
    shapes = _shapes(config, max_shape, activation_dtype(dtype)).values()
    buffers = sum(math.prod(shape) * item_bytes(kind) for shape, kind in shapes)
    counts = 4 * (max(max_shape.tokens, max_shape.logits) + max_shape.decode_tokens * config.n_head)
    return buffers + counts + _input_parts(max_shape).num_bytes + sampling_bytes(config, max_shape)


def bytes_needed(config, tied, dtype, kv_cache_dtype, num_slots, max_model_len, *step) -> dict[str, int]:
    """Return the bytes of each part of a model. step: tokens and logits."""
    return {
        "weights": params_bytes(config, dtype, tied),
        "KV cache": kv_cache_bytes(config, num_slots, max_model_len, kv_cache_dtype),
        "buffers": workspace_bytes(config, MaxShape.of(config, *step), dtype),
    }


def check_memory(*sizes) -> None:
    """Raise DeviceError, before a load, for the GPU's dtypes or its free memory. sizes: as of bytes_needed."""
    need_capability(devices.the_device().capability, sizes[2])
    needed = bytes_needed(*sizes)
    free = devices.the_device().free_bytes()
    total = sum(needed.values())
    if total > free:
        parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in needed.items())
        raise DeviceError(
            f"this takes {total / 2**30:.2f} GiB of the GPU's memory ({parts}) and {free / 2**30:.2f} GiB are "
            "free: lower max_num_seqs, prefix_cache_seqs, max_model_len or max_num_batched_tokens, or take a smaller "
            "dtype."
        )


def fill(workspace: Workspace, batch) -> None:
    inputs = workspace.inputs
    tiles = query_tiles(batch.seq_starts, QUERY_TILE)
    bounds = np.full(inputs.tiles.size, tiles[-1], np.int32)  # of empty tiles
    bounds[: tiles.size] = tiles
    values = {
        "sizes": np.array([batch.token_ids.size, batch.logit_rows.size]),
        "token_ids": batch.token_ids,
        "positions": batch.positions,
        "token_slots": batch.token_slots,
        "logit_rows": batch.logit_rows,
        "tiles": bounds,
    }
    workspace.device.write(inputs.whole, inputs.parts.join(values))
    workspace.device.write(workspace.embeds, batch.embeds)


def _shapes(config, max_shape: MaxShape, family: str) -> dict[str, tuple[tuple[int, ...], str]]:
    n = max_shape.tokens
    r = max_shape.logits
    heads = config.n_head
    padded = padded_head(config.head_size)
    columns = padded_columns(config.n_embd)
    return {
        "embeds": ((n, config.n_embd), "float32"),
        "x": ((n, config.n_embd), "float32"),
        "normed": ((max(n, r), columns), family),
        "q": ((n, heads, padded), family),
        "attended": ((n, columns), family),
        "partials": ((max_shape.decode_tokens, heads, max_shape.max_blocks, padded + 2), "float32"),
        "inner": ((n, padded_columns(config.inner_size)), family),
        "logits": ((r, config.vocab_size), "float32"),
    }


def _input_parts(max_shape: MaxShape) -> PackedArrays:
    n, r = max_shape.tokens, max_shape.logits
    lengths = {"sizes": NUM_SIZES, "token_ids": n, "positions": n, "token_slots": n, "logit_rows": r}
    lengths["tiles"] = 2 * n + 2  # their number is rounded up
    return PackedArrays({name: (length, np.int32) for name, length in lengths.items()})
