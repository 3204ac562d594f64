"""scripts/arm_tiles.py: what LLVM makes of ARM's tiles, which fit the registers; and what it reads from assembly."""

import functools

import pytest
from llvmlite import binding

from scripts import arm_tiles

BY_CPU = {  # what multiplies in 6 rows and in 1
    "neoverse-v1": {
        "float32": ("fmla", "fmla"),
        "bfloat16": ("bfmlalt", "bfmlalt"),
        "int8": ("usmmla", "usdot"),
        "int4": ("usmmla", "usdot"),
    },
    "apple-m1": {
        "float32": ("fmla", "fmla"),
        "bfloat16": ("fmla", "fmla"),
        "int8": ("sdot", "sdot"),
        "int4": ("sdot", "sdot"),
    },
}
STRIP = 16  # columns that 6 rows take at a time


@pytest.fixture(autouse=True)
def _code_generator():
    arm_tiles.initialise()
    try:
        binding.Target.from_triple(arm_tiles.TRIPLE)
    except RuntimeError:
        pytest.skip("this llvmlite compiles for no ARM CPU")


# Each compiles for some seconds. Every day the one whose instructions are the most special.
CPUS = pytest.mark.parametrize("cpu", ["neoverse-v1", pytest.param("apple-m1", marks=pytest.mark.slow)])


@functools.cache
def tiles(cpu):
    found = arm_tiles.assembly_for(cpu)
    return {name: arm_tiles.tile_of(text, *name.split("-")[:1], int(name[-1])) for name, text in found.items()}


@CPUS
@pytest.mark.parametrize("dtype", arm_tiles.DTYPES)
def test_a_tile_multiplies_by_the_instruction_of_its_target(cpu, dtype):
    for rows, expected in zip(arm_tiles.HEIGHTS, BY_CPU[cpu][dtype], strict=True):
        words = {line.split()[0] for line in tiles(cpu)[f"{dtype}-{rows}"].instructions}
        assert words & set(arm_tiles.PRODUCTS[dtype]) - {"bfmlalb"} == {expected}


@pytest.mark.skipif(binding.llvm_version_info < (22,), reason="LLVM 15 and 20 keep some on the stack")
@CPUS
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_tile_keeps_its_sums_in_registers(cpu, dtype):
    """And broadcasts nothing: a lane multiplies."""
    tile = tiles(cpu)[f"{dtype}-6"]
    assert tile.spills == 0
    assert not [line for line in tile.instructions if line.startswith("ld1r")]
    k = {"float32": 4, "int8": 64}[dtype]
    assert tile.products == 6 * STRIP * k


@CPUS
@pytest.mark.parametrize("dtype", arm_tiles.DTYPES)
def test_tiles_ask_ahead_into_the_l2_cache(cpu, dtype):
    """L1 has no place for a chunk beside the one that several rows multiply, and waits for few lines at a time."""
    for rows in arm_tiles.HEIGHTS:
        asked = {line.split()[1] for line in tiles(cpu)[f"{dtype}-{rows}"].instructions if line.startswith("prfm")}
        assert asked == {"pldl2keep,"}


LOOPS = """
tile:
.LBB0_1:
    mov x1, xzr
.LBB0_2:
    ldr q0, [x1]
    sdot v1.4s, v0.16b, v2.4b[0]
    b.ne .LBB0_2
    str q1, [sp, #16] // 16-byte spill
    cbnz x2, .LBB0_1
    ret
"""


def test_loops_and_what_they_multiply():
    lines = arm_tiles.lines_of(LOOPS)
    inner, outer = (3, 7), (1, 9)
    assert sorted(arm_tiles.loops_of(lines)) == sorted([inner, outer])
    assert arm_tiles.contains(outer, inner)
    assert not arm_tiles.contains(inner, outer)
    assert arm_tiles.count(lines, arm_tiles.INTEGERS) == 16
    assert arm_tiles.code(lines[slice(*inner)]) == ["ldr q0, [x1]", "sdot v1.4s, v0.16b, v2.4b[0]"]
