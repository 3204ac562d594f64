"""A step's sizes, which decide kernels and grids, and a model's buffers on the device."""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend import MAX_STEPS, DeviceError
from ..rank_share import RankShare
from . import device as devices
from .device import Graphs, need_capability
from .draw import NUM_SETTINGS
from .kv_cache import kv_cache_bytes, padded_head
from .layers.attention import QUERY_TILE
from .layers.attention_products import KEY_BLOCK
from .layers.epilogue import ACTIVATIONS
from .layers.experts import max_tiles
from .layers.linear import TILE_BOUNDS
from .layers.tiles import MAX_SHARED, run_sums_size
from .params import DTYPES, padded_columns, params_bytes, share_of
from .ranks import Ranks

# Indices into `Inputs.sizes`: tokens, rows with logits, steps done without the host, pairs of a token and an expert.
NUM_TOKENS = 0
NUM_LOGITS = 1
NUM_STEPS_DONE = 2
NUM_PAIRS = 3
NUM_SIZES = 4
SLICES = 32  # of a row of logits, at most, that blocks search side by side
READ_STEPS = 4  # whose tokens the host reads together
# Of a lone token, more than of a run: a run's warp walks them in turn, for so long as a launch more takes on an H200.
MORE_KEY_BLOCKS = 4
Shapes = dict[str, tuple[tuple[int, ...], Any]]  # shape and type of arrays, by name


