"""Remove barriers, waits, groups of copies and products from kernels' PTX, one at a time.

`PYTHONPATH=.:tests python tests/support/ptx_mutations.py [KERNEL ...]` prints how many removals fail a test of each
kernel, and the others, with the line of the kernel's file.
"""

import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType

from support import cuda_compile, ptx_machine
from support.paths import ROOT
from support.ptx_code import read_ptx

MOST_PRODUCTS = 6  # of a kernel's mma, which are many, evenly chosen
REMOVED = re.compile(
    r"\s*(bar\.sync|bar\.warp\.sync|cp\.async\.wait_group|cp\.async\.commit_group|mma\.sync)"
)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tests/kernels/cuda/test_{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def check_draw_tokens() -> None:
    tests = load("sampling")
    for setting in (*tests.USUAL[:4], tests.USUAL[-1]):
        tests.test_tokens_and_filtered_scores_are_the_references(setting, 130)
    tests.test_of_tokens_tied_at_the_border_of_p_the_highest_ids_stay()


CHECKS = {
    "linear": lambda: load("linear").test_linear("add", 19, 8, 648, 2, "bfloat16"),
    "normed_linear": lambda: load("linear").test_the_fused_layer_norm_gives_the_same_bits("bfloat16", 7, 192),
    "gemm": lambda: [
        load("gemm").test_the_bits_are_those_of_the_linear_kernel("add", "bfloat16", *shape)
        for shape in ((65, 35, 136), (17, 19, 552))
    ],
    "attend_decode": lambda: load("attention").test_decode(1, 80, "bfloat16"),
    "attend_prefill": lambda: load("attention").test_a_mixed_step(1, 64, "bfloat16"),
    "take_greatest": lambda: load("sampling").test_the_greatest_logit_is_taken_as_by_the_reference(257),
    "draw_tokens": check_draw_tokens,
}


def mutants(ptx: str) -> Iterator[tuple[str, int, str]]:
    """Yield the instruction that is removed, the line of the kernel's file, and the PTX without it."""
    lines = ptx.split("\n")
    place = 0
    found = []
    for number, line in enumerate(lines):
        place = int(match[1]) if (match := re.match(r"\s*\.loc\s+\d+\s+(\d+)", line)) else place
        if removed := REMOVED.match(line):
            found.append((removed[1], place, number))
    products = [each for each in found if each[0] == "mma.sync"]
    kept = products[:: -(-len(products) // MOST_PRODUCTS)] if products else []
    for name, place, number in [each for each in found if each[0] != "mma.sync"] + kept:
        yield name, place, "\n".join([*lines[:number], replacement(lines[number]), *lines[number + 1 :]])


def replacement(line: str) -> str:
    """Return nothing, or for a product the sum that it was to be added to."""
    if "mma.sync" not in line:
        return ""
    groups = [group.split(",") for group in re.findall(r"\{([^}]*)\}", line)]
    return " ".join(
        f"mov.f32 {to.strip()}, {before.strip()};" for to, before in zip(groups[0], groups[3], strict=True)
    )


def try_kernel(name: str) -> None:
    program_of, seen = ptx_machine._program, []

    def note(kernel, *how):
        if kernel.py_func.__name__ == name and (kernel, *how) not in seen:
            seen.append((kernel, *how))
        return program_of(kernel, *how)

    ptx_machine._program = note
    CHECKS[name]()
    tried, noticed = Counter(), Counter()
    for removed, place, ptx in mutants(cuda_compile.linked_ptx(*seen[0])):
        mutant = read_ptx(ptx)
        ptx_machine._program = lambda *how, mutant=mutant: mutant if how == seen[0] else program_of(*how)
        tried[removed] += 1
        try:
            CHECKS[name]()
        except Exception:
            noticed[removed] += 1
        else:
            print(f"{name}, line {place}: the tests pass without a {removed}", flush=True)
    ptx_machine._program = program_of
    print(
        f"{name}: noticed",
        ", ".join(f"{noticed[kind]} of {count} {kind}" for kind, count in tried.items()),
        flush=True,
    )


if __name__ == "__main__":
    for each in sys.argv[1:] or CHECKS:
        try_kernel(each)
