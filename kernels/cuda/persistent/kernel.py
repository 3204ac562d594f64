"""Several greedy decode steps of a small batch in one kernel, whose blocks stay on their multiprocessors throughout.

A kernel of the graph becomes a phase, and the end of a kernel a barrier among the blocks, one to a multiprocessor. The
bits are those of the graph's kernels. What it saves is what lies between two of them: blocks that end and begin, and
weights that nobody asks for meanwhile. Here the next weights are on their way before a block waits for the others.

The limit of a step is the greater of two: the bytes of the weights over the bandwidth (58 us for 124M in bfloat16 at
4.3 TB/s), and the chain of 5 phases a layer and 2 more. A phase takes at least some 2 us: a barrier, which is an atomic
and a load that sees the last of them, 1.2 us, and its activations' way from the L2 cache through the arithmetic, 0.8.
Weights arrive meanwhile, but for those of lm_head, which are too many. So the prediction for an H200, not yet measured,
in us a token at a short context:

            phases   chain   weights of the layers   lm_head   in all
    124M        62     124                      40        18      145
    355M       122     244                     140        24      270
    774M       182     364                     330        30      450
    1.5B       242     484                     685        38      850

Beside the graph, whose 5 kernels a layer begin early too, it saves the beginnings and ends of blocks: most at 124M, and
little from 774M on.
Phases: Spector et al., "Look Ma, No Bubbles!" (2025).
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinygpt.kernels.cuda.kv_cache import KVCache
from tinygpt.kernels.cuda.launches import heads_of
from tinygpt.kernels.cuda.layers.linear import ADD, FUSED_TOKENS, LINEAR_THREADS, QKV, Heads
from tinygpt.kernels.cuda.layers.product import SHARED_PAD
from tinygpt.kernels.cuda.packing.layout import PANEL, STEP, padded_columns
from tinygpt.kernels.cuda.params import Params
from tinygpt.kernels.cuda.persistent.linear import (
    ENDING,
    RING_BYTES,
    SUMS_SIZE,
    copy_rows,
    greatest_function,
    linear_functions,
    load_endings,
    ring_of,
)
from tinygpt.kernels.cuda.persistent.phases import (
    Barrier,
    Embedding,
    Tokens,
    all_arrive,
    attention_functions,
    choose,
    embed_tokens_function,
    find_tokens,
    norm_functions,
    signal,
    store_keys,
)
from tinygpt.kernels.cuda.runtime.block import MAX_WARPS
from tinygpt.kernels.cuda.runtime.graphs import Graphs
from tinygpt.kernels.cuda.runtime.jit import kernel
from tinygpt.kernels.cuda.runtime.ptx import run_all_blocks_at_once, shared_address
from tinygpt.kernels.cuda.sampling.buffers import MAX_STEPS
from tinygpt.kernels.cuda.sizes import NUM_TOKENS, Shape
from tinygpt.kernels.cuda.workspace import Workspace, fill

from numba import cuda, float32, int32, int64, uint32  # isort: skip

MAX_SPINS = 1 << 22  # some seconds
MAX_SHARED_BYTES = 227 << 10  # that a block may have
# Indices of Persistent.state; from HISTORY on the tokens of each step.
ARRIVALS, FAILED, NUM_STEPS, HISTORY = 0, 32, 33, 64
FIRST_ENDING = RING_BYTES // 4  # index of the first scale in shared memory, as float32


@dataclass(frozen=True)
class Persistent:
    """What the kernel needs on the device beside a model's one workspace and KV cache."""

    blocks: int
    barrier: Barrier
    state: Any  # int32: the words above; 0 before a launch, but for the number of steps
    history: Any  # (MAX_STEPS, FUSED_TOKENS), the last part of `state`
    keys: Any  # (FUSED_TOKENS, blocks) int64
    scales: Any  # (L,) float32, of attention's scores
    graphs: Graphs  # of a launch by its number of chunks: its 44 arrays are described to the driver once


def new_persistent(params: Params) -> Persistent:
    device, config = params.device, params.config
    state = device.zeros((HISTORY + MAX_STEPS * FUSED_TOKENS,), np.int32)
    scales = [config.attention_scale(layer) for layer in range(config.n_layer)]
    return Persistent(
        blocks=device.multiprocessors,
        barrier=Barrier(state[ARRIVALS : ARRIVALS + 1], state[FAILED : FAILED + 1], MAX_SPINS),
        state=state,
        history=state[HISTORY:],
        keys=device.zeros((FUSED_TOKENS * device.multiprocessors,), np.int64),
        scales=device.array(np.array(scales, np.float32)),
        graphs=Graphs(device),
    )


