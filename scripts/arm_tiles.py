"""What ARM's tiles should reach, where no ARM CPU is: LLVM's assembly of each, timed by LLVM's model of the core.

    python scripts/arm_tiles.py [--llvm-mca COMMAND] [--assembly FOLDER] [CPU ...]

Debian's package llvm-22 has the program; versions before 17 know no Neoverse V2. A model knows a core's units and their
latencies, and takes all memory for the L1 cache: the table is a prediction. For Apple's cores LLVM has the model of one
of 2013.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from llvmlite import binding, ir
from numba import types

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tinygpt.kernels.cpu.arm_features import arm_features  # noqa: E402

TRIPLE = "aarch64-unknown-linux-gnu"
CPUS = ("neoverse-v2", "neoverse-v1", "neoverse-n1", "apple-m1")
DTYPES = ("float32", "bfloat16", "int8", "int4")
# Multiplications that an instruction does.
FLOATS = {"fmla": 4, "bfmlalb": 4, "bfmlalt": 4}
INTEGERS = {"sdot": 16, "usdot": 16, "usmmla": 32}
PRODUCTS = {"float32": FLOATS, "bfloat16": FLOATS, "int8": INTEGERS, "int4": INTEGERS}
HEIGHTS = (6, 1)
COLUMNS = 64
PART_K = {"int8": 64, "int4": 32}  # of a sum of integers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "cpus", nargs="*", default=CPUS, metavar="CPU", help=f"LLVM's name (default: {', '.join(CPUS)})"
    )
    parser.add_argument("--llvm-mca", default="llvm-mca-22", metavar="COMMAND", help="(default: %(default)s)")
    parser.add_argument("--assembly", type=Path, metavar="FOLDER", help="write assembly there, and no table")
    parser.add_argument("--emit", help=argparse.SUPPRESS)  # in a process whose Numba compiles for this CPU
    given = parser.parse_args()
    initialise()
    if given.emit:
        print(json.dumps(assembly_of_all(given.emit)))
    elif given.assembly:
        for cpu in given.cpus:
            (given.assembly / cpu).mkdir(parents=True, exist_ok=True)
            for name, text in assembly_for(cpu).items():
                (given.assembly / cpu / f"{name}.s").write_text(text)
    else:
        print_table(given.cpus, given.llvm_mca)


def initialise() -> None:
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()


# Assembly.


def assembly_for(cpu: str) -> dict[str, str]:
    """Of each dtype's tile of 6 rows and of 1, "int8-6": the tiles of a CPU are chosen as they are imported."""
    features = ",".join(f"+{name}" for name in sorted(arm_features(TRIPLE, cpu, "")))
    environment = os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    command = [sys.executable, __file__, "--emit", cpu]
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def assembly_of_all(cpu: str) -> dict[str, str]:
    from tinygpt.kernels.cpu.simd.grouped_tiles import tile_int4, tile_int8
    from tinygpt.kernels.cpu.simd.tiles import panel_add

    tiles = {
        "float32": (panel_add, (types.float32[:, :],)),
        "bfloat16": (panel_add, (types.uint16[:, :],)),
        "int8": (tile_int8, ()),
        "int4": (tile_int4, ()),
    }
    return {f"{dtype}-{rows}": emit(*tiles[dtype], rows, cpu) for dtype in DTYPES for rows in HEIGHTS}


def emit(tile, like: tuple, rows: int, cpu: str) -> str:
    """The assembly of a tile of so many rows, optimised as Numba does it. All that `tile` takes beside `like` and
    the number of rows are ten addresses and sizes."""
    machine = binding.Target.from_triple(TRIPLE).create_target_machine(cpu=cpu, opt=3)
    word, module = ir.IntType(64), ir.Module("tile")
    module.triple, module.data_layout = TRIPLE, str(machine.target_data)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [word] * 10), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    signature, generate = tile._defn(None, *like, *[types.intp] * (10 if like else 11))
    places = function.args[: len(signature.args) - len(like) - 1]
    generate(NoContext(), builder, signature, [*[None for _ in like], ir.Constant(word, rows), *places])
    builder.ret_void()
    parsed = binding.parse_assembly(str(module))
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_assembly(parsed)


class NoContext:
    """In the place of Numba's, which a tile asks for nothing but a result."""

    def get_dummy_value(self) -> None:
        return None


