"""The one place that declares how kernels are compiled, and where their machine code is kept.

The cache lives in a folder named by everything that decides the machine code, all kernel sources included, so kernels
may be split over files freely and an upgrade can never meet old code.
"""

import functools
import os
import platform
import sys
from pathlib import Path

import llvmlite
import numba
import numpy as np
from llvmlite import binding
from numba.core import config, event
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock

from tinygpt.kernels import compiling
from tinygpt.kernels.cache_folder import CacheFolder, find_folder, fingerprint_of
from tinygpt.kernels.cpu.arm_features import arm_features
from tinygpt.kernels.cpu.disk_cache import SOURCES, DiskCache
from tinygpt.kernels.cpu.parts import KernelCompiler, PartCompiler
from tinygpt.kernels.kernel_files import MAGIC, KernelFiles

# NUMBA_* variables that do not change the machine code. Any other one starts a cache of its own:
# a needless compilation is slow, a stale kernel is wrong.
_HARMLESS = {
    "NUMBA_CACHE_DIR",
    "NUMBA_NUM_THREADS",
    "NUMBA_THREADING_LAYER",
    "NUMBA_THREADING_LAYER_PRIORITY",
}
_SETTINGS = Path(".numba_config.yaml")  # where Numba looks for them besides

OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": False, "no_cfunc_wrapper": True}


class ClaimedCompiler(KernelCompiler):
    """Others wait for the kernel, and not for one that is broken off."""

    def compile_extra(self, func) -> CompileResult:
        try:
            return super().compile_extra(func)
        except BaseException:
            kernel_files().end_claim()
            raise


KERNEL_OPTIONS = OPTIONS | {"pipeline_class": ClaimedCompiler}
PART_OPTIONS = OPTIONS | {"no_cpython_wrapper": True, "pipeline_class": PartCompiler}

# A fork waits for the kernel that another thread compiles: the child would find Numba's lock taken for ever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )


def jit(function):
    """Compile a function on first call. It is at module level: a closure is compiled by every process.

    Python calls a kernel, which is kept on the disk; where a kernel calls the function, it is a part of that one. As a
    part it may not call itself, nor have a block in object mode: either is an error of Numba's kind. Outside of this
    package a part belongs into the file of its kernel: a change in another file is not noticed, and what lies on the
    disk is used. A global is a constant, the same in every process: `hash("a")`, say, is no value for one.

    Floating point is strict IEEE: LLVM may neither reorder a sum nor fuse or replace an operation, so a float32, int8
    or int4 result has the same bits on every CPU, and a bfloat16 one but for denormals, which AVX-512's product of
    pairs takes for 0; and isnan() works. Where a fused multiply-add or a sum over lanes pays, the kernel
    says so itself (see tiles.py).
    """
    return _kernel_or_part(function)


def kernel(function):
    """As `jit`, for what is called inside a step: it counts no references, and so makes no array.

    Numba would count one up and down for every array that a function is given. The counters are atomic and belong to
    all threads: with a tile that takes 300 ns, its epilogue took 150. An error that tells a value needs them, too.
    """
    return _kernel_or_part(function, _nrt=False)


def _kernel_or_part(function, **options):
    compiled = _kernel(function, **options)

    @functools.cache
    def part():  # made where a kernel that calls it compiles: most processes read their kernels from the disk
        return numba.njit(**PART_OPTIONS, **options)(function)

    compiled.get_call_template = lambda *types: part().get_call_template(*types)
    compiled.get_overload = lambda *types: part().get_overload(*types)
    return compiled


def _kernel(function, **options):
    compiled = numba.njit(**KERNEL_OPTIONS, **options)(function)
    compiled._cache = DiskCache(function, kernel_files)
    return compiled


def inline(function):
    """Make a function part of whatever kernel calls it, before types are known.

    That is for what does little but call others from one place: several loops in one function are dearer to compile
    than a kernel for each of them.
    """
    return numba.njit(inline="always", error_model="numpy", fastmath=False)(function)


