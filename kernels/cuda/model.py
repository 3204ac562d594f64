"""GPT-2 on a GPU: the page of kernels/reference/model.py as kernels that are queued one after another.

Below it are the launches of each layer, and several decode steps without the host. Grids cover a step's shape, rounded
up: blocks past the true number of rows return.

Shapes: N new tokens, C n_embd, F n_inner, V vocabulary, R rows with logits.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numba import cuda, int32

from ..backend import no_op
from ..numbers import ALL_TOKENS
from ..reference.layers import normalize
from .jit import WARP, kernel, wait_for_kernel_before
from .kv_cache import KVCache, put_rows
from .layers.adapters import ADAPT_WARPS, adapt_kernel
from .layers.attention import TILE_WARPS, attend_decode_kernel, attend_prefill_kernel, tile_blocks
from .layers.epilogue import ADD, FLOATS, LOGITS, PLAIN, QKV, QKV_ROWS, Heads
from .layers.experts import (
    ADD_THREADS,
    CHOOSE_WARPS,
    SORT_THREADS,
    add_experts,
    choose_kernel,
    max_tiles,
    sort_pairs,
)
from .layers.gemm import gemm_kernel
from .layers.linear import (
    FUSED_TOKENS,
    LINEAR_THREADS,
    ROWS,
    Norm,
    fused_block_bytes,
    fused_shared_bytes,
    linear_kernel,
    max_octets,
    normed_linear_kernel,
    steps_ahead,
)
from .layers.rows import EMBED_THREADS, NORM_WARPS, embed_kernel, layer_norm_kernel
from .layers.tiles import pick_tile
from .looks import Looks
from .params import DTYPES, GATE, STEP, NormWeights, Params, dtype_of, mlp_order, padded_columns
from .ranks import READS, gather, place_of
from .sampling import DeviceLogits, is_greedy, queue_choice
from .workspace import (
    NUM_LOGITS,
    NUM_PAIRS,
    NUM_STEPS_DONE,
    NUM_TOKENS,
    READ_STEPS,
    Queries,
    StepShape,
    Workspace,
    fill,
    rounded_up,
)

ONE_LAYER = 0  # of those before and after the blocks
HEAD = ("project_out", "lm_head")  # whose rows have logits
DECODE_WARPS = 4  # of a block, if there is work for all multiprocessors
FEW_TOKENS = 64  # on an H200, up to which `linear` is faster than `gemm`
HEAD_BLOCKS = 4  # of a multiprocessor, which share the panels of the head
ADVANCE_THREADS = 256


@dataclass(frozen=True)
class Step:
    """What a step's kernels share."""

    shape: StepShape
    kv_cache: KVCache
    workspace: Workspace


@dataclass(frozen=True)
class Rows:
    """Rows of a layer."""

    indices: Any  # of the stream's rows
    most: int
    kind: int  # the index of their true number in `Inputs.sizes`


def forward(params: Params, batch, kv_cache: KVCache, workspace: Workspace, look=None) -> DeviceLogits:
    """Queue a step. Return logits (R, V) float32, which the next step overwrites."""
    queries = begin(params, workspace, batch)
    step = Step(StepShape.of(batch, queries, workspace.max_shape), kv_cache, workspace)
    if look is not None:
        queue_step(params, step, Looks(look, params, batch, kv_cache, workspace), look.first)
    elif workspace.ranks is not None:  # which meet on the host
        queue_step(params, step)
    else:
        workspace.graphs.run(step.shape, lambda: queue_step(params, step))
    return DeviceLogits(workspace, np.arange(batch.logit_rows.size), params.share.vocab_size)


def begin(params: Params, workspace: Workspace, batch, num_tokens: Any = ALL_TOKENS) -> Queries:
    if params.adapters is not None:
        _ = workspace.sums  # memory cannot be had during a capture
        workspace.device.write(params.adapters.on_device, params.adapters.of_slot)
    return fill(workspace, batch, num_tokens)


