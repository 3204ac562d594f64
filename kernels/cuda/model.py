"""GPT-2 on a card: the same page as kernels/reference/model.py, as kernels that are queued one after another.

Shapes: N new tokens of the step, S sequences, T cached positions, C n_embd, H heads, D head size,
F n_inner, V vocabulary, L layers, R rows whose logits are wanted.
"""

import math
from dataclasses import dataclass

import numpy as np

from tinygpt.kernels.batch import query_tiles, slots_of_tokens
from tinygpt.kernels.cuda.layers.attention import (
    CHUNK,
    QUERY_TILE,
    attend_chunks_kernel,
    attend_tiles_kernel,
    combine_chunks_kernel,
)
from tinygpt.kernels.cuda.layers.embedding import EMBED_THREADS, embed_kernel
from tinygpt.kernels.cuda.layers.gemm import gemm_kernel
from tinygpt.kernels.cuda.layers.gemm_tiles import pick_tile
from tinygpt.kernels.cuda.layers.layer_norm import NORM_WARPS, layer_norm_kernel
from tinygpt.kernels.cuda.layers.linear import (
    ADD,
    FUSED_TOKENS,
    LINEAR_THREADS,
    LOGITS,
    QKV,
    Heads,
    Norm,
    fused_shared_bytes,
    linear_kernel,
    normed_linear_kernel,
)
from tinygpt.kernels.cuda.layers.product import TOKENS as TILE_TOKENS
from tinygpt.kernels.cuda.packing.layout import STEP, from_bfloat16
from tinygpt.kernels.cuda.params import KVCache, Params, family_of
from tinygpt.kernels.cuda.runtime.warp import WARP
from tinygpt.kernels.cuda.sampling.logits import DeviceLogits
from tinygpt.kernels.cuda.workspace import LOGIT_ROWS, TOKENS, Workspace
from tinygpt.kernels.reference.layers import normalise

ATTENTION_WARPS = 4
MAX_TILES = {"float32": 2, "bfloat16": 4, "int8": 4}  # of TILE_TOKENS tokens, that a block of `linear` multiplies


