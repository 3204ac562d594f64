"""The layers as model.py calls them. Grids cover a step of `shape`; blocks past the true number of rows return."""

from ..numbers import from_bfloat16
from .kv_cache import KVCache
from .layers.attention import TILE_BLOCKS, TILE_WARPS, attend_decode_kernel, attend_prefill_kernel
from .layers.epilogue import ADD, LOGITS, Heads
from .layers.gemm import gemm_kernel, pick_tile
from .layers.linear import (
    FUSED_TOKENS,
    LINEAR_THREADS,
    ROWS,
    Norm,
    fused_block_bytes,
    fused_shared_bytes,
    linear_kernel,
    normed_linear_kernel,
    steps_ahead,
)
from .layers.rows import EMBED_THREADS, NORM_WARPS, embed_kernel, layer_norm_kernel
from .params import STEP, Params, activation_dtype, padded_columns
from .runtime.jit import OLDEST
from .runtime.ptx import WARP
from .shapes import NUM_LOGITS, NUM_TOKENS, StepShape, rounded_up
from .workspace import Workspace

DECODE_WARPS = 4  # of a block, if there is work for all multiprocessors
MAX_OCTETS = {"float32": 1, "bfloat16": 8, "int8": 8}  # of ROWS tokens in a block of `linear`
FEW_TOKENS = 64  # on an H200, up to which `linear` is faster than `gemm`
HEAD_BLOCKS = 4  # of a multiprocessor, which share the panels of the head


def embed_tokens(params: Params, x, shape: StepShape, workspace: Workspace) -> None:
    inputs, wte = workspace.inputs, params.wte
    places = inputs.token_ids, inputs.positions, workspace.embeds
    tables = wte.panels, wte.scales, params.wpe, params.config.n_embd, wte.num_steps
    workspace.device.launch(
        embed_kernel(params.dtype), shape.tokens, EMBED_THREADS, x, *places, *tables, inputs.sizes
    )


def normed_linear(
    params: Params,
    norm: str,
    name: str,
    layer: int,
    target,
    x,
    shape: StepShape,
    workspace: Workspace,
    epilogue: str,
) -> None:
    """A linear layer of a layer norm: one kernel if the rows are few."""
    # The head has too many blocks to repeat the norm in each.
    is_fused = params.dtype != "float32" and shape.tokens <= FUSED_TOKENS and epilogue != LOGITS
    fits = fused_block_bytes(params.config.n_embd) <= workspace.device.shared_bytes
    if not (is_fused and fits) or params.config.n_embd % STEP:
        layer_norm(params, norm, layer, x, shape, workspace, epilogue)
        linear(params, name, layer, target, workspace.normed, shape, workspace, epilogue)
        return
    w = workspace
    weights = params.linears[name]
    config = params.config
    normed = Norm(x, w.every, *params.norms[norm], float(config.layer_norm_epsilon))
    function = normed_linear_kernel(params.dtype, config.n_embd, epilogue)
    arguments = target, normed, weights, layer, width_of(params, epilogue), w.inputs.sizes, NUM_TOKENS
    shared_bytes = fused_shared_bytes(weights.num_steps)
    w.device.launch(function, weights.num_panels, LINEAR_THREADS, *arguments, shared_bytes=shared_bytes)


