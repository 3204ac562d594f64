"""CUDA kernels compiled without a GPU: registers, no spills, and what their PTX has in which order."""

import itertools
import re

import numpy as np
import pytest

from support.cuda_compile import Compiled, compile_kernel, sm
from support.cuda_device import FLOATS, INTS, sample_arguments
from support.examples import daily
from tinygpt.kernels.cuda.draw import DRAW_THREADS, draw_tokens
from tinygpt.kernels.cuda.jit import WARP
from tinygpt.kernels.cuda.kv_cache import (
    COPY,
    LAYOUTS,
    MOVE_THREADS,
    PUT_THREADS,
    READ,
    WRITE,
    _move_kernel,
    put_kernel,
)
from tinygpt.kernels.cuda.layers.adapters import ADAPT_WARPS, Factors, adapt_kernel
from tinygpt.kernels.cuda.layers.attention import (
    TILE_WARPS,
    WHOLE_SIZE,
    attend_decode_kernel,
    attend_prefill_kernel,
)
from tinygpt.kernels.cuda.layers.epilogue import ACTIVATIONS, ADD, LOGITS, QKV, Heads
from tinygpt.kernels.cuda.layers.experts import (
    ADD_THREADS,
    CHOOSE_WARPS,
    SORT_THREADS,
    add_experts,
    choose_kernel,
    sort_pairs,
)
from tinygpt.kernels.cuda.layers.gemm import gemm_kernel
from tinygpt.kernels.cuda.layers.linear import (
    LINEAR_THREADS,
    Norm,
    fused_block_bytes,
    fused_shared_bytes,
    linear_kernel,
    normed_linear_kernel,
    steps_ahead,
)
from tinygpt.kernels.cuda.layers.rows import EMBED_THREADS, NORM_WARPS, embed_kernel, layer_norm_kernel
from tinygpt.kernels.cuda.layers.tiles import FMA_TILES, MMA_TILES, ROWS_AT_ONCE, Tile
from tinygpt.kernels.cuda.model import ADVANCE_THREADS, DECODE_WARPS, advance
from tinygpt.kernels.cuda.sampling import CHOOSE_THREADS, ProcessorArrays, process_rows, take_greatest

pytestmark = pytest.mark.toolchain

DTYPES = ("float32", "bfloat16", "int8")
CACHES = ("float32", False), ("bfloat16", False), ("bfloat16", True)  # of int8
SMALLEST, MIDDLE, LARGEST = MMA_TILES
*SMALLER_FMA_TILES, LARGEST_FMA_TILE = FMA_TILES
# libNVVM compiles for 10.0 and later with another compiler than before.
CAPABILITIES = (9, 0, "a"), *(pytest.param(other, marks=pytest.mark.slow) for other in ((8, 6), (12, 0)))
DOUBLES = np.zeros(8)
LONGS = np.zeros(8, np.int64)
WORDS = np.zeros(8, np.uint32)
SEEDS = np.zeros(8, np.uint64)
HALVES = np.zeros(8, np.uint16)
BYTES = np.zeros(8, np.int8)
NUMBERS = (1, 1, 1)
DRAW = FLOATS, 5, 5, INTS, INTS, DOUBLES, SEEDS, SEEDS, INTS, FLOATS, INTS, INTS
PROCESS = FLOATS, 5, ProcessorArrays(INTS, INTS, FLOATS, INTS, INTS, INTS, INTS, FLOATS), INTS


def linear_arguments(dtype: str, epilogue: str) -> tuple:
    target, inputs, weights = sample_arguments(dtype, epilogue)
    return target, inputs, weights, 1, 1, INTS, 1


def gemm_arguments(dtype: str, epilogue: str) -> tuple:
    return *linear_arguments(dtype, epilogue), FLOATS, WORDS


def normed_arguments(dtype: str, epilogue: str) -> tuple:
    target, _, weights = sample_arguments(dtype, epilogue)
    return target, Norm(FLOATS, INTS, FLOATS, FLOATS, np.float32(1)), weights, 1, 1, INTS, 1


def adapt_arguments(dtype: str, epilogue: str) -> tuple:
    target, inputs, weights = sample_arguments(dtype, epilogue)
    return target, FLOATS, inputs, weights, 1, 1, Factors(FLOATS, FLOATS, *NUMBERS), INTS, INTS, INTS


