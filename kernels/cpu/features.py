"""The features of the CPU that kernels are compiled for.

LLVM has no list of an ARM CPU's features: it knows them by the CPU's name, and its list of the machine's is short on
Linux and empty on macOS. But it inlines no function that needs more features than its caller has.
"""

import functools
import platform

from llvmlite import binding
from numba.core import config

ARM_FEATURES = ("neon", "dotprod", "i8mm", "bf16")  # in LLVM's spelling


def has_feature(name: str) -> bool:
    """Return whether Numba compiles for a CPU with this feature, in LLVM's spelling ("avx512f").

    NUMBA_CPU_FEATURES chooses other features than the machine's, and NUMBA_ENABLE_AVX=0 takes some away.
    """
    if platform.machine() in ("aarch64", "arm64", "ARM64"):
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        features = config.CPU_FEATURES
        if features is None:
            features = binding.get_host_cpu_features().flatten()
        return name in arm_features(binding.get_process_triple(), target_cpu(), features)
    if config.CPU_FEATURES is not None:
        return f"+{name}" in config.CPU_FEATURES.split(",")
    if name.startswith("avx") and not config.ENABLE_AVX:
        return False
    return binding.get_host_cpu_features().get(name, False)


def target_cpu() -> str:
    """Return LLVM's name of the CPU that Numba compiles for."""
    return config.CPU_NAME or binding.get_host_cpu_name()


@functools.cache
def arm_features(triple: str, cpu: str, features: str) -> frozenset[str]:
    """Return which of ARM_FEATURES a 64-bit ARM CPU has: LLVM's name of it and further features ("+dotprod,-bf16").

    An LLVM older than the CPU may know fewer: tiles are slower then, with the same bits. Needs LLVM's initialized code
    generator for ARM.
    """
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features)
    callers = "".join(_caller(name, ",".join(filter(None, (features, f"+{name}")))) for name in ARM_FEATURES)
    module = binding.parse_assembly(f'target triple = "{triple}"\n{callers}')
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    return frozenset(name for name in ARM_FEATURES if not _calls(module.get_function(name)))


def _caller(feature: str, needed: str) -> str:
    """Return a function of the feature's name, which calls a function that needs the feature."""
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