def layer_norm(
    params: Params, norm: str, layer: int, x, shape: StepShape, workspace: Workspace, epilogue: str
) -> None:
    """normed (N, C), or (R, C) for logits."""
    w, columns = workspace, params.config.n_embd
    rows = w.inputs.logit_rows if epilogue == LOGITS else w.every
    count, row_kind = rows_of(epilogue, shape)
    sizes = padded_columns(columns), float(params.config.layer_norm_epsilon), w.inputs.sizes, row_kind
    function = layer_norm_kernel(activation_dtype(params.dtype), columns)
    grid = -(-count // NORM_WARPS)
    w.device.launch(function, grid, NORM_WARPS * WARP, w.normed, x, rows, *params.norms[norm], layer, *sizes)


def linear(
    params: Params,
    name: str,
    layer: int,
    target,
    inputs,
    shape: StepShape,
    workspace: Workspace,
    epilogue: str,
) -> None:
    """A linear layer, of many tokens by `gemm_kernel`."""
    weights = params.linears[name]
    dtype = params.dtype
    device = workspace.device
    count, row_kind = rows_of(epilogue, shape)
    arguments = target, inputs, weights, layer, width_of(params, epilogue), workspace.inputs.sizes, row_kind
    if count > FEW_TOKENS and device.capability >= OLDEST["bfloat16"]:
        tile = pick_tile(count, weights.features, dtype, device)
        grid = tile.grid(count, weights.features)
        shared_bytes = tile.shared_bytes(dtype)
        device.launch(
            gemm_kernel(dtype, tile, epilogue), grid, tile.threads, *arguments, shared_bytes=shared_bytes
        )
        return
    octets = min(rounded_up(-(-count // ROWS)), MAX_OCTETS[dtype])
    blocks = HEAD_BLOCKS * device.multiprocessors if epilogue == LOGITS else weights.num_panels
    grid = min(blocks, weights.num_panels), -(-count // (octets * ROWS))
    function = linear_kernel(dtype, octets, epilogue, steps_ahead(dtype, octets, weights.num_steps))
    device.launch(function, grid, LINEAR_THREADS, *arguments)


def add_projection(
    params: Params, name: str, layer: int, x, y, shape: StepShape, workspace: Workspace
) -> None:
    """x (N, C) += linear(y)."""
    linear(params, name, layer, x, y, shape, workspace, ADD)


def attend(
    params: Params, layer: int, attended, kv_cache: KVCache, shape: StepShape, workspace: Workspace
) -> None:
    w = workspace
    c = kv_cache
    config = params.config
    family = activation_dtype(params.dtype)
    keys = w.q, c.k, c.v, layer, c.num_slots, c.padded_len, w.inputs.positions, w.inputs.token_slots
    more = c.num_heads, c.head_size, padded_columns(config.n_embd), float(config.attention_scale(layer))
    if shape.tiles:  # prefill, and steps with several new tokens of a sequence
        grid = shape.tiles, c.num_heads, TILE_BLOCKS[family]
        function = attend_prefill_kernel(c.padded_head, family)
        threads = TILE_WARPS * WARP
        w.device.launch(function, grid, threads, attended, *keys, w.inputs.tiles, *more)
        return
    is_small = shape.tokens * c.num_heads * shape.key_blocks < 8 * w.device.multiprocessors
    warps = 1 if is_small else DECODE_WARPS
    function = attend_decode_kernel(c.padded_head, family)
    grid = -(-shape.key_blocks // warps), c.num_heads, shape.tokens
    arguments = attended, w.merges, w.partials, *keys, w.inputs.sizes, *more, shape.key_blocks
    w.device.launch(function, grid, warps * WARP, *arguments)


def heads_of(kv_cache: KVCache, workspace: Workspace) -> Heads:
    c, w = kv_cache, workspace
    shapes = c.num_slots, c.padded_len, c.num_heads, c.head_size, c.padded_head
    return Heads(w.q, c.k, c.v, w.inputs.positions, w.inputs.token_slots, *shapes)


def rows_of(epilogue: str, shape: StepShape) -> tuple[int, int]:
    """Return the most rows of a linear layer, and the index of the true number in `sizes`."""
    return (shape.logits, NUM_LOGITS) if epilogue == LOGITS else (shape.tokens, NUM_TOKENS)


def width_of(params: Params, epilogue: str) -> int:
    if epilogue == LOGITS:
        return params.config.vocab_size
    return params.config.n_embd if epilogue == ADD else padded_columns(params.config.inner_size)


def show(look, kv_cache: KVCache, workspace: Workspace, batch, kind: str, layer: int) -> None:
    """Show a Look the stream (N, C), and take it back, or the queries (N, H, D)."""
    w = workspace
    c = kv_cache
    count = batch.token_ids.size
    if (kind, layer) not in look.points:
        return
    if kind != "q":
        rows = w.device.read(w.x[: count * c.num_heads * c.head_size]).reshape(count, -1)
        look(kind, layer, rows)
        if look.changes:
            w.device.write(w.x, rows)
        return
    q = w.device.read(w.q[: count * c.num_heads * c.padded_head]).reshape(count, c.num_heads, c.padded_head)
    look(kind, layer, (q if c.is_float32 else from_bfloat16(q))[..., : c.head_size])
