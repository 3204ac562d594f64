"""Which instructions a CPU's tiles are made of, without such a CPU."""

import pytest
from llvmlite import binding

from tinygpt.kernels.cpu.simd import targets
from tinygpt.kernels.cpu.simd.targets import (
    BFMLAL,
    SDOT,
    TARGETS,
    USMMLA,
    VDPBF16PS,
    VPDPBUSD,
    VPMADDUBSW,
    VPMADDWD,
    WIDENED,
    arm_features,
    choose,
)

AVX2 = {"avx2", "fma"}
AVX512 = {*AVX2, "avx512f", "avx512bw"}
VNNI = {*AVX512, "avx512vnni"}
ZEN_4 = {*VNNI, "avx512bf16"}


@pytest.mark.parametrize(
    ("features", "cpu", "expected"),
    [
        (ZEN_4, "znver4", (VDPBF16PS, VPDPBUSD, VPDPBUSD)),
        (ZEN_4 | {"avxvnni"}, "znver5", (VDPBF16PS, VPDPBUSD, VPDPBUSD)),
        (ZEN_4 | {"avxvnni"}, "sapphirerapids", (WIDENED, VPDPBUSD, VPDPBUSD)),
        (VNNI, "icelake-server", (WIDENED, VPDPBUSD, VPDPBUSD)),
        (AVX512, "skylake-avx512", (WIDENED, VPMADDWD, VPMADDUBSW)),
        ({*AVX2, "avx512f"}, "knl", (WIDENED, VPMADDWD, VPMADDUBSW)),
        ({*AVX2, "avxvnni"}, "alderlake", (WIDENED, VPDPBUSD, VPDPBUSD)),
        (AVX2, "znver3", (WIDENED, VPMADDWD, VPMADDUBSW)),
        ({"avx2"}, "no such", (WIDENED, VPMADDWD, VPMADDWD)),
        (set(), "x86-64", (WIDENED, VPMADDWD, VPMADDWD)),
        ({"neon", "dotprod", "bf16", "i8mm"}, "neoverse-v1", (BFMLAL, USMMLA, USMMLA)),
        ({"neon", "dotprod", "bf16"}, "no such", (WIDENED, SDOT, SDOT)),
        ({"neon", "dotprod"}, "apple-m1", (WIDENED, SDOT, SDOT)),
        ({"neon"}, "cortex-a72", (WIDENED, VPMADDWD, VPMADDWD)),
    ],
)
def test_a_cpu_gets_what_is_fastest_on_it(features, cpu, expected):
    target = choose(features.__contains__, cpu)
    assert (target.bfloat16, target.int8, target.int4) == expected


def test_amx_is_taken_for_bfloat16_and_int8_together():
    chosen = [
        choose((VNNI | amx).__contains__, "") for amx in ({"amx-bf16", "amx-int8"}, {"amx-int8"}, set())
    ]
    assert [target.has_amx for target in chosen] == [True, False, False]


def test_vectors_are_as_wide_as_the_features_allow():
    sizes = {
        name: choose(has.__contains__, "").vector_bytes
        for name, has in (("512", VNNI), ("2", AVX2), ("", set()))
    }
    assert sizes == {"512": 64, "2": 32, "": 16}


def test_float16_needs_an_instruction_that_widens_it(monkeypatch):
    monkeypatch.setattr(targets, "has_feature", lambda name: False)
    assert {t.name for t in TARGETS if not t.widens_float16} == {"AVX2", "AVX2 VNNI", TARGETS[-1].name}
    monkeypatch.setattr(targets, "has_feature", "f16c".__eq__)
    assert {t.name for t in TARGETS if not t.widens_float16} == {TARGETS[-1].name}


def test_the_last_target_fits_any_cpu():
    assert not TARGETS[-1].features
    assert not TARGETS[-1].cpu


# By LLVM's names of ARM CPUs.

LINUX = "aarch64-unknown-linux-gnu"
MACOS = "arm64-apple-darwin24"
NEWER = "NEON BF16 I8MM"
NEW = "NEON DotProd"
OLD = "NEON"
NONE = "what LLVM makes of 16 lanes"
KNOWN_SINCE = {"neoverse-v2": 16, "apple-m2": 16, "apple-m4": 20}  # by LLVM; it takes other names for no CPU


@pytest.fixture
def _code_generator():
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        binding.Target.from_triple(LINUX)
    except RuntimeError:
        pytest.skip("this llvmlite compiles for no ARM CPU")


@pytest.mark.usefixtures("_code_generator")
@pytest.mark.parametrize(
    ("triple", "cpu", "features", "expected"),
    [
        (LINUX, "neoverse-v1", "", NEWER),
        (LINUX, "neoverse-v2", "", NEWER),
        (LINUX, "neoverse-n2", "", NEWER),
        (MACOS, "apple-m2", "", NEWER),
        (MACOS, "apple-m4", "", NEWER),
        (MACOS, "apple-m1", "", NEW),
        (LINUX, "neoverse-n1", "", NEW),
        (LINUX, "cortex-a76", "", NEW),
        (LINUX, "cortex-a72", "", OLD),
        (LINUX, "generic", "", OLD),
        (LINUX, "generic", "+dotprod", NEW),
        (LINUX, "generic", "+i8mm", OLD),  # its instructions are not dotprod's
        (LINUX, "generic", "+bf16", OLD),
        (LINUX, "generic", "+dotprod,+bf16,+i8mm", NEWER),
        (LINUX, "neoverse-v1", "-bf16", NEW),
        (LINUX, "generic", "-neon", NONE),
        (MACOS, "apple-m2", "-i8mm", NEW),
    ],
)
def test_an_arm_cpu_by_its_name_and_what_is_added_or_taken_away(triple, cpu, features, expected):
    if binding.llvm_version_info[0] < KNOWN_SINCE.get(cpu, 0):
        pytest.skip("LLVM does not know this CPU yet")
    assert choose(arm_features(triple, cpu, features).__contains__, cpu).name == expected