def queue_step(params: Params, step: Step, look=no_op, first: int = 0, greedy: bool = True) -> None:
    x = step.workspace.x
    if params.share.is_first:
        embed(params, x, step)
    if first:
        look("resid_post", first - 1)
    for layer in range(first, params.share.n_layer):
        look("resid_pre", layer)
        attention_block(params, layer, x, step, look)
        norm_after(params, "ln_1", layer, x, step)
        look("resid_mid", layer)
        place = mlp_order(params.config, params.share).index(layer)
        mlp = expert_block if layer in params.config.expert_layers else mlp_block
        mlp(params, place, x, step, look)
        norm_after(params, "ln_2", place, x, step)
        look("resid_post", layer)
    head(params, x, step, greedy)


def embed(params: Params, x, step: Step) -> None:
    """x (N, C) = wte[token] + wpe[position], or a row of embeds for a token with a negative id."""
    narrow = step.workspace.narrow
    config = params.config
    has_positions = not config.has_alibi
    stream = x, config.n_embd, config.n_embd, "float32"
    if config.embed_dim is None:
        look_up(params, *stream, step, True, has_positions)
    else:
        embeddings = narrow, padded_columns(config.embed_dim), config.embed_dim, params.dtype
        look_up(params, *embeddings, step, True, False)
        look_up(params, *stream, step, False, has_positions)
        linear(params, "project_in", ONE_LAYER, x, narrow, step, ADD)
    norm_after(params, "ln_e", ONE_LAYER, x, step)


def look_up(params: Params, out, width: int, columns: int, dtype: str, step: Step, *parts: bool) -> None:
    w = step.workspace
    wte = params.linears["wte"]
    places = w.inputs.token_ids, w.inputs.positions, w.embeds
    tables = wte.panels, wte.scales, float(params.config.embed_scale), params.wpe, columns, wte.num_steps
    function = embed_kernel(params.dtype, dtype, *parts)
    w.device.launch(function, step.shape.tokens, EMBED_THREADS, out, width, *places, *tables, w.inputs.sizes)


def attention_block(params: Params, layer: int, x, step: Step, look=no_op) -> None:
    """x (N, C) += c_proj(attention(c_attn(ln_1(x))))."""
    w = step.workspace
    attended = w.attended
    is_int8 = step.kv_cache.is_int8
    heads = heads_of(step)
    target, epilogue = (w.qkv, QKV_ROWS) if is_int8 else (heads, QKV)
    normed_linear(params, "ln_1", "c_attn", layer, target, x, step, epilogue)  # (N, 3C)
    for kind in "qkv":
        look(kind, layer)
    if is_int8:
        put_rows(heads, DTYPES[params.dtype].numbers.name, layer, w, step.shape.tokens)
    attend(params, layer, attended, heads, step)
    look("z", layer)
    add_projection(params, "attn_proj", layer, x, attended, step, partial(look, "attn_out", layer))


def mlp_block(params: Params, place: int, x, step: Step, look=no_op) -> None:
    """x (N, C) += c_proj(activation(c_fc(ln_2(x))))."""
    inner = step.workspace.inner
    layer = mlp_order(params.config, params.share)[place]

    def compute(target, epilogue: str) -> None:
        normed_linear(params, "ln_2", "c_fc", place, target, x, step, epilogue)  # (N, F)

    compute(inner, params.config.activation)
    look("pre", layer, compute)
    look("post", layer)
    add_projection(params, "mlp_proj", place, x, inner, step, partial(look, "mlp_out", layer))


