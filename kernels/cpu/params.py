"""From a checkpoint's tensors to packed weights, quantised if asked, and the buffers that go with them."""

import contextlib
import itertools
import math
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tinygpt.kernels.cpu.layers.activations import ACTIVATIONS
from tinygpt.kernels.cpu.layers.attention import KEY_BLOCK, padded_head, scratch_size
from tinygpt.kernels.cpu.layers.epilogue import SCRATCH
from tinygpt.kernels.cpu.layers.formats import (
    BFloat16Operand,
    BFloat16Weight,
    Float32Operand,
    Float32Weight,
    Int4Weight,
    Int8Operand,
    Int8Weight,
)
from tinygpt.kernels.cpu.layers.linear import quarters, whole
from tinygpt.kernels.cpu.layers.trace import nothing_kept
from tinygpt.kernels.cpu.model import Buffers, KVCache, Params, Workspace
from tinygpt.kernels.cpu.packing.pack import pack_bfloat16, pack_float32, pack_int4, pack_int8, panel_count
from tinygpt.kernels.cpu.packing.smoothing import smoothing_factors
from tinygpt.kernels.cpu.runtime.team_threads import Crew
from tinygpt.kernels.cpu.simd.tiles import GROUP, PANEL, WEIGHT_GROUP
from tinygpt.kernels.cpu.simd.vector_ir import LANES, VECTOR_BYTES

PACK_SHARES = 16  # of a matrix, for any number of threads to take
LAYER_NORMS, KINDS = ("ln_1", "ln_2"), ("weight", "bias")
# Our name for each kind of layer, and the checkpoint's.
LINEARS = {"c_attn": "attn.c_attn", "attn_proj": "attn.c_proj", "c_fc": "mlp.c_fc", "mlp_proj": "mlp.c_proj"}
# The layer norm in front of a linear layer, where there is one.
NORM_BEFORE = {"c_attn": "ln_1", "c_fc": "ln_2"}
K_UNIT = {"float32": 1, "bfloat16": 2, "int8": GROUP, "int4": GROUP}  # what segments of K are whole numbers of


def load_params(checkpoint, dtype: str = "float32", threads: int = 1) -> Params:
    """Pack every weight once. `checkpoint` has config, tensor(name) -> float32 array, (out, in) for matrices,
    and release(name), called as soon as a tensor has been packed so that its file pages may leave memory."""
    config = checkpoint.config
    layers = range(config.n_layer)
    head_dtype, fields = head_dtype_of(dtype), {}
    with ThreadPoolExecutor(threads) as pool:
        # First the largest, while little else is in memory: it alone is there twice while it is packed.
        head_name = "wte.weight" if checkpoint.tied else "lm_head.weight"
        fields["lm_head"], factors = _pack_layers(checkpoint, [head_name], ["ln_f"], head_dtype, pool)
        fields["ln_f_weight"], fields["ln_f_bias"] = (
            _divided(checkpoint, ["ln_f"], kind, factors)[0] for kind in KINDS
        )
        fields["head_factors"] = factors[0]
        fields["wte_factors"] = (1 / factors[0]) if checkpoint.tied else np.ones(config.n_embd, np.float32)
        fields["wte"] = fields["lm_head"]
        if not checkpoint.tied:
            fields["wte"], _ = _pack_layers(checkpoint, ["wte.weight"], None, head_dtype, pool)
        for ours, name in LINEARS.items():
            norms = [f"h.{i}.{NORM_BEFORE[ours]}" for i in layers] if ours in NORM_BEFORE else None
            names = [f"h.{i}.{name}.weight" for i in layers]
            fields[ours], factors = _pack_layers(checkpoint, names, norms, dtype, pool)
            fields[f"{ours}_bias"] = _stack(checkpoint, [f"h.{i}.{name}.bias" for i in layers])
            if norms:
                for kind in KINDS:
                    fields[f"{NORM_BEFORE[ours]}_{kind}"] = _divided(checkpoint, norms, kind, factors)  # (L, C)
    return new_params(config, dtype, {**fields, "wpe": _stack(checkpoint, ["wpe.weight"])[0]})