def norm_arguments(dtype: str) -> tuple:
    return sample_arguments(dtype, ADD)[1], FLOATS, INTS, FLOATS, FLOATS, 1, 1, np.float32(1), INTS, 1


def embed_arguments(dtype: str) -> tuple:
    panels = sample_arguments(dtype, ADD)[2].panels
    return FLOATS, 1, INTS, INTS, FLOATS, panels, FLOATS, np.float32(1), FLOATS, 1, 1, INTS


def attention_arguments(kernel: str, dtype: str, is_int8: bool = False) -> tuple:
    values = FLOATS if dtype == "float32" else HALVES
    heads = heads_like(values, BYTES if is_int8 else values)
    return {
        "decode": (values, INTS, FLOATS, heads, 1, INTS, 1, np.float32(1), FLOATS, 1),
        "prefill": (values, heads, 1, INTS, 1, np.float32(1), FLOATS),
    }[kernel]


def heads_like(values: np.ndarray, cached: np.ndarray) -> Heads:
    return Heads(values, cached, cached, INTS, INTS, *[1] * 5)


def gemm_name(tile: Tile) -> str:
    return f"gemm float32 {tile}"


def kernels() -> dict[str, tuple]:
    """Return kernels with the threads of a block and arguments: of each, the variants that need the most."""
    found = {
        "take_greatest": (take_greatest, CHOOSE_THREADS, FLOATS, 5, INTS, INTS, LONGS, WORDS, INTS),
        "draw_tokens": (draw_tokens, DRAW_THREADS, *DRAW),
        "process_rows": (process_rows, CHOOSE_THREADS, *PROCESS),
        "advance": (advance, ADVANCE_THREADS, INTS, INTS, INTS, INTS, INTS, INTS, 8),
        "embed": (embed_kernel("int8", "float32", True, True), EMBED_THREADS, *embed_arguments("int8")),
        "choose_experts": (choose_kernel(True), CHOOSE_WARPS * WARP, INTS, FLOATS, FLOATS, 4, 2, INTS),
        "sort_pairs": (sort_pairs, SORT_THREADS, *[INTS] * 5, 4, 2, 8, 1, INTS),
        "add_experts": (add_experts, ADD_THREADS, FLOATS, FLOATS, 1, FLOATS, INTS, 2, 1, INTS),
        "put": (put_kernel("bfloat16"), PUT_THREADS, heads_like(HALVES, BYTES), HALVES, 1, 1, INTS),
        "adapt": (adapt_kernel("float32", "gelu"), ADAPT_WARPS * WARP, *adapt_arguments("float32", "gelu")),
        "layer_norm": (layer_norm_kernel("bfloat16", 1600), NORM_WARPS * WARP, *norm_arguments("bfloat16")),
        "linear float32": (
            linear_kernel("float32", 1, QKV, 1),
            LINEAR_THREADS,
            *linear_arguments("float32", QKV),
        ),
    }
    for direction in (COPY, READ, WRITE):
        move = _move_kernel(direction, LAYOUTS["int8"].value_place)
        found[f"move {direction}"] = move, MOVE_THREADS, BYTES, BYTES, *[1] * 10
    for tile in FMA_TILES:
        gemm = gemm_kernel("float32", tile, QKV)
        found[gemm_name(tile)] = gemm, tile.threads, *gemm_arguments("float32", QKV)
    for dtype in ("bfloat16", "int8"):
        found[f"linear {dtype}"] = (
            linear_kernel(dtype, 8, QKV, 2),
            LINEAR_THREADS,
            *linear_arguments(dtype, QKV),
        )
        found[f"linear of experts {dtype}"] = (
            linear_kernel(dtype, 8, "gelu", 2, has_tiles=True),
            LINEAR_THREADS,
            *linear_arguments(dtype, "gelu"),
        )
        normed = normed_linear_kernel(dtype, 1600, QKV)
        found[f"normed_linear {dtype}"] = normed, LINEAR_THREADS, *normed_arguments(dtype, QKV)
        gemm = gemm_kernel(dtype, LARGEST, QKV)
        found[f"gemm {dtype}"] = gemm, LARGEST.threads, *gemm_arguments(dtype, QKV)
    for dtype, is_int8 in CACHES:
        kind = dtype, is_int8
        decode = attend_decode_kernel(128, dtype, is_int8=is_int8)
        prefill = attend_prefill_kernel(128, dtype, is_int8=is_int8)
        found[f"attend_decode {kind}"] = decode, DECODE_WARPS * WARP, *attention_arguments("decode", *kind)
        found[f"attend_prefill {kind}"] = prefill, TILE_WARPS * WARP, *attention_arguments("prefill", *kind)
    return found


