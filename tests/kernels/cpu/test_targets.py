"""Which instructions a CPU's tiles are made of."""

import pytest

from tinygpt.kernels.cpu.simd.targets import (
    BYTES,
    DOTS,
    FOURS,
    LONGS,
    MATRICES,
    PAIRS,
    SHORTS,
    TARGETS,
    WIDENED,
    choose,
)

AVX2 = {"avx2", "fma"}
AVX512 = {*AVX2, "avx512f", "avx512bw"}
VNNI = {*AVX512, "avx512vnni"}
ZEN_4 = {*VNNI, "avx512bf16"}


@pytest.mark.parametrize(
    ("features", "cpu", "expected"),
    [
        (ZEN_4, "znver4", (PAIRS, FOURS, FOURS)),
        (ZEN_4 | {"avxvnni"}, "znver5", (PAIRS, FOURS, FOURS)),
        (ZEN_4 | {"avxvnni"}, "sapphirerapids", (WIDENED, FOURS, FOURS)),
        (VNNI, "icelake-server", (WIDENED, FOURS, FOURS)),
        (AVX512, "skylake-avx512", (WIDENED, SHORTS, BYTES)),
        ({*AVX2, "avx512f"}, "knl", (WIDENED, SHORTS, BYTES)),
        ({*AVX2, "avxvnni"}, "alderlake", (WIDENED, FOURS, FOURS)),
        (AVX2, "znver3", (WIDENED, SHORTS, BYTES)),
        ({"avx2"}, "no such", (WIDENED, SHORTS, SHORTS)),
        (set(), "x86-64", (WIDENED, SHORTS, SHORTS)),
        ({"neon", "dotprod", "bf16", "i8mm"}, "neoverse-v1", (LONGS, MATRICES, MATRICES)),
        ({"neon", "dotprod", "bf16"}, "no such", (WIDENED, DOTS, DOTS)),
        ({"neon", "dotprod"}, "apple-m1", (WIDENED, DOTS, DOTS)),
        ({"neon"}, "cortex-a72", (WIDENED, SHORTS, SHORTS)),
    ],
)
def test_a_cpu_gets_what_is_fastest_on_it(features, cpu, expected):
    target = choose(features.__contains__, cpu)
    assert (target.bfloat16, target.int8, target.int4) == expected


def test_vectors_are_as_wide_as_the_features_allow():
    sizes = {name: choose(has.__contains__, "").vector_bytes for name, has in (("512", VNNI), ("2", AVX2), ("", set()))}
    assert sizes == {"512": 64, "2": 32, "": 16}


def test_the_last_target_fits_any_cpu():
    assert not TARGETS[-1].features
    assert not TARGETS[-1].cpu
