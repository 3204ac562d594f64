"""From a checkpoint's tensors to packed weights, and the buffers that go with them."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tinygpt.kernels.cpu.activations import ACTIVATIONS
from tinygpt.kernels.cpu.attention import KEY_BLOCK, padded_head, scratch_size
from tinygpt.kernels.cpu.crew import Crew
from tinygpt.kernels.cpu.linear import SCRATCH, pack, panel_count, quarters, whole
from tinygpt.kernels.cpu.model import Buffers, KVCache, Params, Workspace
from tinygpt.kernels.cpu.tiles import LANES, PANEL, VECTOR_BYTES

# Our name for each kind of layer, and the checkpoint's.
PACK_SHARES = 16  # of a matrix, for any number of threads to take
LAYER_NORMS = ("ln_1", "ln_2")
LINEARS = {"c_attn": "attn.c_attn", "attn_proj": "attn.c_proj", "c_fc": "mlp.c_fc", "mlp_proj": "mlp.c_proj"}


def load_params(checkpoint, dtype: str = "float32", threads: int = 1) -> Params:
    """Pack every weight once. `checkpoint` has config, tensor(name) -> float32 array, (out, in) for matrices,
    and release(name), called as soon as a tensor has been packed so that its file pages may leave memory."""
    config = checkpoint.config
    layers = range(config.n_layer)
    with ThreadPoolExecutor(threads) as pool:
        # First the largest, while little else is in memory: it alone is there twice while it is packed.
        wte = _pack_all(checkpoint, ["wte.weight"], pool)[0]  # (P, C, PANEL)
        head = wte if checkpoint.tied else _pack_all(checkpoint, ["lm_head.weight"], pool)[0]
        matrices = {
            ours: _pack_all(checkpoint, [f"h.{i}.{name}.weight" for i in layers], pool)
            for ours, name in LINEARS.items()
        }  # (L, P, K, PANEL)
    biases = {ours: f"{name}.bias" for ours, name in LINEARS.items()}
    vectors = {f"{ours}_bias": _stack(checkpoint, [f"h.{i}.{name}" for i in layers]) for ours, name in biases.items()}
    for name in LAYER_NORMS:
        for kind in ("weight", "bias"):
            vectors[f"{name}_{kind}"] = _stack(checkpoint, [f"h.{i}.{name}.{kind}" for i in layers])  # (L, C)
    return Params(
        **matrices,
        **vectors,
        wte=wte,
        lm_head=head,
        wpe=_stack(checkpoint, ["wpe.weight"])[0],
        ln_f_weight=_stack(checkpoint, ["ln_f.weight"])[0],
        ln_f_bias=_stack(checkpoint, ["ln_f.bias"])[0],
        attention_scales=np.array([config.attention_scale(i) for i in layers], np.float32),
        embd_segments=whole(config.n_embd),
        head_segments=quarters(config.n_head, config.head_size),
        inner_segments=quarters(config.inner_size, 1),
        epsilon=np.float32(config.layer_norm_epsilon),
        activation=ACTIVATIONS[config.activation],
    )


def new_cache(config, max_num_seqs: int, max_model_len: int) -> KVCache:
    """Zeros: memory that no sequence has reached costs nothing yet."""
    blocks = -(-max_model_len // KEY_BLOCK)
    rows = (config.n_layer, max_num_seqs, config.n_head)
    return KVCache(
        k=_zeros((*rows, blocks, config.head_size, KEY_BLOCK)),
        v=_zeros((*rows, blocks * KEY_BLOCK, padded_head(config.head_size))),
    )


def cache_bytes(config, max_num_seqs: int, max_model_len: int) -> int:
    """What `new_cache` would take when it is full."""
    positions = -(-max_model_len // KEY_BLOCK) * KEY_BLOCK
    per_position = config.n_head * (config.head_size + padded_head(config.head_size))
    return 4 * config.n_layer * max_num_seqs * positions * per_position


def new_workspace(config, max_num_tokens: int, max_num_logits: int, threads: int = 1) -> Workspace:
    """Buffers for steps of up to max_num_tokens new tokens, max_num_logits of them with logits."""
    n, r, c = max_num_tokens, max_num_logits, config.n_embd
    buffers = Buffers(
        x=_zeros((n, c)),
        normed=_zeros((n, c)),
        qkv=_zeros((n, 3 * c)),
        attended=_zeros((n, c)),
        inner=_zeros((n, config.inner_size)),
        final=_zeros((r, c)),
        logits=_zeros((r, config.vocab_size)),
        every=np.arange(n, dtype=np.int32),
        token_ids=np.zeros(n, np.int32),
        positions=np.zeros(n, np.int32),
        token_rows=np.zeros(n, np.int32),
        tiles=np.zeros(n + 1, np.int32),
        logit_rows=np.zeros(r, np.int32),
        sizes=np.zeros(3, np.int64),
    )
    scratch = max(SCRATCH, scratch_size(config.head_size))
    return Workspace(buffers, Crew(threads, _zeros((threads, -(-scratch // LANES) * LANES))))


def _pack_all(checkpoint, names: list[str], pool: ThreadPoolExecutor) -> np.ndarray:
    """Weights of one shape (N, K), one after another, as panels (len(names), P, K, PANEL)."""
    n, k = checkpoint.tensor(names[0]).shape
    panels = _zeros((len(names), panel_count(n), k, PANEL))
    for name, target in zip(names, panels, strict=True):
        weight = checkpoint.tensor(name)  # (N, K)
        is_transposed = not weight.flags.c_contiguous
        source = np.ascontiguousarray(weight.T if is_transposed else weight)
        bounds = [i * len(target) // PACK_SHARES for i in range(PACK_SHARES + 1)]
        shares = [pool.submit(pack, source, is_transposed, target, *pair) for pair in itertools.pairwise(bounds)]
        for share in shares:
            share.result()
        checkpoint.release(name)
    return panels


def _stack(checkpoint, names: list[str]) -> np.ndarray:
    return np.stack([checkpoint.tensor(name) for name in names])


def _zeros(shape: tuple[int, ...]) -> np.ndarray:
    """float32 zeros that start on a vector's boundary, which the tiles' loads rely on."""
    size = int(np.prod(shape))
    raw = np.zeros(size + VECTOR_BYTES // 4, np.float32)
    start = -raw.ctypes.data % VECTOR_BYTES // 4
    return raw[start : start + size].reshape(shape)