def new_params(config, dtype: str, fields: dict) -> Params:
    """The fields that come from a checkpoint, by name, and beside them those that its configuration decides."""
    return Params(
        **fields,
        attention_scales=np.array([config.attention_scale(i) for i in range(config.n_layer)], np.float32),
        embd_segments=whole(config.n_embd),
        head_segments=_segments(config.n_head, config.head_size, dtype),
        inner_segments=_segments(config.inner_size // K_UNIT[dtype], K_UNIT[dtype], dtype, config.inner_size),
        epsilon=np.float32(config.layer_norm_epsilon),
        activation=ACTIVATIONS[config.activation],
    )


def head_dtype_of(dtype: str) -> str:
    """The precision of wte and the head: four bits are too few for them."""
    return "int8" if dtype == "int4" else dtype


def _segments(units: int, unit: int, dtype: str, k: int | None = None) -> np.ndarray:
    """Four segments of K where its pieces are whole for the dtype's tiles, else one."""
    k = units * unit if k is None else k
    return quarters(units, unit) if unit % K_UNIT[dtype] == 0 and units * unit == k else whole(k)


def _pack_layers(checkpoint, names, norms, dtype: str, pool) -> tuple[tuple, np.ndarray]:
    """Weights of one shape (N, K), one after another, and the factors (L, K) that they were multiplied by."""
    n, k = checkpoint.tensor(names[0]).shape
    record, pack = FORMATS[dtype]
    arrays = _new_weight(dtype, len(names), n, k)
    all_factors = np.ones((len(names), k), np.float32)
    for layer, name in enumerate(names):
        weight = checkpoint.tensor(name)  # (N, K)
        if norms:
            gain, bias = (checkpoint.tensor(f"{norms[layer]}.{kind}") for kind in KINDS)
            all_factors[layer] = smoothing_factors(weight, gain, bias, dtype)
        is_transposed = not weight.flags.c_contiguous
        source = np.ascontiguousarray(weight.T if is_transposed else weight)
        _in_shares(pool, pack, panel_count(n), source, is_transposed, all_factors[layer], *(a[layer] for a in arrays))
        checkpoint.release(name)
    return record(*arrays), all_factors


def _in_shares(pool: ThreadPoolExecutor, pack: Callable, panels: int, *arguments) -> None:
    bounds = [i * panels // PACK_SHARES for i in range(PACK_SHARES + 1)]
    for share in [pool.submit(pack, *arguments, *pair) for pair in itertools.pairwise(bounds)]:
        share.result()


FORMATS = {
    "float32": (Float32Weight, pack_float32),
    "bfloat16": (BFloat16Weight, pack_bfloat16),
    "int8": (Int8Weight, pack_int8),
    "int4": (Int4Weight, pack_int4),
}


def _new_weight(dtype: str, layers: int, n: int, k: int) -> tuple[np.ndarray, ...]:
    """Empty arrays for the dtype's record, in the order of its fields."""
    return tuple(_zeros(shape, array_dtype) for shape, array_dtype in weight_layout(dtype, layers, n, k))


def weight_layout(dtype: str, layers: int, n: int, k: int) -> tuple[tuple[tuple[int, ...], np.dtype], ...]:
    """Shape and dtype of each array of the dtype's record, for weights (N, K)."""
    p, groups = panel_count(n), -(-k // GROUP)
    if dtype == "float32":
        return (((layers, p, k, PANEL), np.dtype(np.float32)),)
    if dtype == "bfloat16":
        return (((layers, p, -(-k // 2), PANEL, 2), np.dtype(np.uint16)),)
    if dtype == "int8":
        panels = (layers, p, groups * GROUP // 4, PANEL, 4)
        return (panels, np.dtype(np.uint8)), ((layers, p * PANEL), np.dtype(np.float32))
    panels = (layers, p, groups * GROUP // 8, PANEL, 4)
    return (panels, np.dtype(np.uint8)), ((layers, p, groups * GROUP // WEIGHT_GROUP, 2, PANEL), np.dtype(np.uint16))


def _divided(checkpoint, norms: list[str], kind: str, factors: np.ndarray) -> np.ndarray:
    return _stack(checkpoint, [f"{norm}.{kind}" for norm in norms]) / factors


def _stack(checkpoint, names: list[str]) -> np.ndarray:
    return np.stack([checkpoint.tensor(name) for name in names])


def new_kv_cache(config, max_num_seqs: int, max_model_len: int, dtype: str = "float32") -> KVCache:
    """Zeros: memory that no sequence has reached costs nothing yet. float32 for float32, else bfloat16."""
    k, v = _cache_shapes(config, max_num_seqs, max_model_len, dtype)
    kind = np.float32 if dtype == "float32" else np.uint16
    return KVCache(_small_pages(k, kind), _small_pages(v, kind))


def kv_cache_bytes(config, max_num_seqs: int, max_model_len: int, dtype: str = "float32") -> int:
    """What `new_kv_cache` would take when it is full."""
    shapes = _cache_shapes(config, max_num_seqs, max_model_len, dtype)
    return (4 if dtype == "float32" else 2) * sum(math.prod(shape) for shape in shapes)


def _cache_shapes(config, rows: int, length: int, dtype: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    per_step = 1 if dtype == "float32" else 2
    blocks, size = -(-length // KEY_BLOCK), config.head_size
    k = (blocks, -(-size // per_step), KEY_BLOCK, per_step)
    v = (blocks * KEY_BLOCK // per_step, padded_head(size), per_step)
    return (config.n_layer, rows, config.n_head, *k), (config.n_layer, rows, config.n_head, *v)


def new_workspace(
    config, max_num_tokens: int, max_num_logits: int, threads: int = 1, dtype: str = "float32"
) -> Workspace:
    """Buffers for steps of up to max_num_tokens new tokens, max_num_logits of them with logits."""
    n, r, c = max_num_tokens, max_num_logits, config.n_embd
    attended = _zeros((n, c))
    buffers = Buffers(
        x=_zeros((n, c)),
        normed=_new_operand(dtype, n, c),
        qkv=_zeros((n, 3 * c)),
        attended=attended,
        heads=Float32Operand(attended) if dtype == "float32" else _new_operand(dtype, n, c),
        inner=_new_operand(dtype, n, config.inner_size),
        final=_new_operand(dtype, r, c),
        logits=_zeros((r, config.vocab_size)),
        every=np.arange(n, dtype=np.int32),
        hidden=nothing_kept(),
        queries=nothing_kept(),
        token_ids=np.zeros(n, np.int32),
        embeds=_zeros((n, c)),
        positions=np.zeros(n, np.int32),
        token_slots=np.zeros(n, np.int32),
        tiles=np.zeros(n + 1, np.int32),
        logit_rows=np.zeros(r, np.int32),
        sizes=np.zeros(3, np.int64),
    )
    scratch = max(SCRATCH, scratch_size(config.head_size), c)
    return Workspace(buffers, Crew(threads, _zeros((threads, -(-scratch // LANES) * LANES))))


def _new_operand(dtype: str, n: int, k: int):
    if dtype == "float32":
        return Float32Operand(_zeros((n, k)))
    if dtype == "bfloat16":
        return BFloat16Operand(_zeros((n, k + k % 2), np.uint16))
    groups = -(-k // GROUP)
    return Int8Operand(_zeros((n, groups * GROUP), np.int8), _zeros((n, groups, 4)))


def _small_pages(shape: tuple[int, ...], dtype) -> np.ndarray:
    """Zeros that arrive in pages of 4 KB as they are touched.

    For its own large arrays NumPy asks Linux for pages of 2 MB: a hardly begun cache then takes several of them for
    each layer, 80 MB for one sequence of GPT-2 124M, and clearing them delays the first token.
    """
    size = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    try:
        pages = mmap.mmap(-1, size, **private)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size} bytes cannot be reserved") from error
    with contextlib.suppress(AttributeError, OSError):  # a system, or a kernel, that has no huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(shape)


def _zeros(shape: tuple[int, ...], dtype=np.float32) -> np.ndarray:
    """Zeros that start on a vector's boundary, which the tiles' loads rely on."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + VECTOR_BYTES, np.uint8)
    start = -raw.ctypes.data % VECTOR_BYTES
    return raw[start : start + size].view(dtype).reshape(shape)
