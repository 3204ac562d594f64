"""The dtypes of a model's weights, and the weights on the device, in panels of 8 features.

In a panel's step of 64 of K, lane 4 g + q holds 16 numbers of feature g; a warp reads 512 contiguous bytes a load:
    float16, bfloat16: two loads of 8 numbers, k = 32 h + 8 q + i
    int8: one load of 16 numbers, in the same order but for each four: 0, 2, 1, 3
    float32: four loads of 4 numbers, k = 16 p + 4 q + i
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import float32, uint32

from ..backend import KINDS, LINEARS, NORMS
from ..numbers import check_range, from_bfloat16, stacked, to_bfloat16
from ..rank_share import RankShare
from . import device as devices
from .jit import AMPERE, BF16, F16, bits_to_float32, device_function

OUT_TILE = 8  # features of a panel
STEP = 64
STEP_SIZE = OUT_TILE * STEP  # numbers
# Every kernel sums K in 8 runs of whole steps, each in order, then the runs in order.
SEGMENTS = 8
LOAD_BYTES = 16  # of a lane
GATE = "gate"  # the linear layer, in float32, whose outputs choose experts


@device_function
def _store_float32(array, index, value):
    array[index] = value


@device_function
def _store_float32_pair(array, index, low, high):
    array[index] = low
    array[index + 1] = high


@device_function
def _load(array, index):
    return float32(array[index])


@device_function
def _load_bfloat16(array, index):
    return bits_to_float32(uint32(array[index]) << uint32(16))


def _as_float32(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float32)


def _to_float16(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float16)


@dataclass(frozen=True)
class Numbers:
    """A family of activations, which the KV cache holds as well: how arrays keep them, and how they are multiplied.

    encode and decode: the host's float32 as an array's numbers, and back
    store: (array, index, value), and store_pair: (array, index, low, high), of float32
    pack and mma: two float32 as a word, and the product of a warp on tensor cores; None for ordinary units
    expand: a word of int8 as two words, None for ordinary units
    oldest: the least compute capability
    largest: finite number; None: float32's
    """

    name: str
    array_type: Any
    encode: Any
    decode: Any
    store: Any
    store_pair: Any
    oldest: tuple[int, int]
    pack: Any = None
    mma: Any = None
    expand: Any = None
    largest: float | None = None

    @property
    def item_bytes(self) -> int:
        return np.dtype(self.array_type).itemsize

    @property
    def has_mma(self) -> bool:
        """Return whether tensor cores multiply, which take values of two positions in a word."""
        return self.mma is not None


FLOAT32 = Numbers(
    name="float32",
    array_type=np.float32,
    encode=_as_float32,
    decode=_as_float32,
    store=_store_float32,
    store_pair=_store_float32_pair,
    oldest=devices.OLDEST,
)
BFLOAT16 = Numbers(
    name="bfloat16",
    array_type=np.uint16,
    encode=to_bfloat16,
    decode=from_bfloat16,
    oldest=AMPERE,
    **BF16._asdict(),
)
FLOAT16 = Numbers(
    name="float16",
    array_type=np.float16,
    encode=_to_float16,
    decode=_as_float32,
    oldest=AMPERE,
    **F16._asdict(),
    largest=np.finfo(np.float16).max,
)
NUMBERS = {numbers.name: numbers for numbers in (FLOAT32, FLOAT16, BFLOAT16)}


@dataclass(frozen=True)
class Dtype:
    """A dtype of weights.

    numbers: of the activations
    place: (g, k), a number's place in its panel's step
    load: (array, index), a number as float32
    expand: a word as two words of operands of `mma`; None if words are operands
    """

    numbers: Numbers
    array_type: Any
    place: Callable
    load: Any
    expand: Any = None

    @property
    def has_scales(self) -> bool:
        """Return whether each feature has a scale."""
        return self.array_type == np.int8

    @property
    def item_bytes(self) -> int:
        return np.dtype(self.array_type).itemsize

    @property
    def lane_size(self) -> int:
        """Return the numbers of a lane's load."""
        return LOAD_BYTES // self.item_bytes

    @property
    def words(self) -> int:
        """Return the uint32 of a lane in a step."""
        return 4 * self.item_bytes


def _by_loads(lane_size: int) -> Callable:
    RUN = 4 * lane_size  # of a feature in a warp's load

    @device_function
    def place(g, k):
        return k // RUN * (OUT_TILE * RUN) + g * RUN + k % RUN

    return place


@device_function
def _by_lanes(g, k):
    return g * 64 + k % 32 // 8 * 16 + k // 32 * 8 + (k & 4 | k % 2 * 2 | k % 4 // 2)


DTYPES = {
    "float32": Dtype(FLOAT32, np.float32, _by_loads(4), _load),
    "float16": Dtype(FLOAT16, np.float16, _by_loads(8), _load),
    "bfloat16": Dtype(BFLOAT16, np.uint16, _by_loads(8), _load_bfloat16),
    "int8": Dtype(BFLOAT16, np.int8, _by_lanes, _load, BF16.expand),
}


