"""What an ARM CPU can do, seen from what LLVM makes of three functions for it.

LLVM knows an ARM CPU's features by the CPU's name. It has no list to hand out, and the one that it makes of the machine
has a few features on Linux, and none on macOS.
"""

import functools

from llvmlite import binding

# By which instruction, or which registers, LLVM shows that it knows of a feature. macOS has its own way to write them.
SHOWN_BY = {"neon": ".4s", "dotprod": "sdot", "i8mm": "usdot", "bf16": "bfcvtn"}
SAMPLES = """
declare <4 x i32> @llvm.vector.partial.reduce.add.v4i32.v16i32(<4 x i32>, <16 x i32>)
define <4 x float> @neon(<4 x float> %a) {
  %sum = fadd <4 x float> %a, %a
  ret <4 x float> %sum
}
define <4 x i32> @dotprod(<4 x i32> %sum, <16 x i8> %a, <16 x i8> %b) {
  %x = sext <16 x i8> %a to <16 x i32>
  %y = sext <16 x i8> %b to <16 x i32>
  %products = mul <16 x i32> %x, %y
  %new = call <4 x i32> @llvm.vector.partial.reduce.add.v4i32.v16i32(<4 x i32> %sum, <16 x i32> %products)
  ret <4 x i32> %new
}
define <4 x i32> @i8mm(<4 x i32> %sum, <16 x i8> %a, <16 x i8> %b) {
  %x = sext <16 x i8> %a to <16 x i32>
  %y = zext <16 x i8> %b to <16 x i32>
  %products = mul <16 x i32> %x, %y
  %new = call <4 x i32> @llvm.vector.partial.reduce.add.v4i32.v16i32(<4 x i32> %sum, <16 x i32> %products)
  ret <4 x i32> %new
}
define <4 x bfloat> @bf16(<4 x float> %a) {
  %rounded = fptrunc <4 x float> %a to <4 x bfloat>
  ret <4 x bfloat> %rounded
}
"""


@functools.cache
def arm_features(triple: str, cpu: str, features: str) -> frozenset[str]:
    """Which of SHOWN_BY a 64-bit ARM CPU has: LLVM's name of it, and what it has besides ("+dotprod,-bf16").

    LLVM's code generator for ARM must have been initialised.
    """
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=2)
    assembly = machine.emit_assembly(binding.parse_assembly(f'target triple = "{triple}"\n{SAMPLES}'))
    return frozenset(name for name, instruction in SHOWN_BY.items() if instruction in assembly)