def can_persist(params: Params) -> bool:
    """Whether the kernel is for this model: weights in bfloat16 or int8, rows of whole steps, and room for them."""
    if params.dtype == "float32" or params.config.n_embd % STEP or params.config.inner_size % PANEL:
        return False
    still = 4 * (SUMS_SIZE + 2 * params.config.n_embd + 3 * FUSED_TOKENS) + 8 * MAX_WARPS
    return shared_bytes(params) + still <= MAX_SHARED_BYTES


def shared_bytes(params: Params) -> int:
    """Of a block: the ring, the scales and biases of its panels, and the rows that a linear layer takes."""
    widest = padded_columns(max(params.config.n_embd, params.config.inner_size))
    return RING_BYTES + 4 * ENDING * max_panels(params) + 2 * FUSED_TOKENS * (widest + SHARED_PAD)


def max_panels(params: Params) -> int:
    """The most panels that a block has in a phase."""
    return -(-max(weights.num_panels for weights in params.linears.values()) // params.device.multiprocessors)


def run_persistent(
    persistent: Persistent, params: Params, batch: Any, kv_cache: KVCache, workspace: Workspace, num_steps: int
) -> np.ndarray:
    """Tokens (num_steps, S) of greedy steps, each going on with what the one before has chosen; as `multi_step`.

    The batch has one new token for each sequence, and these are FUSED_TOKENS at most; can_persist says for which
    models. The KV cache, and the workspace's token_ids and positions, become what multi_step leaves there; its logits
    and what it samples with stay. ValueError: too many sequences or steps. RuntimeError: blocks have waited for each
    other in vain.
    """
    p, w, count = persistent, workspace, batch.token_ids.size
    if count > FUSED_TOKENS or num_steps > MAX_STEPS:
        raise ValueError(f"{count} sequences and {num_steps} steps: the kernel takes {FUSED_TOKENS} and {MAX_STEPS}.")
    chunks = Shape.of(batch, w.sizes, num_steps).chunks
    state = np.zeros(p.state.size, np.int32)
    state[NUM_STEPS] = num_steps
    fill(w, batch)
    w.device.write(p.state, state)
    p.graphs.run(chunks, lambda: queue_persistent(p, params, kv_cache, w, chunks))
    state = w.device.read(p.state)
    if state[FAILED]:
        raise RuntimeError("the blocks of the persistent kernel have waited for each other in vain: a bug in tinygpt.")
    return state[-p.history.size :].reshape(MAX_STEPS, FUSED_TOKENS)[:num_steps, :count]


def queue_persistent(
    persistent: Persistent, params: Params, kv_cache: KVCache, workspace: Workspace, chunks: int
) -> None:
    p, w, config, inputs = persistent, workspace, params.config, workspace.inputs
    arguments = (
        p.barrier,
        Embedding(params.wte, params.wpe, w.embeds),
        *(params.linears[name] for name in ("c_attn", "attn_proj", "c_fc", "mlp_proj", "lm_head")),
        *(params.norms[name] for name in ("ln_1", "ln_2", "ln_f")),
        heads_of(kv_cache, w),
        *(w.x, w.attended, w.partials, w.inner, p.keys, p.scales),
        *(inputs.token_ids, inputs.sizes, p.state, w.merges, p.history),
        *(float(config.layer_norm_epsilon), config.n_layer, chunks, max_panels(params)),
    )
    function = persistent_kernel(params.dtype, kv_cache.padded_head, config.n_embd, config.activation)
    grid, more = p.blocks, {"shared_bytes": shared_bytes(params), "cooperative": True}
    w.device.launch(function, grid, LINEAR_THREADS, *arguments, **more)


@functools.cache
def persistent_kernel(dtype: str, size: int, columns: int, activation: str):
    """decode(barrier, embedding, c_attn, ..., max_panels): what queue_persistent says.

    Grid: as many blocks as run at once, LINEAR_THREADS threads, shared_bytes. dtype: of the weights, "bfloat16" or
    "int8". size: Dp. columns: C. Between `signal` and `all_arrive` is what the next phases can have beforehand.
    """
    ring_ = ring_of(dtype)
    fill, prefetch_panels, ring_address = ring_.fill, ring_.prefetch_panels, ring_.address
    read_sum, add = linear_functions(dtype, ADD)
    _, project_heads = linear_functions(dtype, QKV)
    _, activate = linear_functions(dtype, activation)
    greatest, embed_tokens = greatest_function(dtype), embed_tokens_function(dtype)
    load_norm, normalise = norm_functions(columns)
    prefetch_keys, attend = attention_functions(size)

    def decode(
        barrier, embedding, c_attn, attn_proj, c_fc, mlp_proj, lm_head, ln_1, ln_2, ln_f, all_heads,
        x, attended, partials, inner, keys, scales, token_ids, sizes, state, merges, history,
        epsilon, num_layers, max_chunks, max_panels,
    ):  # fmt: skip
        run_all_blocks_at_once()
        numbers = cuda.shared.array(0, float32, alignment=16)
        weight = shared_address(cuda.shared.array(columns, float32, alignment=16))
        bias = shared_address(cuda.shared.array(columns, float32, alignment=16))
        memory = shared_address(numbers)
        sums, strips = cuda.shared.array(SUMS_SIZE, float32), cuda.shared.array(MAX_WARPS, int64)
        ids, places = cuda.shared.array(FUSED_TOKENS, int32), cuda.shared.array(FUSED_TOKENS, int32)
        tokens = Tokens(ids, places, cuda.shared.array(FUSED_TOKENS, int32))
        h = all_heads
        shapes = h.num_slots, h.padded_len, h.num_heads, h.head_size, h.padded_head
        heads = Heads(h.q, h.k_cache, h.v_cache, tokens.positions, tokens.slots, *shapes)
        ring, endings = ring_address(memory), uint32(memory + uint32(RING_BYTES))
        rows = uint32(endings + uint32(max_panels * int32(4 * ENDING)))
        width, inner_width = attn_proj.num_steps * int32(STEP), mlp_proj.num_steps * int32(STEP)
        count, steps, goal = sizes[NUM_TOKENS], state[NUM_STEPS], int32(0)

        find_tokens(tokens, token_ids, h.positions, h.token_slots, count)
        prefetch_panels(c_attn, int32(0), True)
        for step in range(steps):
            embed_tokens(x, embedding, tokens, columns, count)  # (N, C)
            for layer_ in range(num_layers):
                layer = int32(layer_)
                signal(barrier)
                cursor = fill(ring, c_attn, layer)
                load_endings(endings, c_attn, layer, True)
                load_norm(weight, bias, ln_1, layer)
                prefetch_panels(attn_proj, layer, True)
                prefetch_keys(heads, layer, count, max_chunks)
                goal += int32(cuda.gridDim.x)
                if not all_arrive(barrier, goal):
                    return
                normalise(rows, x, weight, bias, epsilon, count)
                project_heads(
                    heads, 0, 0, rows, count, ring, cursor, sums, numbers, FIRST_ENDING, c_attn, layer
                )  # (N, 3C)

                signal(barrier)
                before = read_sum(x, columns, count, attn_proj, layer)
                cursor = fill(ring, attn_proj, layer)
                load_endings(endings, attn_proj, layer, True)
                prefetch_panels(c_fc, layer, True)
                goal += int32(cuda.gridDim.x)
                if not all_arrive(barrier, goal):
                    return
                attend(attended, width, partials, heads, merges, layer, count, max_chunks, scales[layer])  # (N, C)

                signal(barrier)
                prefetch_panels(mlp_proj, layer, True)
                goal += int32(cuda.gridDim.x)
                if not all_arrive(barrier, goal):
                    return
                copy_rows(rows, attended, count, attn_proj.num_steps)
                add(
                    x, columns, before, rows, count, ring, cursor, sums, numbers, FIRST_ENDING, attn_proj, layer
                )  # (N, C)

                signal(barrier)
                cursor = fill(ring, c_fc, layer)
                load_endings(endings, c_fc, layer, True)
                load_norm(weight, bias, ln_2, layer)
                if layer + 1 < num_layers:
                    prefetch_panels(c_attn, layer + int32(1), True)
                else:
                    prefetch_panels(lm_head, int32(0), False)
                goal += int32(cuda.gridDim.x)
                if not all_arrive(barrier, goal):
                    return
                normalise(rows, x, weight, bias, epsilon, count)
                activate(
                    inner, inner_width, 0, rows, count, ring, cursor, sums, numbers, FIRST_ENDING, c_fc, layer
                )  # (N, F)

                signal(barrier)
                before = read_sum(x, columns, count, mlp_proj, layer)
                cursor = fill(ring, mlp_proj, layer)
                load_endings(endings, mlp_proj, layer, True)
                goal += int32(cuda.gridDim.x)
                if not all_arrive(barrier, goal):
                    return
                copy_rows(rows, inner, count, mlp_proj.num_steps)
                add(
                    x, columns, before, rows, count, ring, cursor, sums, numbers, FIRST_ENDING, mlp_proj, layer
                )  # (N, C)

            signal(barrier)
            cursor = fill(ring, lm_head, int32(0))
            load_endings(endings, lm_head, int32(0), False)
            load_norm(weight, bias, ln_f, int32(0))
            prefetch_panels(c_attn, int32(0), True)
            goal += int32(cuda.gridDim.x)
            if not all_arrive(barrier, goal):
                return
            normalise(rows, x, weight, bias, epsilon, count)
            store_keys(keys, greatest(rows, count, ring, cursor, sums, numbers, FIRST_ENDING, lm_head), count)

            signal(barrier)
            goal += int32(cuda.gridDim.x)
            if not all_arrive(barrier, goal):
                return
            choose(tokens, keys, strips, token_ids, h.positions, history, int32(step) * int32(FUSED_TOKENS), count)

    return kernel(decode)
