"""GPT-2 in NumPy, float64 inside: the specification that the other backends are tested against.

Shapes: N new tokens, S sequences, T cached positions, C n_embd, H heads, D head size, F n_inner, V vocabulary, L
layers, R rows of logits. Weights are (out, in). Radford et al., "Language Models are Unsupervised Multitask Learners".
"""

from dataclasses import replace
from functools import partial

import numpy as np

from ..backend import no_op
from .layers import (
    ACTIVATIONS,
    add_projection,
    attend,
    attend_int8,
    expert_block,
    final_norm,
    layer_norm,
    linear,
    norm_after,
    norm_before,
    queries_keys_values,
)
from .state import KVCache, Params, write_kv


def forward(params: Params, batch, kv_cache: KVCache, workspace=None, look=None) -> np.ndarray:
    first = 0 if look is None else look.first
    look = no_op if look is None else look
    if params.adapters:
        params = replace(params, of_row=params.of_slot[batch.token_slots])
    x = embed(params, batch)
    if first:
        look("resid_post", first - 1, x)
    for layer in range(first, params.config.n_layer):
        look("resid_pre", layer, x)
        attention_block(params, layer, x, batch, kv_cache, look)
        norm_after(params, f"h.{layer}.ln_1", x)
        look("resid_mid", layer, x)
        if layer in params.config.expert_layers:
            expert_block(params, layer, x)
        else:
            mlp_block(params, layer, x, look)
        norm_after(params, f"h.{layer}.ln_2", x)
        look("resid_post", layer, x)
    return head(params, x, batch)


def embed(params: Params, batch) -> np.ndarray:
    """x (N, C) = wte[token] + wpe[position]; a negative id stands for a row of embeds.

    Other models than GPT-2 scale wte, project it, lack wpe, or have a layer norm here.
    """
    is_given = batch.token_ids < 0  # (N,)
    token_ids = np.where(is_given, 0, batch.token_ids)
    x = params["wte.weight"][token_ids].astype(np.float64)  # (N, C) or (N, embed_dim)
    x *= params.config.embed_scale
    if is_given.any():
        x[is_given] = batch.embeds[-1 - batch.token_ids[is_given]]
    if params.config.embed_dim is not None:
        x = x @ params["project_in.weight"].T  # (N, C)
    if not params.config.has_alibi:
        x = x + params["wpe.weight"][batch.positions]
    return layer_norm(params, "ln_e", x) if params.config.embed_norm else x


def attention_block(params: Params, layer: int, x: np.ndarray, batch, kv_cache: KVCache, look=no_op) -> None:
    """x (N, C) += c_proj(attention(c_attn(ln_1(x))))."""
    q, k, v = queries_keys_values(params, layer, x)
    look("q", layer, q)
    look("k", layer, k)
    look("v", layer, v)
    attended = np.empty_like(q)
    attention = attend_int8 if kv_cache.dtype == "int8" else attend  # (N, H, D)
    for s, slot in enumerate(batch.slots):
        new = slice(batch.seq_starts[s], batch.seq_starts[s + 1])
        positions = batch.positions[new]
        length = batch.context_lens[s]
        write_kv(kv_cache, layer, slot, positions, k[new], v[new])
        attended[new] = attention(
            q[new],
            kv_cache.k[layer, slot, :, :length],  # (H, T, D)
            kv_cache.v[layer, slot, :, :length],
            positions,
            params.config.attention(layer),
            lambda kind, array, s=s: look(kind, layer, array, s),
        )
    look("z", layer, attended)
    y = attended.reshape(x.shape)  # (N, C)
    add_projection(params, f"h.{layer}.attn.c_proj", x, y, partial(look, "attn_out", layer))


def mlp_block(params: Params, layer: int, x: np.ndarray, look=no_op) -> None:
    """x (N, C) += c_proj(activation(c_fc(ln_2(x))))."""
    normed = norm_before(params, f"h.{layer}.ln_2", x)
    inner = linear(params, f"h.{layer}.mlp.c_fc", normed)  # (N, F)
    look("pre", layer, inner)
    inner = ACTIVATIONS[params.config.activation](inner)
    look("post", layer, inner)
    add_projection(params, f"h.{layer}.mlp.c_proj", x, inner, partial(look, "mlp_out", layer))


def head(params: Params, x: np.ndarray, batch) -> np.ndarray:
    """logits (R, V) = ln_f(x[logit_rows]) @ lm_head.T."""
    normed = final_norm(params, x[batch.logit_rows])  # (R, C)
    if params.config.embed_dim is not None:
        normed = normed @ params["project_out.weight"].T  # (R, embed_dim)
    return (normed @ params["lm_head.weight"].T).astype(np.float32)