@dataclass(frozen=True)
class Shape:
    """What decides a step's kernels and grids: its sizes, rounded up so that steps of like size share a graph."""

    tokens: int
    logits: int
    chunks: int  # of keys that a decoding token has
    tiles: int  # of queries; 0: each sequence has one new token

    @classmethod
    def of(cls, batch, workspace: Workspace, num_ahead: int = 1) -> "Shape":
        """num_ahead: steps of this shape that follow one another, each with one more position."""
        tokens, positions = batch.token_ids.size, int(batch.context_lens.max()) + num_ahead - 1
        chunks = min(rounded_up(-(-positions // CHUNK)), workspace.sizes.max_chunks)
        is_decode = tokens == batch.slots.size and tokens <= workspace.sizes.decode_tokens
        tiles = 0 if is_decode else rounded_up(query_tiles(batch.seq_starts, QUERY_TILE).size - 1)
        return cls(rounded_up(tokens), rounded_up(batch.logit_rows.size), chunks, tiles)


def forward(params: Params, batch, kv_cache: KVCache, workspace: Workspace) -> DeviceLogits:
    """Run one step: write its keys and values into the cache and return logits (R, V) float32.

    They stay on the card, in the workspace: the next step overwrites them. Does not wait for the card.
    """
    shape = Shape.of(batch, workspace)
    fill_inputs(workspace, batch)
    workspace.graphs.run(shape, lambda: queue_step(params, kv_cache, workspace, shape))
    return DeviceLogits(workspace, np.arange(batch.logit_rows.size), params.config.vocab_size)


def trace(params: Params, batch, kv_cache: KVCache, workspace: Workspace) -> tuple[np.ndarray, np.ndarray]:
    """Run a step as `forward` and look inside: hidden states (L + 1, N, C) and queries (L, N, C), float32.

    The hidden states are Hugging Face's: the input of each layer, and last what ln_f makes of the output.
    """
    w, n, hidden, queries = workspace, batch.token_ids.size, [], []
    shape = Shape.of(batch, w)
    fill_inputs(w, batch)
    embed(params, w, shape)
    for layer in range(params.config.n_layer):
        hidden.append(read_rows(w.device, w.x, n, params.config.n_embd))
        attention_block(params, layer, kv_cache, w, shape)
        queries.append(read_queries(kv_cache, w, n))
        mlp_block(params, layer, w, shape)
    hidden.append(final_norm(params, read_rows(w.device, w.x, n, params.config.n_embd)))
    return np.stack(hidden), np.stack(queries)


def rounded_up(count: int) -> int:
    """The next power of two: 0, 1, 2, 4, ..."""
    return 1 << (count - 1).bit_length() if count else 0


def fill_inputs(workspace: Workspace, batch) -> None:
    """Bring a batch to the device."""
    tiles = query_tiles(batch.seq_starts, QUERY_TILE)
    bounds = np.full(workspace.inputs.tiles.size, tiles[-1], np.int32)  # of empty tiles
    bounds[: tiles.size] = tiles
    workspace.inputs.write(
        workspace.device,
        {
            "sizes": np.array([batch.token_ids.size, batch.logit_rows.size], np.int32),
            "token_ids": batch.token_ids,
            "positions": batch.positions,
            "token_slots": slots_of_tokens(batch),
            "logit_rows": batch.logit_rows,
            "tiles": bounds,
        },
    )
    workspace.device.write(workspace.embeds, batch.embeds)


def queue_step(params: Params, kv_cache: KVCache, workspace: Workspace, shape: Shape) -> None:
    """Queue one step: its keys and values go into the cache, its logits into the workspace."""
    embed(params, workspace, shape)  # (N, C)
    for layer in range(params.config.n_layer):
        attention_block(params, layer, kv_cache, workspace, shape)  # (N, C)
        mlp_block(params, layer, workspace, shape)  # (N, C)
    head(params, workspace, shape)  # (R, V)


def embed(params: Params, workspace: Workspace, shape: Shape) -> None:
    """x (N, C) = wte[token] + wpe[position]; a row of embeds stands for a token whose id is negative."""
    w, inputs, wte = workspace, workspace.inputs, params.wte
    tables = wte.panels, wte.scales, params.wpe, params.config.n_embd, wte.num_steps, inputs.sizes
    places = inputs.token_ids, inputs.positions, w.embeds
    w.device.launch(embed_kernel(params.dtype), shape.tokens, EMBED_THREADS, w.x, *places, *tables)


def attention_block(params: Params, layer: int, kv_cache: KVCache, workspace: Workspace, shape: Shape) -> None:
    """x (N, C) += c_proj(attention(c_attn(ln_1(x)))): the new tokens over their sequences' caches."""
    w, inputs = workspace, workspace.inputs
    shapes = kv_cache.num_slots, kv_cache.padded_len, kv_cache.num_heads, kv_cache.head_size, kv_cache.padded_head
    heads = Heads(w.q, kv_cache.k, kv_cache.v, inputs.positions, inputs.token_slots, *shapes)
    normed_linear(params, "ln_1", "c_attn", layer, workspace, shape, heads, QKV)  # (N, 3C)
    attend(params, layer, kv_cache, workspace, shape)  # (N, C)
    add_projection(params, "attn_proj", layer, w.attended, workspace, shape)  # (N, C)


def attend(params: Params, layer: int, cache: KVCache, workspace: Workspace, shape: Shape) -> None:
    """attended (N, C): each new token over its sequence's cache up to its own position."""
    w, inputs, size, family = workspace, workspace.inputs, cache.padded_head, family_of(params.dtype)
    launch, scale = w.device.launch, float(params.config.attention_scale(layer))
    keys = w.q, cache.k, cache.v, layer, cache.num_slots, cache.padded_len, inputs.positions, inputs.token_slots
    out = cache.head_size, row_size(params, "attn_proj")
    if shape.tiles:
        grid = shape.tiles, cache.num_heads
        launch(
            attend_tiles_kernel(size, family),
            grid,
            4 * WARP,
            w.attended,
            *keys,
            inputs.tiles,
            cache.num_heads,
            *out,
            scale,
        )
        return
    warps = 1 if shape.tokens * cache.num_heads * shape.chunks < 8 * w.device.multiprocessors else ATTENTION_WARPS
    grid = -(-shape.chunks // warps), cache.num_heads, shape.tokens
    sizes = inputs.sizes, cache.num_heads, scale, shape.chunks
    launch(attend_chunks_kernel(size, family), grid, warps * WARP, w.partials, *keys, *sizes)
    grid, sizes = (-(-cache.num_heads // ATTENTION_WARPS), shape.tokens), (inputs.positions, inputs.sizes)
    counts = cache.num_heads, *out, shape.chunks
    launch(combine_chunks_kernel(size, family), grid, ATTENTION_WARPS * WARP, w.attended, w.partials, *sizes, *counts)


def mlp_block(params: Params, layer: int, workspace: Workspace, shape: Shape) -> None:
    """x (N, C) += c_proj(activation(c_fc(ln_2(x))))."""
    w = workspace
    normed_linear(params, "ln_2", "c_fc", layer, w, shape, w.inner, params.config.activation)  # (N, F)
    add_projection(params, "mlp_proj", layer, w.inner, workspace, shape)  # (N, C)


def head(params: Params, workspace: Workspace, shape: Shape) -> None:
    """logits (R, V) = ln_f(x[logit_rows]) @ lm_head.T."""
    if shape.logits:
        normed_linear(params, "ln_f", "lm_head", 0, workspace, shape, workspace.logits, LOGITS)


def normed_linear(
    params: Params, norm: str, name: str, layer: int, workspace: Workspace, shape: Shape, target, purpose: str
) -> None:
    """A linear layer of a layer norm, in one kernel where the rows are few."""
    w, config, is_head = workspace, params.config, purpose == LOGITS
    count, which = (shape.logits, LOGIT_ROWS) if is_head else (shape.tokens, TOKENS)
    rows = w.inputs.logit_rows if is_head else w.every
    gain, bias = params.norms[norm]
    columns, epsilon = config.n_embd, float(config.layer_norm_epsilon)
    # The head has so many blocks that a norm in each would take longer than a kernel of its own.
    if count <= FUSED_TOKENS and params.dtype != "float32" and not is_head:
        weights = weights_of(params, name)
        arguments = Norm(w.x, rows, gain, bias, epsilon), weights, layer, width_of(params, purpose)
        kernel = normed_linear_kernel(params.dtype, columns, purpose)
        shared_bytes = fused_shared_bytes(weights.num_steps)
        sizes = w.inputs.sizes, which
        w.device.launch(
            kernel, weights.num_panels, LINEAR_THREADS, target, *arguments, *sizes, shared_bytes=shared_bytes
        )
        return
    arguments = w.x, rows, gain, bias, layer, row_size(params, name), epsilon, w.inputs.sizes, which
    grid, family = -(-count // NORM_WARPS), family_of(params.dtype)
    w.device.launch(layer_norm_kernel(family, columns), grid, NORM_WARPS * WARP, w.normed, *arguments)
    linear(params, name, layer, workspace, count, target, w.normed, purpose, which)


def linear(
    params: Params, name: str, layer: int, workspace: Workspace, count: int, target, inputs, purpose: str, which=TOKENS
) -> None:
    """A linear layer of `count` rows of inputs, or fewer: the device knows how many.

    A block of `linear_kernel` reads all inputs for 8 features, one of `gemm_kernel` for many more, but needs rows to be
    worth its tiles, and tiles to be worth a card.
    """
    weights, dtype, device = weights_of(params, name), params.dtype, workspace.device
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


def add_projection(params: Params, name: str, layer: int, y, workspace: Workspace, shape: Shape) -> None:
    """x (N, C) += linear(y): the end of each block, and the place where tensor-parallel ranks will sum their shares."""
    linear(params, name, layer, workspace, shape.tokens, workspace.x, y, ADD)


def weights_of(params: Params, name: str):
    return params.lm_head if name == "lm_head" else params.linears[name]


def row_size(params: Params, name: str) -> int:
    """Numbers of a row of a layer's inputs, padding included."""
    return weights_of(params, name).num_steps * STEP


def width_of(params: Params, purpose: str) -> int:
    """Numbers of a row of what a linear layer writes."""
    if purpose == LOGITS:
        return params.config.vocab_size
    return params.config.n_embd if purpose == ADD else row_size(params, "mlp_proj")


def read_rows(device, array, count: int, columns: int) -> np.ndarray:
    return device.read(array[: count * columns]).reshape(count, columns)


def read_queries(cache: KVCache, workspace: Workspace, count: int) -> np.ndarray:
    """(N, C) float32"""
    q = read_rows(workspace.device, workspace.q, count, cache.num_heads * cache.padded_head)
    q = (q if cache.is_float32 else from_bfloat16(q)).reshape(count, cache.num_heads, cache.padded_head)
    return q[..., : cache.head_size].reshape(count, -1)


def final_norm(params: Params, x: np.ndarray) -> np.ndarray:
    """ln_f of x (N, C), on the host."""
    return normalise(x, *params.final_norm, params.config.layer_norm_epsilon)
