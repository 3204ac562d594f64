"""From a checkpoint's tensors to packed weights, quantised if asked, and the buffers that go with them."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tinygpt.kernels.cpu.activations import ACTIVATIONS
from tinygpt.kernels.cpu.attention import KEY_BLOCK, padded_head, scratch_size
from tinygpt.kernels.cpu.crew import Crew
from tinygpt.kernels.cpu.formats import (
    BFloat16Operand,
    BFloat16Weight,
    Float32Operand,
    Float32Weight,
    Int4Weight,
    Int8Operand,
    Int8Weight,
)
from tinygpt.kernels.cpu.linear import SCRATCH, quarters, whole
from tinygpt.kernels.cpu.model import Buffers, KVCache, Params, Workspace
from tinygpt.kernels.cpu.pack import pack_bfloat16, pack_float32, pack_int4, pack_int8, panel_count
from tinygpt.kernels.cpu.tiles import GROUP, PANEL, WEIGHT_GROUP
from tinygpt.kernels.cpu.vector_ir import LANES, VECTOR_BYTES

PACK_SHARES = 16  # of a matrix, for any number of threads to take
LAYER_NORMS = ("ln_1", "ln_2")
# Our name for each kind of layer, and the checkpoint's.
LINEARS = {"c_attn": "attn.c_attn", "attn_proj": "attn.c_proj", "c_fc": "mlp.c_fc", "mlp_proj": "mlp.c_proj"}
# The layer norm in front of a linear layer, where there is one.
NORM_BEFORE = {"c_attn": "ln_1", "c_fc": "ln_2"}
SMOOTHED = ("int8", "int4")
K_UNIT = {"float32": 1, "bfloat16": 2, "int8": GROUP, "int4": GROUP}  # what segments of K are whole numbers of


def load_params(checkpoint, dtype: str = "float32", threads: int = 1) -> Params:
    """Pack every weight once. `checkpoint` has config, tensor(name) -> float32 array, (out, in) for matrices,
    and release(name), called as soon as a tensor has been packed so that its file pages may leave memory."""
    config = checkpoint.config
    layers = range(config.n_layer)
    head_dtype = "int8" if dtype == "int4" else dtype
    fields = {}
    with ThreadPoolExecutor(threads) as pool:
        # First the largest, while little else is in memory: it alone is there twice while it is packed.
        head_name = "wte.weight" if checkpoint.tied else "lm_head.weight"
        fields["lm_head"], factors = _pack_layers(checkpoint, [head_name], ["ln_f"], head_dtype, dtype, pool)
        fields["ln_f_weight"], fields["ln_f_bias"] = (
            _divided(checkpoint, ["ln_f"], kind, factors)[0] for kind in KINDS
        )
        fields["wte_factors"] = (1 / factors[0]) if checkpoint.tied else np.ones(config.n_embd, np.float32)
        fields["wte"] = fields["lm_head"]
        if not checkpoint.tied:
            fields["wte"], _ = _pack_layers(checkpoint, ["wte.weight"], None, head_dtype, dtype, pool)
        for ours, name in LINEARS.items():
            norms = [f"h.{i}.{NORM_BEFORE[ours]}" for i in layers] if ours in NORM_BEFORE else None
            names = [f"h.{i}.{name}.weight" for i in layers]
            fields[ours], factors = _pack_layers(checkpoint, names, norms, dtype, dtype, pool)
            fields[f"{ours}_bias"] = _stack(checkpoint, [f"h.{i}.{name}.bias" for i in layers])
            if norms:
                for kind in KINDS:
                    fields[f"{NORM_BEFORE[ours]}_{kind}"] = _divided(checkpoint, norms, kind, factors)  # (L, C)
    return Params(
        **fields,
        wpe=_stack(checkpoint, ["wpe.weight"])[0],
        attention_scales=np.array([config.attention_scale(i) for i in layers], np.float32),
        embd_segments=whole(config.n_embd),
        head_segments=_segments(config.n_head, config.head_size, dtype),
        inner_segments=_segments(config.inner_size // K_UNIT[dtype], K_UNIT[dtype], dtype, config.inner_size),
        epsilon=np.float32(config.layer_norm_epsilon),
        activation=ACTIVATIONS[config.activation],
    )


KINDS = ("weight", "bias")


def _segments(units: int, unit: int, dtype: str, k: int | None = None) -> np.ndarray:
    """Four segments of K where its pieces are whole for the dtype's tiles, else one."""
    k = units * unit if k is None else k
    return quarters(units, unit) if unit % K_UNIT[dtype] == 0 and units * unit == k else whole(k)