@dataclass(frozen=True)
class MaxShape:
    """The largest step: new tokens, rows with logits, sequences that decode, positions of a sequence."""

    tokens: int
    logits: int
    decode_tokens: int
    positions: int
    experts: int = 1  # of a token

    @classmethod
    def of(cls, config: Any, max_num_tokens: int, max_num_logits: int) -> "MaxShape":
        """A decode step has no more tokens than rows of logits."""
        decode_tokens = min(max_num_tokens, max_num_logits)
        return cls(
            max_num_tokens, max_num_logits, decode_tokens, config.n_positions, config.experts_per_token
        )

    @property
    def max_blocks(self) -> int:
        return -(-self.positions // KEY_BLOCK)


@dataclass(frozen=True)
class Queries:
    """A step's tokens by the kernel of their attention."""

    lone: np.ndarray  # tokens of attend_decode
    tiles: np.ndarray  # (t, 2) of attend_prefill, from and to: up to QUERY_TILE tokens of one sequence

    @classmethod
    def of(cls, batch: Any, max_shape: MaxShape) -> "Queries":
        """Give sequences' single tokens to attend_decode, unless it would be one launch more that saves nothing."""
        starts, stops = batch.seq_starts[:-1], batch.seq_starts[1:]
        is_lone = stops - starts == 1
        if is_lone.sum() > max_shape.decode_tokens:
            is_lone[:] = False
        elif not is_lone.all():
            key_blocks = -(-batch.context_lens // KEY_BLOCK)
            of_runs = key_blocks[~is_lone].max()
            if key_blocks.max() < of_runs + MORE_KEY_BLOCKS:
                is_lone[:] = False
        runs = zip(starts[~is_lone].tolist(), stops[~is_lone].tolist(), strict=True)
        tiles = [
            (first, min(first + QUERY_TILE, stop))
            for start, stop in runs
            for first in range(start, stop, QUERY_TILE)
        ]
        return cls(starts[is_lone], np.array(tiles, np.int32).reshape(-1, 2))


@dataclass(frozen=True)
class StepShape:
    """A step's sizes, rounded up: similar steps share a graph."""

    tokens: int
    logits: int
    lone: int  # tokens
    key_blocks: int  # of a lone token
    tiles: int

    @classmethod
    def of(cls, batch: Any, queries: Queries, max_shape: MaxShape, num_steps: int = 1) -> "StepShape":
        """num_steps: steps of this shape, each with one more position."""
        lone = min(rounded_up(queries.lone.size), max_shape.decode_tokens)
        positions = int(batch.context_lens.max()) + num_steps - 1 if lone else 0  # no run has more
        key_blocks = min(rounded_up(-(-positions // KEY_BLOCK)), max_shape.max_blocks)
        tiles = min(rounded_up(len(queries.tiles)), max_shape.tokens)
        return cls(
            rounded_up(batch.token_ids.size), rounded_up(batch.logit_rows.size), lone, key_blocks, tiles
        )


def rounded_up(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0


class Mirror:
    """Arrays on the device next to one another, and on the host: one copy writes them all."""

    def __init__(self, device: Any, shapes: Shapes):
        """shapes: larger items first."""
        self.device = device
        self._host = np.zeros(_num_bytes(shapes), np.uint8)
        self._whole = device.zeros(self._host.shape, np.uint8)
        self.host = _split(self._host, shapes)
        self.arrays = _split(self._whole, shapes)

    def write(self, **values: np.ndarray) -> None:
        """Write the beginning of each array, which keeps its other numbers."""
        for name, given in values.items():
            self.host[name][: given.size] = given.ravel()
        self.device.write(self._whole, self._host)


@dataclass(frozen=True)
class Inputs:
    """A step's batch on the device."""

    mirror: Mirror
    sizes: Any  # (NUM_SIZES,)
    token_ids: Any  # (N,)
    positions: Any  # (N,)
    token_slots: Any  # (N,) the KV slot of each token
    logit_rows: Any  # (R,)
    rows: Any  # (R,) 0, 1, 2, ..., of the step's logits; negative for none
    num_tokens: Any  # (R,) as of Warpers
    lone: Any  # (tokens of a decode step,), of `Queries`; negative for none
    tiles: Any  # (N, 2), of `Queries`; the rest are empty


@dataclass(frozen=True)
class SamplingBuffers:
    """Buffers for R rows."""

    mirror: Mirror  # of `settings` to `positions`
    settings: Any  # (R, NUM_SETTINGS) float64
    seeds: Any  # (R,) uint64
    sample_indices: Any  # (R,) uint64
    rows: Any  # (R,) int32, indices of logits; negative for none
    num_tokens: Any  # (R,) int32, as of Warpers
    positions: Any  # (R,) int32, the token's in its sequence
    scores: Any  # (B, V) float32, of B rows at once: a multiprocessor's blocks take one after another
    ids: Any  # (B, V) int32
    keys: Any  # (R, SLICES) int64
    arrivals: Any  # (R,) uint32, 0 between steps
    token_ids: Any  # (R,) int32, the tokens chosen for `rows`
    step_token_ids: Any  # (R,) int32, those that the step itself chose for its rows
    history: Any  # (MAX_STEPS, tokens of a decode step) int32
    marks: list[Any]  # of a multi-step, reused: a mark for each READ_STEPS

    def write(self, rows, warpers, seeds, sample_indices, positions) -> None:
        """Copy the settings of draws to the device."""
        self.mirror.host["rows"][:] = -1
        self.mirror.write(
            rows=rows,
            num_tokens=warpers.num_tokens,
            settings=np.stack(warpers[:NUM_SETTINGS], 1),
            seeds=seeds,
            sample_indices=sample_indices,
            positions=positions,
        )


@dataclass(frozen=True)
class Mixture:
    """Buffers of layers with E experts, k of them a token: P = N k pairs."""

    scores: Any  # (N, E) float32
    chosen: Any  # (N, k) int32
    shares: Any  # (N, k) float32
    counts: Any  # (E,) int32, pairs of an expert
    order: Any  # (P,) int32, the pairs' tokens
    places: Any  # (N, k) int32, pairs of a token
    tiles: Any  # (tiles, TILE_BOUNDS) int32
    outputs: Any  # (P, Cp) float32: the gate's inputs, then the experts' outputs


@dataclass(frozen=True, eq=False)
class Workspace:
    """Buffers of N tokens and R rows of logits. Activations are of the dtype's Numbers."""

    device: Any
    inputs: Inputs
    embeds: Any  # (N, E) float32, of tokens with a negative id; x, of a stage that is given its input
    narrow: Any  # (max(N, R), Ep), of a model whose embeddings have a width of their own; else unused
    x: Any  # (N, C) float32, the residual stream
    normed: Any  # (max(N, R), Cp); with experts (max(P, R), Cp)
    qkv: Any  # (N, 3C rounded up), before an int8 cache; unused in float32
    q: Any  # (N, H, Dp)
    attended: Any  # (N, Cp)
    partials: Any  # (tokens of a decode step, H, key blocks, Dp + 2) float32
    merges: Any  # (tokens of a decode step, H) int32: key blocks that are done; 0 between steps
    inner: Any  # (N, Fp); with experts (P, Fp)
    run_sums: Any  # float32, of tiles that several blocks share
    tile_arrivals: Any  # uint32, their blocks that are done; 0 between kernels
    mixture: Mixture | None
    logits: Any  # (R, V) float32; on a rank but the first, of its own tokens
    every: Any  # (N,) int32: 0, 1, 2, ...
    sampling: SamplingBuffers | None  # of the first rank alone
    max_shape: MaxShape
    graphs: Graphs
    ranks: Ranks | None = None

    def read_tokens(self, array: Any) -> np.ndarray:
        """Return the rows of a step's tokens, on the host."""
        count = int(self.inputs.mirror.host["sizes"][NUM_TOKENS])
        width = array.size // self.max_shape.tokens
        return self.device.read(array, count * width).reshape(count, width)

    @property
    def has_lost_rank(self) -> bool:
        return self.ranks is not None and bool(self.ranks.status[0])

    @functools.cached_property
    def sums(self) -> Any:
        """(N, features) float32 of a linear layer that adapters add to; had before their first step."""
        return self.device.zeros((max(3 * self.x.size, self.inner.size),), np.float32)


def new_workspace(
    config,
    max_num_tokens: int,
    max_num_logits: int,
    threads: int = 1,
    dtype: str = "float32",
    share: RankShare | None = None,
    allgather: Any = None,
) -> Workspace:
    """share: a rank's, else all. allgather: Ranks', if several ranks share the layers."""
    share = share or share_of(config, dtype)
    device = devices.the_device()
    max_shape = MaxShape.of(config, max_num_tokens, max_num_logits)
    inputs = Mirror(device, _input_shapes(max_shape))
    arrays = _zeros(device, _shapes(config, max_shape, dtype, share))
    workspace = Workspace(
        device=device,
        inputs=Inputs(inputs, **inputs.arrays),
        mixture=Mixture(**_zeros(device, _mixture_shapes(config, max_shape)))
        if config.expert_layers
        else None,
        sampling=new_sampling_buffers(device, config, max_shape) if share.samples else None,
        max_shape=max_shape,
        graphs=Graphs(device),
        ranks=None if allgather is None else Ranks.of(config, dtype, share, allgather),
        **{"narrow": arrays["normed"], "qkv": arrays["normed"], "embeds": arrays["x"], **arrays},
    )
    device.write(workspace.every, np.arange(workspace.every.size, dtype=np.int32))
    return workspace


def new_sampling_buffers(device: Any, config: Any, max_shape: MaxShape) -> SamplingBuffers:
    settings = Mirror(device, _setting_shapes(max_shape))
    arrays = settings.arrays | _zeros(device, _sampling_shapes(device, config, max_shape))
    marks = [device.mark() for _ in range(0, MAX_STEPS, READ_STEPS)]
    return SamplingBuffers(settings, **arrays, marks=marks)


def workspace_bytes(config, max_shape: MaxShape, dtype: str, share: RankShare) -> int:
    device = devices.the_device()
    arrays = _shapes(config, max_shape, dtype, share), _input_shapes(max_shape)
    arrays += (_mixture_shapes(config, max_shape),) if config.expert_layers else ()
    arrays += (
        (_sampling_shapes(device, config, max_shape), _setting_shapes(max_shape)) if share.samples else ()
    )
    return sum(map(_num_bytes, arrays))


def bytes_needed(
    config, tied, dtype, kv_cache_dtype, num_slots, max_model_len, tokens, logits, share=None
) -> dict[str, int]:
    """Return the bytes of each part of a model. share: a rank's, else all."""
    share = share or share_of(config, dtype)
    return {
        "weights": params_bytes(config, dtype, tied, share),
        "KV cache": kv_cache_bytes(share, num_slots, max_model_len, kv_cache_dtype),
        "buffers": workspace_bytes(config, MaxShape.of(config, tokens, logits), dtype, share),
    }


def check_model(config: Any) -> None:
    if config.activation not in ACTIVATIONS:
        raise DeviceError(
            f"the model has the activation {config.activation}, which no kernel for a GPU computes."
        )
    if config.local_layers:
        raise DeviceError(
            f"the model has local attention (a window of {config.window_size} positions) in layers "
            f"{config.local_layers}, and kernels for a GPU compute global attention alone."
        )


def gpu_room() -> tuple[str, int]:
    """Return the GPU's identity and its free bytes."""
    device = devices.the_device()
    return device.uuid, device.free_bytes()


def check_memory(*sizes, shares: Sequence[RankShare | None] = (None,), free: int | None = None) -> None:
    """Raise DeviceError, before a load, for the GPU's dtypes or its free memory. sizes: as of bytes_needed.

    shares: of the ranks on this GPU, which had `free` bytes before any of them loads.
    """
    _, _, dtype, *_ = sizes
    device = devices.the_device()
    need_capability(device.capability, DTYPES[dtype].numbers.oldest, dtype)
    needed = Counter()
    for share in shares:
        needed.update(bytes_needed(*sizes, share))
    free = device.free_bytes() if free is None else free
    total = sum(needed.values())
    if total > free:
        parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in needed.items())
        what = "this takes" if len(shares) == 1 else f"{len(shares)} ranks on this GPU take"
        raise DeviceError(
            f"{what} {total / 2**30:.2f} GiB of the GPU's memory ({parts}) and {free / 2**30:.2f} GiB are "
            "free: lower max_num_seqs, prefix_cache_seqs, max_model_len or max_num_batched_tokens, or take a smaller "
            "dtype."
        )


def fill(workspace: Workspace, batch, num_tokens: Any) -> Queries:
    """Copy a batch to the device. num_tokens: (R,) or one for all, as of Warpers."""
    mirror = workspace.inputs.mirror
    queries = Queries.of(batch, workspace.max_shape)
    n = batch.token_ids.size
    r = batch.logit_rows.size
    mirror.host["tiles"][:] = 0
    mirror.host["num_tokens"][:r] = num_tokens
    for name in ("rows", "lone"):
        mirror.host[name][:] = -1
    mirror.write(
        sizes=np.array([n, r, 0, n * workspace.max_shape.experts], np.int32),
        token_ids=batch.token_ids,
        positions=batch.positions,
        token_slots=batch.token_slots,
        logit_rows=batch.logit_rows,
        rows=np.arange(r, dtype=np.int32),
        lone=queries.lone,
        tiles=queries.tiles,
    )
    workspace.device.write(workspace.embeds, batch.embeds)
    return queries


def stream_of(workspace: Workspace, count: int) -> np.ndarray:
    """Return x (N, C) of the last step's tokens."""
    return workspace.read_tokens(workspace.x)


def _num_bytes(shapes: Shapes) -> int:
    return sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in shapes.values())


def _split(whole: Any, shapes: Shapes) -> dict[str, Any]:
    found, start = {}, 0
    for name, of_name in shapes.items():
        stop = start + _num_bytes({name: of_name})
        found[name] = whole[start:stop].view(of_name[1])
        start = stop
    return found


def _zeros(device: Any, shapes: Shapes) -> dict[str, Any]:
    return {name: device.zeros(shape, kind) for name, (shape, kind) in shapes.items()}


def _shapes(config, max_shape: MaxShape, dtype: str, share: RankShare) -> Shapes:
    n = max_shape.tokens
    r = max_shape.logits
    pairs = n * max_shape.experts
    heads = share.n_head
    padded = padded_head(config.head_size)
    columns = padded_columns(config.n_embd)
    numbers = DTYPES[dtype].numbers
    kind = numbers.array_type
    device = devices.the_device()
    some = {"narrow": ((max(n, r), padded_columns(config.embed_dim)), kind)} if config.embed_dim else {}
    if numbers.has_mma:
        some["qkv"] = (n, padded_columns(3 * heads * config.head_size)), kind
    if share.is_first:
        some["embeds"] = (n, config.embedding_size), np.float32
    return some | {
        "x": ((n, config.n_embd), np.float32),
        "normed": ((max(pairs, r), columns), kind),
        "q": ((n, heads, padded), kind),
        "attended": ((n, columns), kind),
        "partials": ((max_shape.decode_tokens, heads, max_shape.max_blocks, padded + 2), np.float32),
        "merges": ((max_shape.decode_tokens, heads), np.int32),
        "inner": ((pairs, padded_columns(config.inner_size)), kind),
        "run_sums": ((run_sums_size(device),), np.float32),
        "tile_arrivals": ((MAX_SHARED * device.multiprocessors // 2,), np.uint32),
        "logits": ((r, config.vocab_size if share.samples else share.vocab_size), np.float32),
        "every": ((max(n, r),), np.int32),
    }


def _mixture_shapes(config: Any, max_shape: MaxShape) -> Shapes:
    n = max_shape.tokens
    experts = config.num_experts
    per_token = max_shape.experts
    tiles = max_tiles(rounded_up(n) * per_token, experts)
    return {
        "scores": ((n, experts), np.float32),
        "chosen": ((n, per_token), np.int32),
        "shares": ((n, per_token), np.float32),
        "counts": ((experts,), np.int32),
        "order": ((n * per_token,), np.int32),
        "places": ((n, per_token), np.int32),
        "tiles": ((tiles, TILE_BOUNDS), np.int32),
        "outputs": ((n * per_token, padded_columns(config.n_embd)), np.float32),
    }


def _sampling_shapes(device: Any, config: Any, max_shape: MaxShape) -> Shapes:
    r = max_shape.logits
    at_once = min(r, device.multiprocessors), config.vocab_size
    return {
        "scores": (at_once, np.float32),
        "ids": (at_once, np.int32),
        "keys": ((r, SLICES), np.int64),
        "arrivals": ((r,), np.uint32),
        "token_ids": ((r,), np.int32),
        "step_token_ids": ((r,), np.int32),
        "history": ((MAX_STEPS, max_shape.decode_tokens), np.int32),
    }


def _input_shapes(max_shape: MaxShape) -> Shapes:
    n = max_shape.tokens
    lengths = {
        "sizes": NUM_SIZES,
        "token_ids": n,
        "positions": n,
        "token_slots": n,
        "logit_rows": max_shape.logits,
        "rows": max_shape.logits,
        "num_tokens": max_shape.logits,
        "lone": max_shape.decode_tokens,
        "tiles": 2 * n,
    }
    return {name: ((length,), np.int32) for name, length in lengths.items()}


def _setting_shapes(max_shape: MaxShape) -> Shapes:
    r = max_shape.logits
    return {
        "settings": ((r, NUM_SETTINGS), np.float64),
        "seeds": ((r,), np.uint64),
        "sample_indices": ((r,), np.uint64),
        "rows": ((r,), np.int32),
        "num_tokens": ((r,), np.int32),
        "positions": ((r,), np.int32),
    }
