"""Compile the kernels that the package ships: python scripts/build_kernels.py [--check]

Any machine builds all targets, and the same versions of Python, Numba and LLVM make the same bytes. --check compares
two dtypes for this CPU with the archive.
"""

import argparse
import ctypes
import hashlib
import io
import json
import lzma
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

V3 = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")
V4 = (*V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
ZEN_4 = ("avx512bitalg", "avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512vpopcntdq", "gfni", "prfchw")
CHECKED = ("float32", "int8")
LIBC = {"memset", "sched_yield"}
SHARED = "float32"  # whose process compiles the kernels of choosing tokens


@dataclass(frozen=True)
class Build:
    cpu: str  # LLVM's name of the least CPU
    features: tuple[str, ...]  # of it, and more: a CPU without one of them compiles
    machine: str = "x86_64"

    @property
    def triple(self) -> str:
        return f"{self.machine}-unknown-linux-gnu"

    @property
    def environment(self) -> dict[str, str]:
        features = ",".join(f"+{name}" for name in self.features)
        return {
            "NUMBA_CPU_NAME": self.cpu,
            "NUMBA_CPU_FEATURES": features,
            "NUMBA_CACHE_DIR": os.devnull,
            "TINYGPT_KERNELS": "compile",
            "PYTHONHASHSEED": "0",
        }


BUILDS = {
    "AVX2": Build("x86-64-v3", V3),
    "AVX2 VNNI": Build("x86-64-v3", (*V3, "avxvnni")),
    "AVX-512": Build("x86-64-v4", V4),
    "AVX-512 VNNI": Build("x86-64-v4", (*V4, "avx512vnni")),
    "AVX-512 BF16 VNNI": Build("znver4", (*V4, *ZEN_4, "avx512vnni", "avx512bf16")),
    "AMX": Build("x86-64-v4", (*V4, "avx512vnni", "amx-tile", "amx-bf16", "amx-int8")),
    "NEON": Build("generic", ("neon",), "aarch64"),
    "NEON DotProd": Build("generic", ("neon", "dotprod"), "aarch64"),
    "NEON BF16 I8MM": Build("generic", ("neon", "dotprod", "bf16", "i8mm"), "aarch64"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument(
        "--into", nargs=3, help=argparse.SUPPRESS
    )  # FILE, target and dtype, in a process of it
    args = parser.parse_args()
    if args.into:
        file, target, dtype = args.into
        compile_all(Path(file), BUILDS[target], dtype)
        return 0
    return check() if args.check else build_all()


def build_all() -> int:
    from tinygpt.kernels.cpu.native import FOLDER, MANIFEST
    from tinygpt.weights.config import DTYPES

    FOLDER.mkdir(exist_ok=True)
    targets = {}
    for target, row in BUILDS.items():
        archive = f"{target.lower().replace(' ', '-')}.zip.xz"
        content = lzma.compress(write_objects(build(target, DTYPES)), preset=9)
        (FOLDER / archive).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        targets[target] = {"archive": archive, "sha256": digest, "cpu": row.cpu, "features": row.features}
        print(f"{target}: {len(content) / 1000:.0f} kB", file=sys.stderr)
    MANIFEST.write_text(json.dumps({**about(), "targets": targets}, indent=1) + "\n", "ascii")
    return 0


def check() -> int:
    from tinygpt.kernels.cpu.native import FOLDER, MANIFEST
    from tinygpt.kernels.cpu.simd.targets import TARGET

    manifest = json.loads(MANIFEST.read_text("ascii"))
    if other := {name: manifest[name] for name, value in about().items() if value != manifest[name]}:
        print(f"not compared: the objects are of {other}, and this is {about()}", file=sys.stderr)
        return int("sources" in other)
    if TARGET.name not in BUILDS:
        print(f"not compared: there are no objects for {TARGET.name}", file=sys.stderr)
        return 0
    new = build(TARGET.name, CHECKED)
    archive = FOLDER / manifest["targets"][TARGET.name]["archive"]
    old = read_objects(lzma.decompress(archive.read_bytes()))
    differing = [name for name in new if new[name] != old.get(name)]
    print(
        f"{len(new)} objects of {TARGET.name} compared, other bytes: {differing or 'none'}", file=sys.stderr
    )
    return int(bool(differing))


def about() -> dict[str, str]:
    """Return all that decides the bytes."""
    import llvmlite
    import numba

    from tinygpt.kernels.cpu.native import sources_hash

    return {
        "sources": sources_hash(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
    }


def build(target: str, dtypes: Iterable[str]) -> dict[str, bytes]:
    """Return objects by name. A process for each dtype: the bytes depend on what a process compiled before."""

    def compiled(dtype: str) -> dict[str, bytes]:
        file = Path(folder, dtype)
        command = [sys.executable, __file__, "--into", str(file), target, dtype]
        subprocess.run(command, check=True, env={**os.environ, **BUILDS[target].environment})
        return read_objects(file.read_bytes())

    objects: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(compiled, dtypes):
            differing = [name for name in found if objects.get(name, found[name]) != found[name]]
            assert not differing, f"dtypes make other bytes of {differing}"
            objects |= found
    return objects


def read_objects(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_objects(objects: dict[str, bytes]) -> bytes:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for name in sorted(objects):
            archive.writestr(zipfile.ZipInfo(name), objects[name])
    return whole.getvalue()


def compile_all(file: Path, row: Build, dtype: str) -> None:
    from llvmlite import binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    for owner, name, value in (
        (binding, "get_process_triple", row.triple),
        (binding.targets, "get_default_triple", row.triple),
        (platform, "machine", row.machine),
    ):
        mock.patch.object(owner, name, return_value=value).start()
    may = SimpleNamespace(syscall=lambda *_: 0)  # this system may refuse AMX, and no kernel runs here
    with mock.patch.object(ctypes, "CDLL", return_value=may):
        from tinygpt.kernels.cpu import jit

    objects: dict[str, bytes] = {}

    def compile_only(kernel, *arguments):
        compile_kernel(kernel, arguments, objects)
        return lambda: None

    with mock.patch.object(jit.Kernel, "bound", compile_only):
        call_kernels(dtype)
    file.write_bytes(write_objects(objects))


def call_kernels(dtype: str) -> None:
    import numpy as np

    from tinygpt.kernels import cpu
    from tinygpt.kernels.backend import Batch
    from tinygpt.kernels.numbers import Processors, Ragged, Warpers
    from tinygpt.weights.open import open_checkpoint

    checkpoint = open_checkpoint("demo")
    params = cpu.load_params(checkpoint, dtype)
    kv_cache = cpu.new_kv_cache(checkpoint.config, 1, 1, cpu.kv_cache_dtypes(dtype)[0])
    workspace = cpu.new_workspace(checkpoint.config, 1, 1, 1, dtype)
    batch = Batch.of([[0]], [0], [0])
    logits = cpu.forward(params, batch, kv_cache, workspace)
    if dtype != SHARED:
        return
    warpers = Warpers(*np.ones((len(Warpers._fields), 1)))
    cpu.sample(logits, warpers, *np.zeros((3, 1), np.uint64))
    cpu.filter_logits(logits, warpers)
    cpu.top_logprobs(logits[0], 0, 1)
    ids = Ragged.of([np.zeros(1, np.int32)])
    numbers = np.ones((3, 1), np.float32)
    rows = np.zeros(1, np.int64)
    biases = Ragged.of([np.zeros(1, np.float32)])
    cpu.process_logits(logits, Processors(rows, ids, rows, *numbers, ids, biases))


def compile_kernel(kernel, arguments: tuple, objects: dict[str, bytes]) -> None:
    import numba
    from llvmlite import binding
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler_lock import global_compiler_lock

    from tinygpt.kernels.cpu.native import member, words_of

    words, layout = words_of(arguments)
    name = member(f"{kernel.__module__}.{kernel.__qualname__}", layout)
    if name in objects:
        return
    kinds = tuple(map(numba.typeof, arguments))
    with global_compiler_lock:
        kernel.in_numba.compile(kinds)
        result = kernel.in_numba.overloads[kinds]
        assert result.signature.return_type == numba.types.none, f"{name} returns a value"
        library = result.library
        library._ensure_finalized()
        module = binding.parse_assembly(str(library._final_module))
        add_entry(module, result.fndesc.llvm_func_name, len(words))
        with mock.patch.object(library, "_final_module", module):  # other kernels link the one before
            JITCodeLibrary._optimize_final_module(library)
            module = library._final_module
        declared = hide_parts(module)
        code = library.codegen._tm.emit_object(module)
    foreign = {symbol for symbol in declared - LIBC if symbol.encode() in code}
    assert not foreign, f"{name} refers to {foreign}"
    objects[name] = code
    print(name, len(objects[name]), file=sys.stderr, flush=True)


def add_entry(module, function: str, count: int) -> None:
    """Add a function that calls a kernel with the words at an address."""
    from llvmlite import binding

    from tinygpt.kernels.cpu.native import ENTRY

    kinds = [str(kind) for kind in module.get_function(function).global_value_type.get_function_parameters()]
    assert len(kinds) == 2 + count, f"{function} takes {len(kinds) - 2} words, not {count}"
    lines = [f'declare i32 @"{function}"({", ".join(kinds)})', f"define i32 @{ENTRY}(ptr %words) {{"]
    lines += ["%result = alloca [64 x i64]", "%error = alloca ptr"]
    given = ["ptr %result", "ptr %error"]
    for i, kind in enumerate(kinds[2:]):
        lines += [f"%at{i} = getelementptr i64, ptr %words, i64 {i}"]
        lines += [f"%word{i} = load {kind}, ptr %at{i}, align 8"]
        given += [f"{kind} %word{i}"]
    lines += [f'%status = call i32 @"{function}"({", ".join(given)})', "ret i32 %status", "}"]
    for other in module.functions:
        if not other.is_declaration and other.linkage == binding.Linkage.external:
            other.linkage = "linkonce_odr"
    module.link_in(binding.parse_assembly("\n".join([f'target triple = "{module.triple}"', *lines])))


def hide_parts(module) -> set[str]:
    """Hide all but the entry, by names that no counter of Numba's decides. Return the names that it declares."""
    from llvmlite import binding

    from tinygpt.kernels.cpu.native import ENTRY

    module.name = ENTRY
    values = [*module.functions, *module.global_variables]
    for number, value in enumerate(v for v in values if not v.is_declaration and v.name != ENTRY):
        value.linkage = binding.Linkage.internal
        value.name = f"part{number}"
    return {value.name for value in values if value.is_declaration and not value.name.startswith("llvm.")}


if __name__ == "__main__":
    raise SystemExit(main())
