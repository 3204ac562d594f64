"""Which instructions a CPU's tiles are made of, without such a CPU."""

import pytest
from llvmlite import binding

from support.tables import rows
from tinygpt.kernels.cpu.simd import targets
from tinygpt.kernels.cpu.simd.targets import TARGETS, arm_features, choose

# By LLVM's name a CPU's features, and the instructions for bfloat16, int8 and int4.
CPUS = rows("""
znver4          | avx2 fma avx512f avx512bw avx512vnni avx512bf16         | VDPBF16PS VPDPBUSD VPDPBUSD
znver5          | avx2 fma avx512f avx512bw avx512vnni avx512bf16 avxvnni | VDPBF16PS VPDPBUSD VPDPBUSD
sapphirerapids  | avx2 fma avx512f avx512bw avx512vnni avx512bf16 avxvnni | WIDENED VPDPBUSD VPDPBUSD
icelake-server  | avx2 fma avx512f avx512bw avx512vnni                    | WIDENED VPDPBUSD VPDPBUSD
skylake-avx512  | avx2 fma avx512f avx512bw                               | WIDENED VPMADDWD VPMADDUBSW
knl             | avx2 fma avx512f                                        | WIDENED VPMADDWD VPMADDUBSW
alderlake       | avx2 fma avxvnni                                        | WIDENED VPDPBUSD VPDPBUSD
znver3          | avx2 fma                                                | WIDENED VPMADDWD VPMADDUBSW
no such         | avx2                                                    | WIDENED VPMADDWD VPMADDWD
x86-64          |                                                         | WIDENED VPMADDWD VPMADDWD
neoverse-v1     | neon dotprod bf16 i8mm                                  | BFMLAL USMMLA USMMLA
no such         | neon dotprod bf16                                       | WIDENED SDOT SDOT
apple-m1        | neon dotprod                                            | WIDENED SDOT SDOT
cortex-a72      | neon                                                    | WIDENED VPMADDWD VPMADDWD
""")
AVX2 = {"avx2", "fma"}
VNNI = {*AVX2, "avx512f", "avx512bw", "avx512vnni"}


@pytest.mark.parametrize(("cpu", "features", "expected"), CPUS)
def test_a_cpu_gets_what_is_fastest_on_it(cpu, features, expected):
    target = choose(features.split().__contains__, cpu)
    found = target.bfloat16, target.int8, target.int4
    assert found == tuple(getattr(targets, name) for name in expected.split())


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


# By LLVM's names of ARM CPUs, with features that are added or taken away; instructions of i8mm are not dotprod's.

ARM = rows("""
aarch64-unknown-linux-gnu | neoverse-v1 |  | NEON BF16 I8MM
aarch64-unknown-linux-gnu | neoverse-v2 |  | NEON BF16 I8MM
aarch64-unknown-linux-gnu | neoverse-n2 |  | NEON BF16 I8MM
arm64-apple-darwin24 | apple-m2 |  | NEON BF16 I8MM
arm64-apple-darwin24 | apple-m4 |  | NEON BF16 I8MM
arm64-apple-darwin24 | apple-m1 |  | NEON DotProd
aarch64-unknown-linux-gnu | neoverse-n1 |  | NEON DotProd
aarch64-unknown-linux-gnu | cortex-a76 |  | NEON DotProd
aarch64-unknown-linux-gnu | cortex-a72 |  | NEON
aarch64-unknown-linux-gnu | generic |  | NEON
aarch64-unknown-linux-gnu | generic | +dotprod | NEON DotProd
aarch64-unknown-linux-gnu | generic | +i8mm | NEON
aarch64-unknown-linux-gnu | generic | +bf16 | NEON
aarch64-unknown-linux-gnu | generic | +dotprod,+bf16,+i8mm | NEON BF16 I8MM
aarch64-unknown-linux-gnu | neoverse-v1 | -bf16 | NEON DotProd
aarch64-unknown-linux-gnu | generic | -neon | what LLVM makes of 16 lanes
arm64-apple-darwin24 | apple-m2 | -i8mm | NEON DotProd
""")
KNOWN_SINCE = {"neoverse-v2": 16, "apple-m2": 16, "apple-m4": 20}  # by LLVM; it takes other names for no CPU


@pytest.fixture
def _code_generator():
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        binding.Target.from_triple("aarch64-unknown-linux-gnu")
    except RuntimeError:
        pytest.skip("this llvmlite compiles for no ARM CPU")


@pytest.mark.usefixtures("_code_generator")
@pytest.mark.parametrize(("triple", "cpu", "features", "expected"), ARM)
def test_an_arm_cpu_by_its_name_and_what_is_added_or_taken_away(triple, cpu, features, expected):
    if binding.llvm_version_info[0] < KNOWN_SINCE.get(cpu, 0):
        pytest.skip("LLVM does not know this CPU yet")
    assert choose(arm_features(triple, cpu, features).__contains__, cpu).name == expected
