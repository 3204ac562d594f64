"""The layers as the page calls them: each picks its kernels and their grids, and queues them.

A name such as "c_fc" is a layer's in `Params.linears`, "ln_2" a layer norm's in `Params.norms`. `purpose` says what
becomes of a linear layer's sums (layers/linear.py): ADD, LOGITS, QKV, or an activation's name. Grids are for a step of
`shape`; the device knows how many rows there are, and surplus blocks return.
"""

import math
from typing import Any

from tinygpt.kernels.cuda.kv_cache import KVCache
from tinygpt.kernels.cuda.layers.attention import (
    TILE_WARPS,
    attend_chunks_kernel,
    attend_tiles_kernel,
)
from tinygpt.kernels.cuda.layers.elementwise import EMBED_THREADS, embed_kernel
from tinygpt.kernels.cuda.layers.gemm import gemm_kernel, pick_tile
from tinygpt.kernels.cuda.layers.layer_norm import NORM_WARPS, layer_norm_kernel
from tinygpt.kernels.cuda.layers.linear import (
    ADD,
    FUSED_TOKENS,
    LINEAR_THREADS,
    LOGITS,
    Heads,
    Norm,
    fused_shared_bytes,
    linear_kernel,
    normed_linear_kernel,
)
from tinygpt.kernels.cuda.layers.product import TILE_TOKENS
from tinygpt.kernels.cuda.packing import STEP, family_of, padded_columns
from tinygpt.kernels.cuda.params import Params
from tinygpt.kernels.cuda.runtime.block import WARP
from tinygpt.kernels.cuda.sizes import NUM_LOGITS, NUM_TOKENS, StepShape, rounded_up
from tinygpt.kernels.cuda.workspace import Workspace

DECODE_WARPS = 4  # of a block of decoding attention, where there is work for all multiprocessors
MAX_TILES = {"float32": 2, "bfloat16": 4, "int8": 4}  # of TILE_TOKENS tokens, that a block of `linear` multiplies


def embed_tokens(params: Params, x, shape: StepShape, workspace: Workspace) -> None:
    """x (N, C) = wte[token] + wpe[position]"""
    inputs, wte = workspace.inputs, params.wte
    places = inputs.token_ids, inputs.positions, workspace.embeds
    tables = wte.panels, wte.scales, params.wpe, params.config.n_embd, wte.num_steps
    workspace.device.launch(embed_kernel(params.dtype), shape.tokens, EMBED_THREADS, x, *places, *tables, inputs.sizes)


def normed_linear(
    params: Params, norm: str, name: str, layer: int, target, x, shape: StepShape, workspace: Workspace, purpose: str
) -> None:
    """A linear layer of a layer norm of rows of x, in one kernel where the rows are few and made of whole steps."""
    # The head has so many blocks that a norm in each would take longer than a kernel of its own.
    is_fused = params.dtype != "float32" and shape.tokens <= FUSED_TOKENS and purpose != LOGITS
    if not is_fused or params.config.n_embd % STEP:
        layer_norm(params, norm, layer, x, shape, workspace, purpose)
        linear(params, name, layer, target, workspace.normed, shape, workspace, purpose)
        return
    w, weights, config = workspace, params.linears[name], params.config
    normed = Norm(x, w.every, *params.norms[norm], float(config.layer_norm_epsilon))
    function = normed_linear_kernel(params.dtype, config.n_embd, purpose)
    arguments = target, normed, weights, layer, width_of(params, purpose), w.inputs.sizes, NUM_TOKENS
    shared_bytes = fused_shared_bytes(weights.num_steps)
    w.device.launch(function, weights.num_panels, LINEAR_THREADS, *arguments, shared_bytes=shared_bytes)