@pytest.mark.parametrize("capability", CAPABILITIES, ids=sm)
@pytest.mark.parametrize("name", daily(kernels(), kernels().keys() - map(gemm_name, SMALLER_FMA_TILES)))
def test_a_block_has_registers_for_all_its_threads(name, capability):
    kernel, threads, *arguments = kernels()[name]
    compiled = compile_kernel(kernel, *arguments, architecture=capability)
    assert compiled.target == sm(capability)
    assert compiled.spilled == compiled.stack == 0
    assert -(-compiled.registers // 8) * 8 * threads <= 1 << 16  # given in eights


def fitting(registers: int, kernel, *arguments) -> Compiled:
    """Compile a kernel, which spills nothing and has this many registers at most."""
    compiled = compile_kernel(kernel, *arguments)
    assert compiled.spilled == compiled.stack == 0
    assert compiled.registers <= registers
    return compiled


def loads_at_once(ptx: str) -> int:
    """The most loads past the L1 cache, of pairs here, in a row with no store, shuffle or barrier in between."""
    kinds = re.findall(r"\b(ld\.global\.cg|st\.|shfl|bar\.)", ptx)
    return max(map(len, "".join("x" if kind.startswith("ld") else " " for kind in kinds).split()))


def loads_of_numbers(ptx: str) -> int:
    """Loads of scales and biases: what other kernels write is loaded past the L1 cache, and weights in fours."""
    return len(re.findall(r"\bld\.global(\.nc)?\.[fb]32", ptx))


# Every day, the epilogue that asks for the most.
@pytest.mark.parametrize("epilogue", daily([ADD, LOGITS, QKV, "gelu_tanh"], [QKV]))
def test_nothing_is_asked_for_after_the_sums_are_made(epilogue):
    """Neither scales and biases, nor a token's place in the KV cache, nor what a sum is added to."""
    plain = linear_kernel("bfloat16", 1, epilogue, 2)
    normed = normed_linear_kernel("bfloat16", 768, epilogue)
    for kernel, arguments_of in ((plain, linear_arguments), (normed, normed_arguments)):
        ptx = compile_kernel(kernel, *arguments_of("bfloat16", epilogue)).ptx
        before = ptx.split("mma.sync", 1)[0]
        after = ptx.rsplit("mma.sync", 1)[1]
        assert loads_of_numbers(before) >= (1 if epilogue == LOGITS else 2)
        if epilogue != LOGITS:  # whose blocks go on with another panel
            assert set(re.findall(r"ld\.global[^ ]*", after)) <= {"ld.global.L1::no_allocate.v4.u32"}


@pytest.mark.parametrize("dtype", daily(["bfloat16", "int8"], ["int8"]))
def test_weights_are_on_their_way_before_a_kernel_waits_for_the_one_before(dtype):
    plain = linear_kernel(dtype, 1, ADD, 2)
    normed = normed_linear_kernel(dtype, 768, ADD)
    for kernel, arguments_of in ((plain, linear_arguments), (normed, normed_arguments)):
        ptx = compile_kernel(kernel, *arguments_of(dtype, ADD)).ptx
        before, after = ptx.split("griddepcontrol.wait")
        assert "ld.global.L1::no_allocate" in before
        assert "ld.global.cg" not in before  # of what other kernels write
        assert "ld.global.cg" in after
        assert "griddepcontrol.launch_dependents" in before


# With 64 registers four blocks of 256 threads have room on a multiprocessor, with 80 three, with 128 two.
MOST_REGISTERS = {1: 80, 2: 96, 4: 112, 8: 160}  # by octets
# Every day, float32's; those of the others that need the most are among kernels().
LINEAR = list(itertools.product(DTYPES, (ADD, LOGITS, QKV, "gelu_tanh")))


@pytest.mark.parametrize(("dtype", "epilogue"), daily(LINEAR, [("float32", QKV)]))
def test_linear_layers_stay_in_registers(dtype, epilogue):
    cases = [(1, 1)]
    if dtype != "float32":
        between = [(2, 2), (4, 2)] if epilogue in (QKV, LOGITS) else []  # the others need no more
        cases = [(1, 2), *between, (8, 2), (1, 4 if epilogue == LOGITS else 6)]
    for octets, ahead in cases:
        registers = MOST_REGISTERS[octets] if ahead <= 2 else 128
        kernel = linear_kernel(dtype, octets, epilogue, ahead)
        compiled = fitting(registers, kernel, *linear_arguments(dtype, epilogue))
        assert "ld.global.L1::no_allocate.v4" in compiled.ptx
        products = 0 if dtype == "float32" else 4 * ahead * -(-octets // 2)
        assert compiled.ptx.count("mma.sync") == products  # of the steps ahead, once
    if dtype != "float32":
        for columns, registers in ((768, 80), (1600, 128)):
            kernel = normed_linear_kernel(dtype, columns, epilogue)
            compiled = fitting(registers, kernel, *normed_arguments(dtype, epilogue))
            assert compiled.ptx.count("mma.sync") == 4 * steps_ahead(dtype, 1, columns // 64)
            assert compiled.shared_bytes + fused_shared_bytes(columns) == fused_block_bytes(columns)
            assert loads_at_once(compiled.ptx) >= columns // 64


def test_a_wide_fused_norm_is_in_shared_memory_that_a_launch_can_be_granted():
    """Arrays of a fixed size have 48 KiB at most, of which only a driver knows."""
    kernel = normed_linear_kernel("bfloat16", 5952, ADD)
    compiled = compile_kernel(kernel, *normed_arguments("bfloat16", ADD))
    assert compiled.shared_bytes <= 48 << 10
    assert compiled.shared_bytes + fused_shared_bytes(5952) == fused_block_bytes(5952) <= 227 << 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_and_embedding_compile(dtype):
    fitting(40, embed_kernel(dtype, "float32", True, True), *embed_arguments(dtype))
    for columns, registers in ((768, 128), (1600, 255)):
        compiled = fitting(registers, layer_norm_kernel(dtype, columns), *norm_arguments(dtype))
        # Of the weight and the bias, which need not wait for the kernel before; then of the row.
        assert loads_at_once(compiled.ptx.split("griddepcontrol.wait", 1)[0]) >= 2 * (columns // 64)
        assert loads_at_once(compiled.ptx.split("griddepcontrol.wait", 1)[1]) >= columns // 64


# With 128 registers two blocks of 256 threads have room on a multiprocessor. A tile of 128 tokens has it to itself:
# a lane has 128 registers of sums, and up to 255 in all.
TILES_REGISTERS = dict(zip(MMA_TILES, (80, 128, 248), strict=True))


TILES = [
    *((dtype, tile, QKV, 1) for dtype in ("bfloat16", "int8") for tile in MMA_TILES),
    *((dtype, MIDDLE, ADD, parts) for dtype in ("bfloat16", "int8") for parts in (1, 4)),
    *((dtype, LARGEST, "gelu_tanh", 1) for dtype in ("bfloat16", "int8")),
]
DAILY_TILES = [("bfloat16", LARGEST, QKV, 1), ("int8", LARGEST, QKV, 1), ("bfloat16", MIDDLE, ADD, 4)]


@pytest.mark.parametrize(("dtype", "tile", "epilogue", "parts"), daily(TILES, DAILY_TILES))
def test_tiles_stay_in_registers(dtype, tile, epilogue, parts):
    kernel = gemm_kernel(dtype, tile, epilogue, parts)
    compiled = fitting(TILES_REGISTERS[tile], kernel, *gemm_arguments(dtype, epilogue))
    assert compiled.ptx.count("mma.sync") == 4 * tile.token_tiles * tile.panels  # those of a step, once
    assert "cp.async.cg.shared.global" in compiled.ptx


@pytest.mark.parametrize("tile", daily(FMA_TILES, [LARGEST_FMA_TILE]))
def test_four_lanes_share_the_sums_of_four_tokens_by_three_shuffles(tile):
    compiled = fitting(248, gemm_kernel("float32", tile, QKV), *gemm_arguments("float32", QKV))
    assert compiled.ptx.count("shfl.sync.bfly") == 3 * tile.lane_sums


# Every day, the activation with the most to fuse.
@pytest.mark.parametrize("epilogue", daily([ADD, LOGITS, QKV, *ACTIVATIONS], ["gelu_tanh"]))
def test_products_and_sums_are_fused_alike(epilogue):
    """The compiler may fuse a product and a sum, in the few-token kernel as in this one, or the bits would differ."""
    pair = linear_kernel("int8", 1, epilogue, 2), gemm_kernel("int8", SMALLEST, epilogue)
    arguments_of = linear_arguments, gemm_arguments
    few, many = (
        compile_kernel(kernel, *given("int8", epilogue)).ptx
        for kernel, given in zip(pair, arguments_of, strict=True)
    )
    for instruction in (r"\bfma\.r[nm]\.f32", r"\bmul\.(rn\.)?f32", r"\bdiv\.rn\.f32", r"\bex2\."):
        assert len(re.findall(instruction, many)) == ROWS_AT_ONCE * len(re.findall(instruction, few))


# A lane of attend_prefill holds queries, results and a block's scores, Dp / 4 + Dp / 2 + 32 registers, and 64 of loads.
TILE_REGISTERS = {("float32", 64): 128, ("float32", 128): 128, ("bfloat16", 64): 168, ("bfloat16", 128): 255}


ATTENTION = [
    (size, has_slopes, *cache) for size in (64, 128) for has_slopes in (False, True) for cache in CACHES
]
# With 64 dims, bfloat16's keys and values are shared by the warps of a block.
DAILY_ATTENTION = [(64, False, "bfloat16", False), *((128, False, *cache) for cache in CACHES)]


@pytest.mark.parametrize(("size", "has_slopes", "dtype", "is_int8"), daily(ATTENTION, DAILY_ATTENTION))
def test_attention_stays_in_registers(size, has_slopes, dtype, is_int8):
    for name, kernel_of in (("decode", attend_decode_kernel), ("prefill", attend_prefill_kernel)):
        limit = TILE_REGISTERS[dtype, size] + 8 * has_slopes if name == "prefill" else 112
        kernel = kernel_of(size, dtype, has_slopes, is_int8)
        compiled = fitting(limit, kernel, *attention_arguments(name, dtype, is_int8))
        assert "ld.global.v4" in compiled.ptx
        assert "ld.global.nc" not in compiled.ptx  # it may see values from before the wait
        # 16 a block of dims for keys and 16 for values; decode loops over more than two of the latter.
        loops = name == "decode" and size > 64 and not is_int8
        products = 16 * (size // 32 + (1 if loops else size // 32))
        is_shared = name == "prefill" and dtype == "bfloat16" and size <= WHOLE_SIZE and not is_int8
        assert ("cp.async.cg" in compiled.ptx) == is_shared
        assert compiled.shared_bytes <= 33 << 10  # three blocks on a multiprocessor, as by registers
        if is_shared:  # whole blocks have code of their own
            products *= 2
        assert compiled.ptx.count("mma.sync") == (products if dtype == "bfloat16" else 0)


def test_kernels_that_choose_tokens_stay_in_registers():
    assert compile_kernel(take_greatest, FLOATS, 5, INTS, INTS, LONGS, WORDS, INTS).registers <= 40
    drawing = compile_kernel(draw_tokens, *DRAW)
    assert drawing.shared_bytes <= 16 << 10
    assert drawing.ptx.count("fma.rn.f64") < 32  # few GPUs are fast at float64: one exponential, for a table
    compiled = compile_kernel(process_rows, *PROCESS)
    assert compiled.registers <= 64
    # A count times its penalty is rounded before it is subtracted.
    assert "mul.rn.f32" in compiled.ptx
    assert "fma.rn.f32" not in compiled.ptx