class Weights(NamedTuple):
    """A linear layer of every layer."""

    panels: Any  # (L, features, K)
    scales: Any  # (L, num_panels * OUT_TILE) float32
    bias: Any  # (L, features) float32
    num_panels: int
    num_steps: int
    features: int


class NormWeights(NamedTuple):
    """A layer norm of every layer."""

    weight: Any  # (L, C) float32
    bias: Any  # (L, C) float32


@dataclass(frozen=True)
class Params:
    device: Any
    config: Any
    dtype: str
    share: RankShare
    wpe: Any  # (n_positions, C) float32; with ALiBi, and of a stage that embeds nothing, one 0
    slopes: Any  # (H,) float32, of ALiBi; else wpe, for no kernel reads it
    linears: dict[str, Weights]  # of linear_layers, and lm_head, which is wte if one process has both
    norms: dict[str, NormWeights]  # before linear layers: (L, C) of ln_1 and ln_2, (1, C) of ln_f
    norms_after: dict[str, NormWeights]  # of the stream: (L, C) of ln_1 and ln_2, (1, C) of ln_e
    final_norm: NormWeights | None  # ln_f on the host
    adapters: Any = None  # Adapters of layers/adapters.py, or None


def share_of(
    config: Any, dtype: str, layers: range | None = None, tensor_rank: int = 0, tensor_size: int = 1
) -> RankShare:
    """Return a rank's share of a model, by default all."""
    return RankShare.even(config, layers, tensor_rank, tensor_size)


def load_params(
    checkpoint: Any, dtype: str = "float32", threads: int = 1, share: RankShare | None = None
) -> Params:
    """share: a rank's, else all."""
    device = devices.the_device()
    config = checkpoint.config
    share = share or share_of(config, dtype)
    norms = {name: _norm_of(checkpoint, modules) for name, modules in norm_layers(config, share).items()}
    on_device = {name: NormWeights(*map(device.array, norm)) for name, norm in norms.items()}
    after = {"ln_e"} if config.norm_placement == "pre" else {"ln_e", *NORMS}
    layers = linear_layers(config, dtype, checkpoint.tied, share)
    linears = {name: _load_linear(device, checkpoint, name, layer) for name, layer in layers.items()}
    has_positions = share.is_first and not config.has_alibi
    wpe = device.array(checkpoint.tensor("wpe.weight") if has_positions else np.zeros(1, np.float32))
    slopes = config.alibi_slopes[share.heads.start : share.heads.stop]
    return Params(
        device=device,
        config=config,
        dtype=dtype,
        share=share,
        wpe=wpe,
        slopes=device.array(np.float32(slopes)) if slopes else wpe,
        linears={"lm_head": linears["wte"], **linears} if share.is_first else linears,
        norms={name: norm for name, norm in on_device.items() if name not in after},
        norms_after={name: norm for name, norm in on_device.items() if name in after},
        final_norm=NormWeights(*(kind[0] for kind in norms["ln_f"])) if "ln_f" in norms else None,
    )


def _norm_of(checkpoint: Any, modules: list[str]) -> NormWeights:
    """Return the norms (n, C) of some modules, on the host."""
    return NormWeights(*(stacked(checkpoint, [f"{module}.{kind}" for module in modules]) for kind in KINDS))


def _load_linear(device: Any, checkpoint: Any, name: str, layer: "LinearLayer") -> Weights:
    modules, runs, k, dtype = layer
    row = DTYPES[dtype]
    n = layer.features
    rows = panel_count(n) * OUT_TILE
    size = rows * padded_columns(k)
    bias = np.zeros((len(modules), n), np.float32)
    if name in LINEARS:
        bias = _rows_of(stacked(checkpoint, [f"{module}.bias" for module in modules]).T, runs).T
    panels = device.zeros((len(modules), size), row.array_type)
    scales = np.empty((len(modules), rows), np.float32)
    for i, module in enumerate(modules):  # one matrix at a time is in memory twice
        tensor = f"{module}.weight"
        weight = checkpoint.tensor(tensor)
        check_range(tensor, weight, dtype, row.numbers.largest)
        packed, scales[i] = pack(_rows_of(weight, runs), dtype)
        device.write(panels, packed, i * size)
        checkpoint.release(tensor)
    return Weights(panels, device.array(scales), device.array(bias), panel_count(n), step_count(k), n)


def _rows_of(array: np.ndarray, runs: list[range]) -> np.ndarray:
    """Return some rows, or all without a copy."""
    if sum(map(len, runs)) == len(array):
        return array
    return np.concatenate([array[run.start : run.stop] for run in runs])