def expert_block(params: Params, place: int, x, step: Step, look=no_op) -> None:
    """x (N, C) += each token's experts, by their shares."""
    w = step.workspace
    m = w.mixture
    config = params.config
    sizes = config.num_experts, config.experts_per_token
    tokens = step.shape.tokens
    pairs = tokens * config.experts_per_token
    octets = min(rounded_up(-(-pairs // (config.num_experts * ROWS))), max_octets(params.dtype))
    num_tiles = max_tiles(pairs, config.num_experts, octets * ROWS)
    num_plain = config.n_layer - len(config.expert_layers)
    first = num_plain + (place - num_plain) * config.num_experts

    def linear_of_experts(name: str, target, inputs, epilogue: str) -> None:
        weights = params.linears[name]
        ahead = steps_ahead(params.dtype, octets, weights.num_steps)
        function = linear_kernel(params.dtype, octets, epilogue, ahead, has_tiles=True)
        target, width = place_of(params, name, target, step, epilogue)
        arguments = target, inputs, weights, first, width, m.tiles, 0
        w.device.launch(function, (weights.num_panels, num_tiles), LINEAR_THREADS, *arguments)

    norm = params.norms.get("ln_2")
    normalize_rows(params, norm, place, m.outputs, x, step, token_rows(step), "float32")
    linear(params, GATE, place - num_plain, m.scores, m.outputs, step, LOGITS)  # (N, E)
    choosing = choose_kernel(config.norm_topk_prob)
    grid = -(-tokens // CHOOSE_WARPS)
    w.device.launch(choosing, grid, CHOOSE_WARPS * WARP, m.chosen, m.shares, m.scores, *sizes, w.inputs.sizes)
    sorting = m.chosen, m.counts, m.order, m.places, m.tiles, *sizes, octets * ROWS, num_tiles, w.inputs.sizes
    w.device.launch(sort_pairs, 1, SORT_THREADS, *sorting)
    layer_norm(params, "ln_2", place, x, step, Rows(m.order, pairs, NUM_PAIRS))  # (P, C)
    linear_of_experts("c_fc", w.inner, w.normed, config.activation)  # (P, F)
    linear_of_experts("mlp_proj", m.outputs, w.inner, FLOATS)  # (P, C)
    width = padded_columns(config.n_embd)
    adding = x, m.outputs, width, m.shares, m.places, config.experts_per_token, config.n_embd, w.inputs.sizes
    w.device.launch(add_experts, tokens, ADD_THREADS, *adding)


def head(params: Params, x, step: Step, greedy: bool) -> None:
    """logits (R, V) = ln_f(x[logit_rows]) @ lm_head.T, and a token of each row, unless another rank samples."""
    w = step.workspace
    if step.shape.logits:
        layer_norm(params, "ln_f", ONE_LAYER, x, step, logit_rows(step))
        inputs = w.normed
        if params.config.embed_dim is not None:
            linear(params, "project_out", ONE_LAYER, w.narrow, inputs, step, PLAIN)  # (R, E)
            inputs = w.narrow
        linear(params, "lm_head", ONE_LAYER, w.logits, inputs, step, LOGITS)
        count = min(step.shape.logits, w.max_shape.logits)
        if w.sampling is not None and w.ranks is None:
            choice = w.inputs.rows, w.inputs.num_tokens, w.sampling.step_token_ids
            queue_choice(w, *choice, count, params.config.vocab_size, greedy)


def normed_linear(
    params: Params, norm: str, name: str, layer: int, target, x, step: Step, epilogue: str
) -> None:
    """Queue a linear layer of a layer norm: one kernel if the rows are few."""
    w = step.workspace
    columns = params.config.n_embd
    is_short = step.shape.tokens <= FUSED_TOKENS and norm in params.norms
    fits = fused_block_bytes(columns) <= w.device.shared_bytes and columns % STEP == 0
    if params.adapters is not None or not (DTYPES[params.dtype].numbers.has_mma and is_short and fits):
        layer_norm(params, norm, layer, x, step, token_rows(step))
        linear(params, name, layer, target, w.normed, step, epilogue)
        return
    weights = params.linears[name]
    normed = Norm(x, w.every, *params.norms[norm], float(params.config.layer_norm_epsilon))
    function = normed_linear_kernel(params.dtype, columns, epilogue)
    target, width = place_of(params, name, target, step, epilogue)
    arguments = target, normed, weights, layer, width, w.inputs.sizes, NUM_TOKENS
    shared_bytes = fused_shared_bytes(columns)
    w.device.launch(function, weights.num_panels, LINEAR_THREADS, *arguments, shared_bytes=shared_bytes)


def layer_norm(params: Params, norm: str, layer: int, x, step: Step, rows: Rows) -> None:
    """normed (N, C) = x, or (R, C) = x[logit_rows]: normalized, unless norms follow the blocks."""
    normalize_rows(params, params.norms.get(norm), layer, step.workspace.normed, x, step, rows, params.dtype)


def norm_after(params: Params, norm: str, layer: int, x, step: Step) -> None:
    """Normalize the stream x (N, C) in its place, if the model does so here."""
    if norm in params.norms_after:
        normalize_rows(params, params.norms_after[norm], layer, x, x, step, token_rows(step), "float32")


def normalize_rows(
    params: Params, norm: NormWeights | None, layer: int, out, x, step: Step, rows: Rows, dtype: str
) -> None:
    """out (n, C) = x[rows], normalized unless `norm` is None, as inputs of a dtype; not padded in x's place."""
    w = step.workspace
    columns = params.config.n_embd
    width = columns if out is x else padded_columns(columns)
    function = layer_norm_kernel(DTYPES[dtype].numbers.name, columns, norm is not None)
    sizes = width, float(params.config.layer_norm_epsilon), w.inputs.sizes, rows.kind
    arguments = out, x, rows.indices, *(norm or 2 * (params.slopes,)), layer, *sizes
    w.device.launch(function, -(-rows.most // NORM_WARPS), NORM_WARPS * WARP, *arguments)


def linear(params: Params, name: str, layer: int, target, inputs, step: Step, epilogue: str) -> None:
    """Queue a linear layer, and its tokens' adapters if there are some."""
    factors = params.adapters and params.adapters.linears.get(name)
    if not factors:
        products(params, name, layer, target, inputs, step, epilogue)
        return
    w = step.workspace
    weights = params.linears[name]
    products(params, name, layer, w.sums, inputs, step, LOGITS)
    target, width = place_of(params, name, target, step, epilogue)
    arguments = target, w.sums, inputs, weights, layer, width, factors
    places = params.adapters.on_device, w.inputs.token_slots, w.inputs.sizes
    function = adapt_kernel(params.dtype, epilogue)
    threads = ADAPT_WARPS * WARP
    w.device.launch(function, step.shape.tokens, threads, *arguments, *places, shared_bytes=4 * factors.rank)


def products(params: Params, name: str, layer: int, target, inputs, step: Step, epilogue: str) -> None:
    """Queue a linear layer, of many tokens by `gemm_kernel`."""
    w = step.workspace
    weights = params.linears[name]
    dtype = dtype_of(name, params.dtype)
    rows = logit_rows(step) if name in HEAD else token_rows(step)
    count = rows.most
    target, width = place_of(params, name, target, step, epilogue)
    arguments = target, inputs, weights, layer, width, w.inputs.sizes, rows.kind
    if count > FEW_TOKENS:
        tile, parts = pick_tile(count, weights.features, weights.num_steps, dtype, w.device)
        function = gemm_kernel(dtype, tile, epilogue, parts)
        grid = *tile.grid(count, weights.features), parts
        arguments += w.run_sums, w.tile_arrivals
        w.device.launch(function, grid, tile.threads, *arguments, shared_bytes=tile.shared_bytes(dtype))
        return
    octets = min(rounded_up(-(-count // ROWS)), max_octets(dtype))
    blocks = HEAD_BLOCKS * w.device.multiprocessors if epilogue == LOGITS else weights.num_panels
    grid = min(blocks, weights.num_panels), -(-count // (octets * ROWS))
    function = linear_kernel(dtype, octets, epilogue, steps_ahead(dtype, octets, weights.num_steps))
    w.device.launch(function, grid, LINEAR_THREADS, *arguments)


def add_projection(params: Params, name: str, layer: int, x, y, step: Step, look=no_op) -> None:
    """x (N, C) += linear(y). Ranks gather y and x, of which each has computed columns."""

    def compute(target, epilogue: str) -> None:
        linear(params, name, layer, target, y, step, epilogue)

    gather(step.workspace, READS[name], y)
    if not look(compute):
        compute(x, ADD)
    gather(step.workspace, name, x)


def attend(params: Params, layer: int, attended, heads: Heads, step: Step) -> None:
    w = step.workspace
    attended = attended if w.ranks is None else w.ranks.place("c_attn", attended)
    shape = step.shape
    config = params.config
    scale = float(config.attention(params.share.layers[layer]).scale)
    scaling = padded_columns(config.n_embd), scale, params.slopes
    numbers = DTYPES[params.dtype].numbers
    kind = heads.padded_head, numbers.name, config.has_alibi, step.kv_cache.is_int8
    if shape.tiles:
        grid = shape.tiles, heads.num_heads, tile_blocks(numbers)
        function = attend_prefill_kernel(*kind)
        w.device.launch(function, grid, TILE_WARPS * WARP, attended, heads, layer, w.inputs.tiles, *scaling)
    if shape.lone:
        is_small = shape.lone * heads.num_heads * shape.key_blocks < 8 * w.device.multiprocessors
        warps = 1 if is_small else DECODE_WARPS
        grid = -(-shape.key_blocks // warps), heads.num_heads, shape.lone
        function = attend_decode_kernel(*kind)
        arguments = attended, w.merges, w.partials, heads, layer, w.inputs.lone, *scaling, shape.key_blocks
        w.device.launch(function, grid, warps * WARP, *arguments)


def heads_of(step: Step) -> Heads:
    w = step.workspace
    c = step.kv_cache
    shapes = c.num_slots, c.padded_len, c.num_heads, c.head_size, c.padded_head
    return Heads(w.q, c.k, c.v, w.inputs.positions, w.inputs.token_slots, *shapes)


def token_rows(step: Step) -> Rows:
    return Rows(step.workspace.every, step.shape.tokens, NUM_TOKENS)


def logit_rows(step: Step) -> Rows:
    return Rows(step.workspace.inputs.logit_rows, step.shape.logits, NUM_LOGITS)


def multi_step(
    params: Params,
    batch,
    kv_cache: KVCache,
    workspace: Workspace,
    warpers,
    seeds,
    sample_indices,
    num_steps: int,
    ends,
) -> Iterable[np.ndarray]:
    """Queue all steps at once, in spite of `ends`. Return the tokens (S,) of each."""
    draws = warpers, seeds, sample_indices, batch.context_lens
    queries = begin(params, workspace, batch, warpers.num_tokens)
    step = Step(StepShape.of(batch, queries, workspace.max_shape, num_steps), kv_cache, workspace)
    return _queued_steps(params, step, batch, draws, num_steps)


def _queued_steps(params: Params, step: Step, batch, draws: tuple, num_steps: int) -> Iterator[np.ndarray]:
    w = step.workspace
    s = w.sampling
    count = batch.token_ids.size
    greedy = is_greedy(draws[0])
    if not greedy:
        s.write(np.arange(count), *draws)

    def run() -> None:
        queue_step(params, step, greedy=greedy)
        chosen = s.step_token_ids, s.history
        arrays = w.inputs.token_ids, w.inputs.positions, s.positions, *chosen, w.inputs.sizes
        w.device.launch(advance, 1, ADVANCE_THREADS, *arrays, w.max_shape.decode_tokens)

    for first in range(0, num_steps, READ_STEPS):
        w.graphs.run((step.shape, greedy), run, min(READ_STEPS, num_steps - first))
        w.device.mark(s.marks[first // READ_STEPS])
    return _read_tokens(w, num_steps, count)


def _read_tokens(workspace: Workspace, num_steps: int, count: int) -> Iterator[np.ndarray]:
    """Yield the tokens (count,) of each step."""
    size = workspace.max_shape.decode_tokens
    s = workspace.sampling
    for first in range(0, num_steps, READ_STEPS):
        steps = min(READ_STEPS, num_steps - first)
        mark = s.marks[first // READ_STEPS]
        tokens = workspace.device.read_at(mark, s.history, steps * size, first * size)
        yield from tokens.reshape(steps, size)[:, :count]


@kernel
def advance(token_ids, positions, draw_positions, chosen, history, sizes, capacity):
    """Make the chosen tokens the next step's, 0 for -1, and note them in history[steps done]. One block."""
    wait_for_kernel_before()
    thread = int32(cuda.threadIdx.x)
    count = sizes[NUM_TOKENS]
    step = sizes[NUM_STEPS_DONE]
    for n in range(thread, count, int32(ADVANCE_THREADS)):
        history[step * capacity + n] = chosen[n]
        token_ids[n] = max(chosen[n], int32(0))
        positions[n] += int32(1)
        draw_positions[n] += int32(1)
    cuda.syncthreads()
    if thread == 0:
        sizes[NUM_STEPS_DONE] = step + int32(1)


def stop_early(workspace: Workspace, is_wanted: bool) -> None:
    """Do nothing: queued steps are taken."""


def final_norm(params: Params, x: np.ndarray) -> np.ndarray:
    if params.final_norm is None:
        return x
    return normalize(x, *params.final_norm, params.config.layer_norm_epsilon)
