"""Kernels of a step that can be compiled without a model: what they work on is the same in all."""

from types import SimpleNamespace

import numba
import numpy as np

from tinygpt.kernels.cpu.kv_cache import new_kv_cache
from tinygpt.kernels.cpu.layers.attention import attend, write_kv
from tinygpt.kernels.cpu.workspace import new_workspace

SMALLEST = SimpleNamespace(n_layer=1, n_embd=1, n_head=1, head_size=1, inner_size=1, vocab_size=1)


def compile_attention(kv_cache_dtype: str) -> None:
    """Compile `attend` and `write_kv` as a step calls them, for a KV cache of this dtype."""
    workspace = new_workspace(SMALLEST, 1, 1)
    buffers, step = workspace.buffers, workspace.buffers.step
    k, v = (layers[0] for layers in new_kv_cache(SMALLEST, 1, 1, kv_cache_dtype))
    team, where, qkv = workspace.team.leader, (step.positions, step.token_slots), buffers.qkv
    _compile(attend, team, buffers.attended, qkv, k, v, *where, step.tiles, np.float32(1))
    _compile(write_kv, team, k, v, qkv, *where)
    workspace.team.close()


def _compile(kernel, *arguments) -> None:
    kernel.compile(tuple(map(numba.typeof, arguments)))