def smooth(weight: np.ndarray, gain: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Factors (K,) that move size from a layer norm's output into the weight (N, K) after it, or back.

    SmoothQuant's per-channel balance (Xiao et al., 2022), with sqrt(gain^2 + bias^2) for the size of the channel:
    what a layer norm makes of a channel of unit variance. The norm is divided by the factors and the weight multiplied
    by them, so that the function stays as it is and neither side has channels far larger than the rest.
    """
    channel = np.sqrt(gain**2 + bias**2)
    largest = np.abs(weight).max(axis=0)  # (K,)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.sqrt(channel / largest)
    return np.where(np.isfinite(factors) & (factors > 0), factors, 1).astype(np.float32)


def _pack_layers(checkpoint, names, norms, dtype: str, model_dtype: str, pool) -> tuple[tuple, np.ndarray]:
    """Weights of one shape (N, K), one after another, and the factors (L, K) that they were multiplied by."""
    n, k = checkpoint.tensor(names[0]).shape
    record, pack = FORMATS[dtype]
    arrays = _new_weight(dtype, len(names), n, k)
    all_factors = np.ones((len(names), k), np.float32)
    for layer, name in enumerate(names):
        weight = checkpoint.tensor(name)  # (N, K)
        if norms and model_dtype in SMOOTHED:
            gain, bias = (checkpoint.tensor(f"{norms[layer]}.{kind}") for kind in KINDS)
            all_factors[layer] = smooth(weight, gain, bias)
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
    p, groups = panel_count(n), -(-k // GROUP)
    if dtype == "float32":
        return (_zeros((layers, p, k, PANEL)),)
    if dtype == "bfloat16":
        return (_zeros((layers, p, -(-k // 2), PANEL, 2), np.uint16),)
    if dtype == "int8":
        return _zeros((layers, p, groups * GROUP // 4, PANEL, 4), np.uint8), _zeros((layers, p * PANEL))
    panels = _zeros((layers, p, groups * GROUP // 8, PANEL, 4), np.uint8)
    return panels, _zeros((layers, p, groups * GROUP // WEIGHT_GROUP, 2, PANEL), np.uint16)


def _divided(checkpoint, norms: list[str], kind: str, factors: np.ndarray) -> np.ndarray:
    return _stack(checkpoint, [f"{norm}.{kind}" for norm in norms]) / factors


def _stack(checkpoint, names: list[str]) -> np.ndarray:
    return np.stack([checkpoint.tensor(name) for name in names])


def new_cache(config, max_num_seqs: int, max_model_len: int, dtype: str = "float32") -> KVCache:
    """Zeros: memory that no sequence has reached costs nothing yet. float32 for float32, else bfloat16."""
    blocks = -(-max_model_len // KEY_BLOCK)
    rows = (config.n_layer, max_num_seqs, config.n_head)
    kind = np.float32 if dtype == "float32" else np.uint16
    return KVCache(
        k=_zeros((*rows, blocks, config.head_size, KEY_BLOCK), kind),
        v=_zeros((*rows, blocks * KEY_BLOCK, padded_head(config.head_size)), kind),
    )


def cache_bytes(config, max_num_seqs: int, max_model_len: int, dtype: str = "float32") -> int:
    """What `new_cache` would take when it is full."""
    positions = -(-max_model_len // KEY_BLOCK) * KEY_BLOCK
    per_position = config.n_head * (config.head_size + padded_head(config.head_size))
    return (4 if dtype == "float32" else 2) * config.n_layer * max_num_seqs * positions * per_position


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
        token_ids=np.zeros(n, np.int32),
        positions=np.zeros(n, np.int32),
        token_rows=np.zeros(n, np.int32),
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
    scales = _zeros((n, groups, 4))
    return Int8Operand(_zeros((n, groups * GROUP), np.int8), scales, scales.view(np.int32))


def _zeros(shape: tuple[int, ...], dtype=np.float32) -> np.ndarray:
    """Zeros that start on a vector's boundary, which the tiles' loads rely on."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + VECTOR_BYTES, np.uint8)
    start = -raw.ctypes.data % VECTOR_BYTES
    return raw[start : start + size].view(dtype).reshape(shape)
