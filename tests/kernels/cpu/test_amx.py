"""AMX's tiles to the bit, on a CPU that has them; and a system that refuses their registers."""

from types import SimpleNamespace

import numpy as np
import pytest

from support.kernel_tools import (
    as_float32,
    operand_of,
    packed,
    random_values,
    same_bits,
    solo_team,
    unwritten,
)
from tinygpt.kernels.cpu import compiler
from tinygpt.kernels.cpu.arrays import NO_FACTORS
from tinygpt.kernels.cpu.dtypes import LEAST_AMX
from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.layers.activations import NONE
from tinygpt.kernels.cpu.layers.linear import REPLACE, Linear, linear, whole
from tinygpt.kernels.cpu.simd import amx_tiles, targets
from tinygpt.kernels.cpu.simd.grouped_tiles import tile_int8
from tinygpt.kernels.cpu.simd.targets import TARGETS
from tinygpt.kernels.cpu.simd.tiles import OUT_TILE, ROW_TILE
from tinygpt.kernels.cpu.simd.vector_ir import SCALE_GROUP, address

F32 = np.float32
needs_amx = pytest.mark.skipif(
    not targets.TARGET.has_amx, reason="this CPU has no AMX, or the system refuses it"
)
ROWS = (1, 5, 16, 17, 33, 48)


@jit
def pairs_tile(rows, a, b, c):
    amx_tiles.amx_bfloat16(rows, address(a), a.shape[1] * 2, address(b), a.shape[1] // 2, address(c))


@jit
def bytes_tile(rows, a, scales, b, c):
    lda, lds = a.shape[1], scales.shape[1] * 16
    amx_tiles.amx_int8(rows, address(a), lda, address(scales), lds, address(b), scales.shape[1], address(c))


@jit
def vnni_tiles(rows, a, scales, b, c):
    lda = a.shape[1]
    lds = scales.shape[1] * 16
    start = address(b)
    for row in range(0, rows, ROW_TILE):
        x = address(a) + row * lda
        s = address(scales) + row * lds
        total = address(c) + row * OUT_TILE * 4
        tile_int8(min(ROW_TILE, rows - row), x, lda, s, lds, start, start, scales.shape[1], total, start, 64)


def in_amx_order(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """c (M, N) + a (M, K) @ b (N, K).T, by blocks of 32 of K: a chain of the even k and one of the odd."""
    # A product and a sum are rounded once.
    a, b = (x.astype(np.longdouble).reshape(len(x), 1, -1, 2) for x in (a, b))
    for first in range(0, a.shape[2], 16):
        even_odd = np.zeros((2, *c.shape), F32)
        for k in range(first, min(first + 16, a.shape[2])):
            even_odd = np.stack([a[:, :, k, i] * b[:, 0, k, i] + even_odd[i] for i in (0, 1)]).astype(F32)
        c = c + even_odd.sum(0)
    return c


@needs_amx
@pytest.mark.parametrize("k", [2, 30, 32, 192, 194, 420])
@pytest.mark.parametrize("rows", ROWS)
def test_a_tile_of_bfloat16(rows, k):
    x = operand_of(random_values(rows, k), "bfloat16")
    weight = packed(random_values(OUT_TILE, k, seed=1), "bfloat16")
    c = unwritten(rows + 1, OUT_TILE)
    c[:rows] = random_values(rows, OUT_TILE, seed=2)
    columns = as_float32(weight.panels[0, 0]).transpose(1, 0, 2).reshape(OUT_TILE, k)
    expected = in_amx_order(as_float32(x.values), columns, c[:rows])
    pairs_tile(rows, x.values, weight.panels, c)
    same_bits(c[:rows], expected)
    assert np.isnan(c[rows]).all()


@needs_amx
@pytest.mark.parametrize("groups", [1, 6, 7, 13])
@pytest.mark.parametrize("rows", ROWS)
def test_a_tile_of_int8_is_that_of_vnni(rows, groups):
    k = groups * SCALE_GROUP
    (found, expected) = (unwritten(rows + 1, OUT_TILE) for _ in range(2))
    x = operand_of(random_values(rows, k), "int8")
    weight = packed(random_values(OUT_TILE, k, seed=1), "int8")
    for c, tile in ((found, bytes_tile), (expected, vnni_tiles)):
        c[:rows] = random_values(rows, OUT_TILE, seed=2)
        tile(rows, x.values, x.scales, weight.panels, c)
    same_bits(found, expected)


@pytest.mark.parametrize(("enabled", "expected"), [(1, "AVX-512 VNNI"), (0, TARGETS[-1].name)])
def test_without_its_registers_amx_is_not_taken(monkeypatch, caplog, enabled, expected):
    caplog.set_level("INFO")
    features = dict.fromkeys(("amx-bf16", "amx-int8", "avx512vnni"), True)
    monkeypatch.setattr(targets, "platform", SimpleNamespace(machine=lambda: "x86_64"))
    monkeypatch.setattr(targets, "sys", SimpleNamespace(platform="win32"))
    monkeypatch.setattr(targets, "settings", lambda: targets.Settings(enables_avx=enabled))
    monkeypatch.setattr(targets, "binding", SimpleNamespace(get_host_cpu_features=lambda: features))
    monkeypatch.setattr(targets, "may_use_amx", targets.may_use_amx.__wrapped__)
    assert targets.choose(targets.has_feature, "sapphirerapids").name == expected
    told = "the system refuses AMX: bfloat16 has the bits of CPUs without it, and is slower"
    assert caplog.messages == [told] * enabled  # it is not asked for what is not enabled
    monkeypatch.setattr(targets, "may_use_amx", lambda: True)
    assert targets.choose(targets.has_feature, "sapphirerapids").name == ("AMX" if enabled else expected)


def test_a_process_that_is_refused_amx_loads_no_kernels_that_use_it(monkeypatch):
    known = set()
    for target in TARGETS:
        monkeypatch.setattr(compiler, "TARGET", target)
        known.add(str(compiler.build()))
    assert len(known) == len(TARGETS)


@needs_amx
@pytest.mark.parametrize("rows", [1, 3])
def test_few_rows_of_int8_have_the_bits_that_they_have_among_more(rows):
    weight = Linear(
        packed(random_values(OUT_TILE, 130), "int8"), random_values(1, OUT_TILE, seed=1), NO_FACTORS
    )
    found = []
    for count in (rows, LEAST_AMX):
        x = operand_of(random_values(LEAST_AMX, 130, seed=2)[:count], "int8")
        out = unwritten(count, OUT_TILE)
        linear(solo_team(), out, x, weight, np.int64(0), whole(130), NONE, REPLACE)
        found.append(out[:rows])
    same_bits(*found)
