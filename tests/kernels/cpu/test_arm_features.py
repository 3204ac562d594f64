"""Which of the table's rows an ARM CPU gets, by LLVM's name of it, without such a CPU."""

import pytest
from llvmlite import binding

from tinygpt.kernels.cpu.simd.targets import arm_features, choose

LINUX, MACOS = "aarch64-unknown-linux-gnu", "arm64-apple-darwin24"
NEWER, NEW, OLD, NONE = "NEON BF16 I8MM", "NEON DotProd", "NEON", "what LLVM makes of 16 lanes"
KNOWN_SINCE = {"neoverse-v2": 16, "apple-m2": 16, "apple-m4": 20}  # by LLVM; it takes other names for no CPU


@pytest.fixture(autouse=True)
def _code_generator():
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        binding.Target.from_triple(LINUX)
    except RuntimeError:
        pytest.skip("this llvmlite compiles for no ARM CPU")


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
def test_a_cpu_by_its_name_and_what_is_added_or_taken_away(triple, cpu, features, expected):
    if binding.llvm_version_info[0] < KNOWN_SINCE.get(cpu, 0):
        pytest.skip("LLVM does not know this CPU yet")
    assert choose(arm_features(triple, cpu, features).__contains__, cpu).name == expected