def layer_norm(params: Params, norm: str, layer: int, x, shape: StepShape, workspace: Workspace, purpose: str) -> None:
    """normed (N, C), or of the rows whose logits are wanted (R, C)."""
    w, columns = workspace, params.config.n_embd
    rows = w.inputs.logit_rows if purpose == LOGITS else w.every
    count, which = rows_of(purpose, shape)
    sizes = padded_columns(columns), float(params.config.layer_norm_epsilon), w.inputs.sizes, which
    function, grid = layer_norm_kernel(family_of(params.dtype), columns), -(-count // NORM_WARPS)
    w.device.launch(function, grid, NORM_WARPS * WARP, w.normed, x, rows, *params.norms[norm], layer, *sizes)


def linear(
    params: Params, name: str, layer: int, target, inputs, shape: StepShape, workspace: Workspace, purpose: str
) -> None:
    """A linear layer of rows of inputs.

    A block of `linear_kernel` reads all inputs for 8 features, one of `gemm_kernel` for many more, but needs rows to be
    worth its tiles, and tiles to be worth a GPU.
    """
    weights, dtype, device = params.linears[name], params.dtype, workspace.device
    count, which = rows_of(purpose, shape)
    arguments = target, inputs, weights, layer, width_of(params, purpose), workspace.inputs.sizes, which
    tile = pick_tile(count, weights.features, device.multiprocessors)
    grid = tile.grid(count, weights.features)
    is_many = count > MAX_TILES[dtype] * TILE_TOKENS
    if dtype != "float32" and (is_many or (count > TILE_TOKENS and math.prod(grid) >= device.multiprocessors // 2)):
        shared_bytes = tile.shared_bytes(dtype)
        device.launch(gemm_kernel(dtype, tile, purpose), grid, tile.threads, *arguments, shared_bytes=shared_bytes)
        return
    tiles = min(rounded_up(-(-count // TILE_TOKENS)), MAX_TILES[dtype])
    grid = weights.num_panels, -(-count // (tiles * TILE_TOKENS))
    device.launch(linear_kernel(dtype, tiles, purpose), grid, LINEAR_THREADS, *arguments)


def add_projection(params: Params, name: str, layer: int, x, y, shape: StepShape, workspace: Workspace) -> None:
    """x (N, C) += linear(y): the end of each block, and the place where tensor-parallel ranks will sum their shares."""
    linear(params, name, layer, x, y, shape, workspace, ADD)


def attend(params: Params, layer: int, attended, kv_cache: KVCache, shape: StepShape, workspace: Workspace) -> None:
    """attended (N, C): each new token over its sequence's keys and values up to its own position."""
    if shape.tiles:
        attend_tiles(params, layer, attended, kv_cache, shape, workspace)
    else:
        attend_chunks(params, layer, attended, kv_cache, shape, workspace)


def attend_tiles(
    params: Params, layer: int, attended, kv_cache: KVCache, shape: StepShape, workspace: Workspace
) -> None:
    """Prefill, and steps in which some sequences have several new tokens."""
    c, config = kv_cache, params.config
    function = attend_tiles_kernel(c.padded_head, family_of(params.dtype))
    keys, out = keys_of(c, layer, workspace), (c.head_size, padded_columns(config.n_embd))
    arguments = attended, *keys, workspace.inputs.tiles, c.num_heads, *out, float(config.attention_scale(layer))
    workspace.device.launch(function, (shape.tiles, c.num_heads), TILE_WARPS * WARP, *arguments)


def attend_chunks(
    params: Params, layer: int, attended, kv_cache: KVCache, shape: StepShape, workspace: Workspace
) -> None:
    """Decoding: chunks of keys side by side; the last to be done merges them."""
    w, inputs, c, config, family = workspace, workspace.inputs, kv_cache, params.config, family_of(params.dtype)
    is_small = shape.tokens * c.num_heads * shape.chunks < 8 * w.device.multiprocessors
    warps = 1 if is_small else DECODE_WARPS
    grid = -(-shape.chunks // warps), c.num_heads, shape.tokens
    counts = c.num_heads, c.head_size, padded_columns(config.n_embd)
    more = inputs.sizes, *counts, float(config.attention_scale(layer)), shape.chunks
    function = attend_chunks_kernel(c.padded_head, family)
    w.device.launch(function, grid, warps * WARP, attended, w.merges, w.partials, *keys_of(c, layer, w), *more)


def heads_of(kv_cache: KVCache, workspace: Workspace) -> Heads:
    """Where c_attn's features go."""
    c, w = kv_cache, workspace
    shapes = c.num_slots, c.padded_len, c.num_heads, c.head_size, c.padded_head
    return Heads(w.q, c.k, c.v, w.inputs.positions, w.inputs.token_slots, *shapes)


def keys_of(kv_cache: KVCache, layer: int, workspace: Workspace) -> tuple[Any, ...]:
    """What both kernels of attention read."""
    c, w = kv_cache, workspace
    return w.q, c.k, c.v, layer, c.num_slots, c.padded_len, w.inputs.positions, w.inputs.token_slots


def rows_of(purpose: str, shape: StepShape) -> tuple[int, int]:
    """How many rows a linear layer may have, and the index in `sizes` of how many it has."""
    return (shape.logits, NUM_LOGITS) if purpose == LOGITS else (shape.tokens, NUM_TOKENS)


def width_of(params: Params, purpose: str) -> int:
    """Numbers of a row of what a linear layer writes."""
    if purpose == LOGITS:
        return params.config.vocab_size
    return params.config.n_embd if purpose == ADD else padded_columns(params.config.inner_size)