# Loops.


@dataclass(frozen=True)
class Tile:
    """The instructions that a tile spends its time in, and how much they multiply."""

    instructions: list[str]
    products: int

    @property
    def spills(self) -> int:
        return sum("[sp" in line for line in self.instructions)


def tile_of(assembly: str, dtype: str, rows: int) -> Tile:
    """Of float32 and bfloat16 the innermost loop; of integers the loop around it, which folds their sums, too."""
    lines = lines_of(assembly)
    loops, products = loops_of(lines), PRODUCTS[dtype]
    innermost = [loop for loop in loops if not any(contains(loop, other) for other in loops)]
    first, last = max(innermost, key=lambda loop: count(lines[slice(*loop)], products))
    once = count(lines[first:last], products)
    if products is FLOATS:
        return Tile(code(lines[first:last]), once)
    # The inner loop is gone through until a part of K is multiplied by the columns that are taken at a time.
    wanted = [rows * COLUMNS // strips * PART_K[dtype] for strips in (1, 2, 4)]
    rounds = next(n for n in (1, 2, 4, 8, 16) if n * once in wanted)
    if rounds == 1:  # LLVM has unrolled it
        return Tile(code(lines[first:last]), once)
    start, stop = min((loop for loop in loops if contains(loop, (first, last))), key=lambda loop: loop[1] - loop[0])
    return Tile(code([*lines[start:first], *lines[first:last] * rounds, *lines[last:stop]]), rounds * once)


def lines_of(assembly: str) -> list[str]:
    """Labels and instructions."""
    lines = [line.split("//")[0].strip() for line in assembly.splitlines()]
    return [line for line in lines if line.endswith(":") or re.match(r"[a-z]", line)]


def loops_of(lines: list[str]) -> list[tuple[int, int]]:
    """Where each loop begins and ends: a jump back to a label."""
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    jumps = [(labels.get(re.split(r"[\s,]+", line)[-1], i), i + 1) for i, line in enumerate(lines) if line[0] in "bct"]
    return [(start, end) for start, end in jumps if start < end - 1]


def contains(loop: tuple[int, int], other: tuple[int, int]) -> bool:
    return loop != other and loop[0] <= other[0] and other[1] <= loop[1]


def code(lines: list[str]) -> list[str]:
    """Without labels and jumps."""
    return [line for line in lines if not line.endswith(":") and not re.match(r"(b|b\.\w+|cbn?z|tbn?z)\s", line)]


def count(lines: list[str], products: dict[str, int]) -> int:
    return sum(products.get(line.split()[0], 0) for line in lines)


# Times.


def print_table(cpus: list[str], llvm_mca: str) -> None:
    print("| CPU | dtype | multiplies by | multiplications a cycle, 6 rows | at most | | 1 row: bytes of B a cycle |")
    print("|---|---|---|---|---|---|---|")
    for cpu in cpus:
        assembly = assembly_for(cpu)
        for dtype in DTYPES:
            tall, lone = (tile_of(assembly[f"{dtype}-{rows}"], dtype, rows) for rows in HEIGHTS)
            products = PRODUCTS[dtype]
            multiplications = [line for line in tall.instructions if line.split()[0] in products]
            name = multiplications[-1].split()[0]
            rate = tall.products / cycles(tall.instructions, cpu, llvm_mca)
            most = tall.products / cycles(multiplications, cpu, llvm_mca)
            read = lone.products * BYTES[dtype] / cycles(lone.instructions, cpu, llvm_mca)
            print(f"| {cpu} | {dtype} | `{name}` | {rate:.1f} | {most:.0f} | {rate / most:.0%} | {read:.0f} |")


BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 0.5}  # of a weight


def cycles(instructions: list[str], cpu: str, llvm_mca: str, iterations: int = 50) -> float:
    """Of one round of these instructions, which follow one another without end."""
    with tempfile.NamedTemporaryFile("w", suffix=".s") as file:
        file.write("\n".join(instructions) + "\n")
        file.flush()
        command = [llvm_mca, f"-mtriple={TRIPLE}", f"-mcpu={cpu}", f"-iterations={iterations}", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(re.search(r"Total Cycles:\s+(\d+)", report)[1]) / iterations


if __name__ == "__main__":
    main()
