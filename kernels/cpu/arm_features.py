"""What an ARM CPU can do, seen from which functions LLVM inlines into one that is compiled for it.

LLVM knows an ARM CPU's features by the CPU's name. It has no list to hand out, and the one that it makes of the machine
has a few features on Linux, and none on macOS. But it inlines no function that needs more than its caller has.
"""

import functools

from llvmlite import binding

FEATURES = ("neon", "dotprod", "i8mm", "bf16")  # in LLVM's spelling


@functools.cache
def arm_features(triple: str, cpu: str, features: str) -> frozenset[str]:
    """Which of FEATURES a 64-bit ARM CPU has: LLVM's name of it, and what it has besides ("+dotprod,-bf16").

    A version of LLVM that is older than the CPU may know less of it: tiles are slower then, with the same bits.
    LLVM's code generator for ARM must have been initialised.
    """
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features)
    callers = "".join(_caller(name, ",".join(filter(None, (features, f"+{name}")))) for name in FEATURES)
    module = binding.parse_assembly(f'target triple = "{triple}"\n{callers}')
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    return frozenset(name for name in FEATURES if not _calls(module.get_function(name)))


def _caller(feature: str, needed: str) -> str:
    """A function of the feature's name, which calls one that needs it."""
    return f"""
define float @needs_{feature}(float %x) "target-features"="{needed}" {{
  %y = fmul float %x, %x
  ret float %y
}}
define float @{feature}(float %x) {{
  %y = call float @needs_{feature}(float %x)
  ret float %y
}}
"""


def _calls(function: binding.ValueRef) -> bool:
    return any(instruction.opcode == "call" for block in function.blocks for instruction in block.instructions)
