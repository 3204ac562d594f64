"""The instructions of the tiles, by the features of the CPU that Numba compiles for. All but AMX give the same bits.

LLVM does not list an ARM CPU's features, but inlines no function that needs a feature its caller lacks.
"""

import ctypes
import functools
import logging
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import binding

logger = logging.getLogger(__name__)
OF_THE_CPU = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX")
ARM_FEATURES = ("neon", "dotprod", "i8mm", "bf16")  # in LLVM's spelling


@dataclass(frozen=True)
class Settings:
    """What Numba is told of the CPU."""

    cpu: str | None = None
    features: str | None = None
    enables_avx: bool = True


def settings() -> Settings:
    """Return NUMBA_* or its file's settings. Numba, which is slow to import, is asked if there may be any."""
    # Path.is_file raises in a folder that this user may not search.
    if not (os.path.isfile(".numba_config.yaml") or any(map(os.environ.__contains__, OF_THE_CPU))):
        return Settings()
    from numba.core import config

    return Settings(config.CPU_NAME, config.CPU_FEATURES, bool(config.ENABLE_AVX))


def has_feature(name: str) -> bool:
    """Return whether Numba compiles for a feature in LLVM's spelling; NUMBA_* may change features."""
    if platform.machine() in ("aarch64", "arm64", "ARM64"):
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        features = settings().features
        if features is None:
            features = binding.get_host_cpu_features().flatten()
        return name in arm_features(binding.get_process_triple(), target_cpu(), features)
    told = settings()
    if told.features is not None:
        is_there = f"+{name}" in told.features.split(",")
    else:
        is_there = binding.get_host_cpu_features().get(name, False)
        is_there &= told.enables_avx or not name.startswith(("avx", "amx"))
    return is_there and (not name.startswith("amx") or may_use_amx())


@functools.cache
def may_use_amx() -> bool:
    """Ask Linux for AMX's registers."""
    arch_prctl = 158
    permission = 0x1023
    registers = 18
    if sys.platform == "linux" and ctypes.CDLL(None).syscall(arch_prctl, permission, registers) == 0:
        return True
    logger.info("the system refuses AMX: bfloat16 has the bits of CPUs without it, and is slower")
    return False


def target_cpu() -> str:
    return settings().cpu or binding.get_host_cpu_name()


@functools.cache
def arm_features(triple: str, cpu: str, features: str) -> frozenset[str]:
    """Return which of ARM_FEATURES a 64-bit ARM CPU of LLVM's name `cpu` has.

    features: changes to the CPU's, such as "+dotprod,-bf16". Needs LLVM's initialized code generator for ARM.
    """
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features)
    callers = "".join(_caller(name, ",".join(filter(None, (features, f"+{name}")))) for name in ARM_FEATURES)
    module = binding.parse_assembly(f'target triple = "{triple}"\n{callers}')
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    return frozenset(name for name in ARM_FEATURES if not _calls(module.get_function(name)))


def _caller(feature: str, needed: str) -> str:
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
    return any(
        instruction.opcode == "call" for block in function.blocks for instruction in block.instructions
    )


VDPBF16PS = "vdpbf16ps"  # two bfloat16
BFMLAL = "bfmlalt, bfmlalb"  # fused multiply-adds in turn, which know denormals
WIDENED = "two multiply-adds"  # in float32: the same bits, as each product is exact
VPDPBUSD = "vpdpbusd"  # four bytes into an int32
VPMADDWD = "vpmaddwd"  # two int16 into an int32
VPMADDUBSW = "vpmaddubsw"  # two bytes into an int16: eight steps of nibbles cannot overflow
SDOT = "sdot"  # four bytes into an int32, both sides signed
USMMLA = "usmmla"  # two columns by two rows of eight bytes into four int32; a lone row: usdot
SINGLES = "multiply-adds"  # of float32
# Products for 32 bits of a register.
PRODUCTS = {
    SINGLES: 1,
    VDPBF16PS: 2,
    BFMLAL: 1,
    WIDENED: 1,
    VPDPBUSD: 4,
    VPMADDWD: 2,
    VPMADDUBSW: 4,
    SDOT: 4,
    USMMLA: 8,
}


@dataclass(frozen=True)
class Target:
    name: str
    features: tuple[str, ...]
    cpu: str  # a prefix of LLVM's name of the CPU
    vector_bytes: int
    registers: int
    bfloat16: str
    int8: str
    int4: str

    @property
    def is_neon(self) -> bool:
        return "neon" in self.features

    @property
    def has_amx(self) -> bool:
        return "amx-bf16" in self.features

    @property
    def splits_vectors(self) -> bool:
        """Whether a vector takes two turns of a unit, as 512 bits do on Zen 4."""
        return self.vector_bytes == 64 and self.cpu == "znver"

    @property
    def multiplies_bfloat16(self) -> bool:
        return self.bfloat16 in (VDPBF16PS, BFMLAL)

    @property
    def packs_bfloat16(self) -> bool:
        """Whether the left side of a matrix product is pairs of bfloat16."""
        return self.has_amx or self.multiplies_bfloat16

    @property
    def int8_cache(self) -> str:
        """The product for an int8 KV cache. ARM's own are not among them."""
        return VPDPBUSD if self.int8 == VPDPBUSD else VPMADDWD

    @property
    def steps(self) -> dict[str, str]:
        """Return the product of each dtype's tiles."""
        return {
            "float32": SINGLES,
            "float16": SINGLES,
            "bfloat16": self.bfloat16,
            "int8": self.int8,
            "int4": self.int4,
            "int8 KV cache": self.int8_cache,
        }

    @property
    def widens_float16(self) -> bool:
        """Whether an instruction converts float16: F16C's, which AVX-512 has, or NEON's."""
        return self.is_neon or self.vector_bytes == 64 or (self.vector_bytes == 32 and has_feature("f16c"))


# The first that fits is used. On Intel vdpbf16ps takes as long as two multiply-adds. ARM's bfdot and bfmmla round
# differently.
TARGETS = (
    Target("AVX-512 BF16 VNNI", ("avx512bf16", "avx512vnni"), "znver", 64, 32, VDPBF16PS, VPDPBUSD, VPDPBUSD),
    Target("AMX", ("amx-bf16", "amx-int8", "avx512vnni"), "", 64, 32, WIDENED, VPDPBUSD, VPDPBUSD),
    Target("AVX-512 VNNI", ("avx512vnni",), "", 64, 32, WIDENED, VPDPBUSD, VPDPBUSD),
    Target("AVX-512", ("avx512bw",), "", 64, 32, WIDENED, VPMADDWD, VPMADDUBSW),
    Target("AVX2 VNNI", ("avx2", "fma", "avxvnni"), "", 32, 16, WIDENED, VPDPBUSD, VPDPBUSD),
    Target("AVX2", ("avx2", "fma"), "", 32, 16, WIDENED, VPMADDWD, VPMADDUBSW),
    Target("NEON BF16 I8MM", ("neon", "bf16", "i8mm"), "", 16, 32, BFMLAL, USMMLA, USMMLA),
    Target("NEON DotProd", ("neon", "dotprod"), "", 16, 32, WIDENED, SDOT, SDOT),
    Target("NEON", ("neon",), "", 16, 32, WIDENED, VPMADDWD, VPMADDWD),
    Target("what LLVM makes of 16 lanes", (), "", 16, 16, WIDENED, VPMADDWD, VPMADDWD),
)


def choose(has: Callable[[str], bool], cpu: str) -> Target:
    return next(t for t in TARGETS if all(map(has, t.features)) and cpu.startswith(t.cpu))


TARGET = choose(has_feature, target_cpu())