class LinearLayer(NamedTuple):
    """A linear layer of every layer, in a checkpoint."""

    modules: list[str]
    runs: list[range]  # of features, that a rank has
    columns: int  # K
    dtype: str

    @property
    def features(self) -> int:
        return sum(map(len, self.runs))

    @property
    def num_bytes(self) -> int:
        rows = panel_count(self.features) * OUT_TILE
        panel_bytes = rows * padded_columns(self.columns) * DTYPES[self.dtype].item_bytes
        return len(self.modules) * (panel_bytes + 4 * (rows + self.features))


def linear_layers(config: Any, dtype: str, tied: bool, share: RankShare) -> dict[str, LinearLayer]:
    """Return each linear layer, wte and lm_head among them."""
    C = config.n_embd
    E = config.embedding_size
    F = config.inner_size
    runs = share.runs
    layers = [f"h.{i}" for i in share.layers]
    experts = [f"h.{i}.mlp" for i in config.expert_layers]
    mlps = [f"{layers[i]}.mlp" for i in mlp_order(config, share)[: len(layers) - len(experts)]]
    mlps += [f"{mlp}.experts.{e}" for mlp in experts for e in range(config.num_experts)]
    table = {
        "c_attn": ([f"{layer}.attn.c_attn" for layer in layers], runs["qkv"], C),
        "attn_proj": ([f"{layer}.attn.c_proj" for layer in layers], runs["stream"], C),
        "c_fc": ([f"{mlp}.c_fc" for mlp in mlps], runs["inner"], C),
        "mlp_proj": ([f"{mlp}.c_proj" for mlp in mlps], runs["stream"], F),
    }
    if share.is_first:
        table["wte"] = ["wte"], [range(config.vocab_size)], E
    if share.is_last and not (tied and share.is_first and share.tensor_size == 1):
        table["lm_head"] = ["lm_head"], runs["vocab"], E
    if config.embed_dim:
        table["project_in"] = ["project_in"], [range(C)], E
        table["project_out"] = ["project_out"], [range(E)], C
    if experts:
        table[GATE] = [f"{mlp}.gate" for mlp in experts], [range(config.num_experts)], C
    return {name: LinearLayer(*row, dtype_of(name, dtype)) for name, row in table.items()}


def norm_layers(config: Any, share: RankShare) -> dict[str, list[str]]:
    """Return the modules of each layer norm."""
    orders = dict.fromkeys(NORMS, range(share.n_layer)) | {"ln_2": mlp_order(config, share)}
    found = {name: [f"h.{share.layers[i]}.{name}" for i in order] for name, order in orders.items()}
    if config.final_norm and share.is_last:
        found["ln_f"] = ["ln_f"]
    if config.embed_norm and share.is_first:
        found["ln_e"] = ["ln_e"]
    return found


def mlp_order(config: Any, share: RankShare) -> list[int]:
    """Return layers without experts, then those with experts: the order of ln_2 and of MLPs."""
    return sorted(range(share.n_layer), key=config.expert_layers.__contains__)  # experts have one share


def dtype_of(name: str, dtype: str) -> str:
    """Return the dtype of a linear layer's weights."""
    return "float32" if name == GATE else dtype


def params_bytes(config: Any, dtype: str, tied: bool, share: RankShare) -> int:
    linears = linear_layers(config, dtype, tied, share).values()
    num_norms = sum(map(len, norm_layers(config, share).values()))
    positions = config.n_embd * config.n_positions if share.is_first and not config.has_alibi else 1
    others = 2 * config.n_embd * num_norms + positions + share.n_head * config.has_alibi
    return sum(linear.num_bytes for linear in linears) + 4 * others


def panel_count(n: int) -> int:
    return -(-n // OUT_TILE)


def step_count(k: int) -> int:
    return -(-k // STEP)


def padded_columns(columns: int) -> int:
    return step_count(columns) * STEP


def pack(weight: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return weight (N, K) float32 as flat panels, padded with zeros, and a scale for each feature, 1 unless int8."""
    n, k = weight.shape
    panels = panel_count(n)
    steps = step_count(k)
    padded = np.zeros((panels * OUT_TILE, steps * STEP), np.float32)
    padded[:n, :k] = weight
    row = DTYPES[dtype]
    scales = np.ones(panels * OUT_TILE, np.float32)
    if row.has_scales:
        greatest = np.abs(padded).max(1)
        scales = np.where(greatest == 0, np.float32(1), greatest / np.float32(127))
        with np.errstate(invalid="ignore"):  # the numbers of a row with a NaN: its scale is NaN
            numbers = np.rint(padded / scales[:, None]).astype(np.int8)
    else:
        numbers = row.numbers.encode(padded)
    order = np.argsort(row.place.py_func(*np.ogrid[:OUT_TILE, :STEP]), axis=None)
    of_steps = numbers.reshape(panels, OUT_TILE, steps, STEP).swapaxes(1, 2).reshape(-1, STEP_SIZE)
    return of_steps.take(order, 1, mode="clip").ravel(), scales  # a fifth of the time of of_steps[:, order]