@functools.cache
def cache_folder() -> CacheFolder:
    """The folder for this build's kernels."""
    return find_folder(f"kernels-{fingerprint(SOURCES)}")


@functools.cache
def kernel_files() -> KernelFiles:
    """The kernels in this build's folder."""
    return KernelFiles.in_folder(cache_folder())


class _Compilations(event.Listener):
    """Passes on what Numba tells of the kernels here; other packages' functions are none of our business."""

    def on_start(self, event) -> None:
        if _is_kernel(dispatcher := event.data["dispatcher"]):
            compiling.ANNOUNCER.begin(dispatcher.py_func.__name__)

    def on_end(self, event) -> None:
        if _is_kernel(event.data["dispatcher"]):
            compiling.ANNOUNCER.end()


def _is_kernel(dispatcher) -> bool:
    return isinstance(getattr(dispatcher, "_cache", None), DiskCache)


class _Waits(event.Listener):
    """A thread that takes the compiler's lock compiles a kernel or reads it from the disk; or it waits for another."""

    def on_start(self, event) -> None:
        compiling.begin_wait()

    def on_end(self, event) -> None:
        compiling.end_wait()


event.register("numba:compile", _Compilations())
event.register("numba:compiler_lock", _Waits())


def cache_is_cold(name: str) -> bool:
    """True until `mark_warm(name)`, and once a kernel is gone: those of a dtype are compiled by its first step."""
    return name not in kernel_files().marks()


def is_first_run() -> bool:
    """Whether this build's folder holds no kernel yet, and will keep those that are compiled."""
    return not cache_folder().note and not kernel_files().names()


def mark_warm(name: str) -> None:
    """Note that this build's kernels for a dtype have been compiled on this machine."""
    kernel_files().mark(name)


def fingerprint(sources: Path) -> str:
    """16 hex digits over all that decides the machine code of the kernels under the folder `sources`."""
    return fingerprint_of(sources, build())


def build() -> dict[str, str]:
    """All that decides the kernels' machine code beside their sources: what it is, and what it is here."""
    settings = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_") and item[0] not in _HARMLESS)
    return {
        "kernel format": MAGIC.decode().strip(),
        "machine": platform.machine(),
        "operating system": binding.get_process_triple(),
        "CPU": binding.get_host_cpu_name(),
        "list of CPU features": binding.get_host_cpu_features().flatten(),
        "Python": f"{sys.version}{'' if __debug__ else ' -O'}",  # which compiles no assertion
        "Numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "NumPy": np.__version__,  # Numba's types follow NumPy's rules
        "use of SVML": str(config.USING_SVML),
        "environment of Numba": repr(settings),
        ".numba_config.yaml": repr(_SETTINGS.read_bytes()) if _SETTINGS.is_file() else "not there",
    }


def whole_build() -> dict[str, str]:
    """What a file of exported kernels was made for: `build`, and a digest of the sources with it."""
    return build() | {"version of the kernels": fingerprint(SOURCES)}


def has_feature(name: str) -> bool:
    """Whether Numba compiles for a CPU with this feature, in LLVM's spelling ("avx512f").

    NUMBA_CPU_FEATURES chooses other features than the machine's, and NUMBA_ENABLE_AVX=0 takes some away.
    """
    if platform.machine() in ("aarch64", "arm64", "ARM64"):
        return name in _arm_features()
    if config.CPU_FEATURES is not None:
        return f"+{name}" in config.CPU_FEATURES.split(",")
    if name.startswith("avx") and not config.ENABLE_AVX:
        return False
    return binding.get_host_cpu_features().get(name, False)


def _arm_features() -> frozenset[str]:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = config.CPU_FEATURES
    if features is None:
        features = binding.get_host_cpu_features().flatten()
    return arm_features(binding.get_process_triple(), target_cpu(), features)


def target_cpu() -> str:
    """LLVM's name of the CPU that Numba compiles for."""
    return config.CPU_NAME or binding.get_host_cpu_name()
