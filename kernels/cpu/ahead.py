"""Kernels of a step that can be compiled without a model: what they work on is the same in all."""

import numba
import numpy as np

from tinygpt.kernels.cpu.kv_cache import new_kv_cache
from tinygpt.kernels.cpu.layers.attention import attend, write_kv
from tinygpt.kernels.cpu.params import NOTHING
from tinygpt.kernels.cpu.workspace import new_workspace


def compile_attention(config, kv_cache_dtype: str) -> None:
    """Compile `attend` and `write_kv` as a step calls them, for a KV cache of this dtype.

    config: any model's without ALiBi. Sizes do not matter: the smallest will do.
    """
    workspace = new_workspace(config, 1, 1)
    buffers, step = workspace.buffers, workspace.buffers.step
    k, v = (layers[0] for layers in new_kv_cache(config, 1, 1, kv_cache_dtype))
    team, where, qkv = workspace.team.leader, (step.positions, step.token_slots), buffers.qkv
    _compile(attend, team, buffers.attended, qkv, k, v, *where, step.tiles, np.float32(1), NOTHING)
    _compile(write_kv, team, k, v, qkv, *where)
    workspace.team.close()


def _compile(kernel, *arguments) -> None:
    kernel.compile(tuple(map(numba.typeof, arguments)))
