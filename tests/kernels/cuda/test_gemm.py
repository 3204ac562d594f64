"""The CUDA backend's gemm for many tokens: the bits of its kernel for few tokens, whatever the tile."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from support import cuda_compile
from support.cuda_device import SimulatedDevice, heads_of, normal, packed, run_linear, stored
from support.examples import daily
from support.kernel_tools import unwritten
from support.ptx_machine import Machine, simulate
from tinygpt.kernels.cuda.layers import gemm
from tinygpt.kernels.cuda.layers.epilogue import ADD, LOGITS, QKV
from tinygpt.kernels.cuda.layers.gemm import gemm_kernel
from tinygpt.kernels.cuda.layers.tiles import (
    FMA_TILES,
    LONG,
    MMA_TILES,
    ROWS_AT_ONCE,
    Tile,
    pick_tile,
    run_sums_size,
    slots_of,
)
from tinygpt.kernels.cuda.model import Step, products
from tinygpt.kernels.cuda.params import STEP
from tinygpt.kernels.cuda.workspace import StepShape

pytestmark = pytest.mark.usefixtures("compute_capability")

DTYPES = ("float32", "bfloat16", "int8")
H200 = SimpleNamespace(multiprocessors=132, shared_bytes=227 << 10)
SMALL = Tile(2, 2, 1, 1)  # 32 tokens by 16 features, by four warps: cheap to simulate


def run_gemm(target, inputs, weights, layer, width, count, dtype, tile, epilogue, parts=1):
    grid = tile.grid(count, weights.features)
    sizes = np.array([0, count], np.int32)
    run_sums = unwritten(math.prod(grid) * slots_of(parts) * tile.tokens * tile.features)
    arrivals = np.zeros(math.prod(grid), np.uint32)
    arguments = (target, inputs, weights, layer, width, sizes, 1, run_sums, arrivals)
    shared_bytes = tile.shared_bytes(dtype)
    kernel = gemm_kernel(dtype, tile, epilogue, parts)
    simulate(kernel, (*grid, parts), tile.threads, *arguments, shared_bytes=shared_bytes)
    assert not arrivals.any()


def bits(values: np.ndarray) -> np.ndarray:
    return values.view({4: np.uint32, 2: np.uint16}[values.itemsize])


def both(target: np.ndarray, *arguments, tile: Tile) -> tuple[np.ndarray, np.ndarray]:
    """What linear_kernel and gemm_kernel make of a target."""
    expected, result = target.copy(), target.copy()
    *given, dtype, epilogue = arguments
    run_linear(expected, *given, dtype, 1, epilogue)
    run_gemm(result, *given, dtype, tile, epilogue)
    return expected, result


def case(count: int, features: int, k: int, dtype: str):
    x = normal(count, k)
    weight = normal(2, features, k)
    bias = normal(2, features)
    return stored(x, dtype), packed(weight, bias, dtype)


SHAPES = [(1, 3, 40), (17, 19, 552), (65, 35, 136), (130, 11, 648)]
SUMS = [(ADD, dtype, *shape) for dtype in DTYPES for shape in SHAPES]
ACTIVATED = [(name, dtype, 33, 27, 136) for name in ("gelu_tanh", "relu") for dtype in DTYPES]


@pytest.mark.parametrize(
    ("epilogue", "dtype", "count", "features", "k"),
    [*SUMS, *daily(ACTIVATED, [("gelu_tanh", "int8", 33, 27, 136)])],
)
def test_the_bits_are_those_of_the_linear_kernel(epilogue, dtype, count, features, k):
    width = 64
    target = stored(normal(count, width, seed=1), "float32" if epilogue == ADD else dtype)
    arguments = *case(count, features, k, dtype), 1, width, count, dtype, epilogue
    expected, result = both(target, *arguments, tile=SMALL)
    assert (bits(result) == bits(expected)).all()
    changed = (result != target).reshape(count, width)
    assert changed[:, :features].mean() > 0.9
    assert epilogue != ADD or not changed[:, features:].any()


OF_TILES = [
    *zip(MMA_TILES, ["bfloat16", "int8", "bfloat16"], strict=True),
    *zip(FMA_TILES, ["float32"] * 3, strict=True),
]
LARGEST_TILES = [*OF_TILES[1:3], OF_TILES[-1]]  # of int8, bfloat16 and float32


@pytest.mark.parametrize(("tile", "dtype"), daily(OF_TILES, LARGEST_TILES))
def test_each_tile_gives_the_same_bits(tile, dtype):
    count, features = tile.tokens + 1, 35
    arguments = *case(count, features, 136, dtype), 0, features, count, dtype, LOGITS
    expected, result = both(np.full(count * features, np.nan, np.float32), *arguments, tile=tile)
    assert (bits(result) == bits(expected)).all()
    assert np.isfinite(result).all()


@pytest.mark.parametrize(
    ("dtype", "parts", "k"),
    [
        *daily([("bfloat16", 2, 648)], []),
        *(("bfloat16", 8, 136), ("int8", 4, 712), ("float32", 4, 552)),
    ],
)
def test_blocks_that_share_a_tile_give_the_same_bits(dtype, parts, k):
    """Also if some have nothing to add."""
    count, features = 65, 35
    arguments = *case(count, features, k, dtype), 1, features, count, dtype
    expected = normal(count * features, seed=1)
    result = expected.copy()
    run_linear(expected, *arguments, 1, ADD)
    run_gemm(result, *arguments, SMALL, ADD, parts)
    assert (bits(result) == bits(expected)).all()


def test_a_gpu_without_asynchronous_copies_has_the_same_bits(monkeypatch):
    monkeypatch.setattr(cuda_compile, "ARCHITECTURE", (7, 5))
    # A process compiles a device function once: these are of no other test.
    monkeypatch.setattr(gemm, "_copy_function", gemm._copy_function.__wrapped__)
    tile = Tile(2, 2, 1, 1, stages=2)
    arguments = *case(65, 35, 136, "float32"), 1, 35, 65, "float32", ADD
    expected, result = both(normal(65 * 35, seed=1), *arguments, tile=tile)
    assert (bits(result) == bits(expected)).all()


def test_a_queued_product_of_a_long_sum_has_the_same_bits():
    device = SimulatedDevice()
    count, features = 65, 11
    inputs, weights = case(count, features, LONG * STEP, "int8")
    params = SimpleNamespace(
        dtype="int8", linears={"mlp_proj": weights}, config=SimpleNamespace(n_embd=features)
    )
    workspace = SimpleNamespace(
        device=device,
        inputs=SimpleNamespace(sizes=np.array([count], np.int32)),
        every=None,
        ranks=None,
        run_sums=np.zeros(run_sums_size(device), np.float32),
        tile_arrivals=np.zeros(device.multiprocessors, np.uint32),
    )
    expected = normal(count * features, seed=1)
    result = expected.copy()
    run_linear(expected, inputs, weights, 1, features, count, "int8", 8, ADD)
    products(params, "mlp_proj", 1, result, inputs, Step(StepShape(128, 1, 0, 0, 1), None, workspace), ADD)
    assert (bits(result) == bits(expected)).all()
    assert workspace.run_sums.any()


@pytest.mark.parametrize("dtype", daily(DTYPES, ["float32", "int8"]))  # test_model.py has bfloat16's
def test_queries_keys_and_values_go_to_the_same_places(dtype):
    count = 33
    heads = 3
    size = 5
    inputs, weights = case(count, 3 * heads * size, heads * size, dtype)
    positions = [*range(3, 33), 0, 1, 2]
    token_slots = [2] * 30 + [0] * 3
    expected, result = (heads_of(dtype, count, 3, 64, heads, size, positions, token_slots) for _ in range(2))
    run_linear(expected, inputs, weights, 1, 0, count, dtype, 1, QKV)
    run_gemm(result, inputs, weights, 1, 0, count, dtype, SMALL, QKV)
    for name in ("q", "k_cache", "v_cache"):
        made = getattr(result, name)
        assert (made == getattr(expected, name)).all()
        assert np.count_nonzero(made) >= 0.9 * count * heads * size


def test_a_warp_loads_in_two_turns_of_shared_memory(monkeypatch):
    """float32: a turn reads all banks, for half a warp, if all lanes n and n ^ 1, or n and n ^ 2, have one address."""
    loads = []
    load = Machine.load

    def note(machine, space, address, kind, count):
        if (space, count) == ("shared", 4):
            loads.append(address.reshape(-1, 32) // 16)
        return load(machine, space, address, kind, count)

    monkeypatch.setattr(Machine, "load", note)
    inputs, weights = case(33, 19, 136, "float32")
    run_gemm(np.zeros(33 * 19, np.float32), inputs, weights, 0, 19, 33, "float32", SMALL, LOGITS)
    lanes = np.arange(32)
    for warps in loads:
        assert any((warps == warps[:, lanes ^ other]).all() for other in (1, 2))
        assert (np.sort(warps.reshape(-1, 16) % 8) == np.arange(8).repeat(2)).all()
    assert loads


def test_a_token_that_is_not_finite_stays_alone():
    inputs, weights = case(33, 19, 136, "bfloat16")
    arguments = weights, 0, 19, 33, "bfloat16", LOGITS
    clean = np.zeros(33 * 19, np.float32)
    spoilt = np.zeros(33 * 19, np.float32)
    run_gemm(clean, inputs, *arguments[:-1], SMALL, LOGITS)
    inputs.reshape(33, -1)[5] = 0x7FC0  # NaN
    run_gemm(spoilt, inputs, *arguments[:-1], SMALL, LOGITS)
    same = bits(clean).reshape(33, 19) == bits(spoilt).reshape(33, 19)
    assert np.isnan(spoilt.reshape(33, 19)[5]).all()
    assert np.delete(same, 5, axis=0).all()


def test_the_number_of_tokens_is_read_on_the_device():
    """A grid for more tokens than there are does no more, and reads no more: here, the inputs end where they end."""
    inputs, weights = case(17, 19, 136, "int8")
    result = np.zeros(40 * 19, np.float32)
    expected = np.zeros(40 * 19, np.float32)
    sizes = np.array([17], np.int32)
    shared_bytes = SMALL.shared_bytes("int8")
    nothing = np.zeros(1, np.float32), np.zeros(1, np.uint32)
    arguments = SMALL.threads, result, inputs, weights, 0, 19, sizes, 0, *nothing
    simulate(gemm_kernel("int8", SMALL, LOGITS), SMALL.grid(128, 19), *arguments, shared_bytes=shared_bytes)
    run_linear(expected, inputs, weights, 0, 19, 17, "int8", 1, LOGITS)
    assert (bits(result) == bits(expected)).all()
    assert result[: 17 * 19].all()


@pytest.mark.parametrize(
    ("tokens", "features", "steps", "dtype", "size", "parts"),
    [
        (65, 768, 12, "bfloat16", (32, 32), 1),
        (1024, 768, 12, "bfloat16", (32, 32), 1),
        (1024, 3072, 12, "bfloat16", (64, 96), 1),
        (2048, 3072, 12, "bfloat16", (128, 128), 1),
        (128, 768, 48, "bfloat16", (32, 32), 2),
        (512, 768, 48, "int8", (64, 96), 4),
        (1024, 768, 48, "bfloat16", (64, 96), 2),
        (2048, 768, 48, "bfloat16", (64, 96), 1),
        (256, 768, 12, "float32", (32, 32), 1),
        (512, 2304, 12, "float32", (64, 48), 1),
        (512, 3072, 12, "float32", (64, 96), 1),
        (512, 768, 48, "float32", (64, 96), 4),
    ],
)
def test_tiles_are_as_large_as_leaves_no_multiprocessor_idle(tokens, features, steps, dtype, size, parts):
    """In float32 three small tiles a multiprocessor are less than two large ones; long sums are shared."""
    tile, found = pick_tile(tokens, features, steps, dtype, H200)
    assert (tile.tokens, tile.features, found) == (*size, parts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_is_room_for_the_sums_of_all_shared_tiles(dtype):
    for tokens, features in itertools.product(range(65, 4096, 64), range(64, 4096, 64)):
        tile, parts = pick_tile(tokens, features, 48, dtype, H200)
        tiles = math.prod(tile.grid(tokens, features))
        assert parts == 1 or tiles <= H200.multiprocessors
        assert parts == 1 or tiles * slots_of(parts) * tile.tokens * tile.features <= run_sums_size(H200)


@pytest.mark.parametrize(
    ("dtype", "kib", "count"), [("float32", 64, 2), ("float32", 99, 3), ("bfloat16", 99, 2), ("int8", 99, 3)]
)
def test_a_tile_fits_in_a_small_devices_memory(dtype, kib, count):
    """As small as a T4's, and an RTX 50's."""
    device = SimpleNamespace(**vars(H200) | {"shared_bytes": kib << 10})
    shapes = itertools.product((65, 512, 4096), (768, 2304, 3072))
    tiles = {pick_tile(tokens, features, 12, dtype, device)[0] for tokens, features in shapes}
    assert len(tiles) == count
    assert max(tile.shared_bytes(dtype) for tile in tiles) <= device.shared_bytes


@pytest.mark.parametrize(("tokens", "name"), [(64, "linear"), (128, "gemm")])
def test_many_tokens_have_tiles(tokens, name):
    launched = []

    def launch(kernel, *_, **__):
        launched.append(kernel.py_func.__name__)

    device = SimpleNamespace(**vars(H200), launch=launch)
    weights = packed(normal(1, 8, 64), normal(1, 8), "float32")
    params = SimpleNamespace(
        dtype="float32", linears={"attn_proj": weights}, config=SimpleNamespace(n_embd=8)
    )
    workspace = SimpleNamespace(
        device=device,
        inputs=SimpleNamespace(sizes=None),
        every=None,
        ranks=None,
        run_sums=None,
        tile_arrivals=None,
    )
    step = Step(StepShape(tokens, 1, 0, 0, 1), None, workspace)
    products(params, "attn_proj", 0, None, None, step, ADD)
    assert launched == [name]


@pytest.mark.parametrize("tile", MMA_TILES)
def test_a_tile_fits(tile):
    assert tile.shared_bytes("int8") <= tile.shared_bytes("bfloat16") <= 227 << 10
    assert tile.tokens % (tile.warps * ROWS_AT_ONCE) == 0
    assert tile.threads % 128 == 0
    assert math.prod(tile.grid(tile.tokens, tile.features)) == 1
    assert math.prod(tile.grid(tile.tokens + 1, tile.features + 1)) == 4
