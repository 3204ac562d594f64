"""What the machine could do: the rate of the tiles and the bandwidth of its memory."""

import numpy as np
import pytest

from tinygpt.bench import machine_limits as limits
from tinygpt.bench.machine_limits import MachineLimits
from tinygpt.kernels.cpu.simd import peak
from tinygpt.kernels.cpu.simd.tiles import PANEL, TILE_ROWS


def test_limits_are_of_the_dtypes_tiles(monkeypatch):
    rates = {"int4": 3.0, "int8": 5.0}
    monkeypatch.setattr(limits, "tile_rate", lambda kind, threads: rates[kind] * threads)
    monkeypatch.setattr(limits, "read_bandwidth", lambda threads: 7.0)
    assert limits.measure_limits("int4", 2) == MachineLimits(7.0, {"int4": 6.0, "int8": 10.0})


def test_dtypes_with_a_tile_in_common_have_one_limit_of_it():
    of_int4, of_int8 = MachineLimits(9, {"int4": 2, "int8": 5}), MachineLimits(7, {"int8": 4})
    of_float32 = MachineLimits(8, {"float32": 1})
    for found in (of_int4.best(of_int8).best(of_float32), of_float32.best(of_int8).best(of_int4)):
        assert found == MachineLimits(9, {"int4": 2, "int8": 5, "float32": 1})


def test_the_tile_loop_multiplies():
    run, _, make_arguments = peak.LOOPS["float32"]
    a, b, c = make_arguments(8)
    run(a, b, c, 2)
    expected = 2 * (a.astype(float) @ b.reshape(8, PANEL).astype(float))
    assert a.shape == (TILE_ROWS, 8)
    np.testing.assert_allclose(c, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", peak.LOOPS)
def test_rate_of_tiles(kind, monkeypatch):
    clock = iter([0.0, 4.0, 4.0, 6.0])
    monkeypatch.setattr(peak.time, "perf_counter", lambda: next(clock))
    rows = peak.LOOPS[kind][1]
    assert peak.tile_rate(kind, 3, repetitions=2, tiles=5) == 3 * 5 * 2 * rows * PANEL * peak.K[kind] / 2.0
