"""Compile the kernels that the package ships: python scripts/build_kernels.py [--check] [--all]

Any machine builds all targets, and the same versions of Python, Numba and LLVM make the same bytes. A build is a target
and a dtype. Without --all, those are built of which an object's sources have changed; --check compiles one, chosen by
the commit, and compares its objects with the archive's.
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
import time
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

V3 = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")
V4 = (*V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
ZEN_4 = ("avx512bitalg", "avx512ifma", "avx512vbmi", "avx512vbmi2", "avx512vpopcntdq", "gfni", "prfchw")
ROOT = Path(__file__).resolve().parents[1]
LIBC = {"memset", "sched_yield"}
SHARED = "float32"  # whose process compiles the kernels of choosing tokens


Objects = dict[str, bytes]  # by their names in an archive
SECONDS = 25  # of a core, for a build


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
    parser.add_argument("--all", action="store_true", help="build or compare every target and dtype")
    parser.add_argument("--pinned", action="store_true", help="other versions than the objects' fail a check")
    # FILE, target and dtype, in a process of it
    parser.add_argument("--into", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.into:
        file, target, dtype = args.into
        compile_all(Path(file), target, dtype)
    elif args.check:
        return check(builds() if args.all else [of_this_commit()], args.pinned)
    else:
        update(builds() if args.all else void_builds(read_manifest()))
    return 0


def builds() -> list[tuple[str, str]]:
    """Return targets and dtypes."""
    from tinygpt.weights.config import DTYPES

    return [(target, dtype) for target in BUILDS for dtype in DTYPES]


def of_this_commit() -> tuple[str, str]:
    """Return one target and dtype: all come up in turn."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return builds()[int(commit.stdout, 16) % len(builds())]


def read_manifest() -> dict[str, Any]:
    from tinygpt.kernels.cpu.native import MANIFEST

    return json.loads(MANIFEST.read_text("ascii"))


def void_builds(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the builds that have an object of other sources, or of other versions than this process has."""
    from tinygpt.kernels.cpu.keys import of_sources
    from tinygpt.kernels.cpu.native import SOURCES, asked_of

    if differences(manifest):
        return builds()
    void = []
    for target, dtype in builds():
        members = objects_of(manifest, target).get(dtype, {})
        right = of_sources(members, asked_of(target, vars(BUILDS[target])), SOURCES.parent)
        if len(right) < len(members) or not members:
            void.append((target, dtype))
    return void


def objects_of(manifest: dict[str, Any], target: str) -> dict[str, dict[str, str]]:
    """Return the hash of each object's bytes by its dtype and name."""
    return manifest["targets"].get(target, {}).get("objects", {})


def update(chosen: list[tuple[str, str]]) -> None:
    """Build, and write the archives of which an object is built, and the manifest."""
    from tinygpt.kernels.cpu.native import FOLDER, MANIFEST, sources_hash

    manifest = read_manifest()
    built = compile_builds(chosen)
    for target in {target: None for target, _ in chosen}:
        row = BUILDS[target]
        archive = FOLDER / f"{target.lower().replace(' ', '-')}.zip.xz"
        dtypes = {dtype: objects for (of, dtype), objects in built.items() if of == target}
        kept = objects_of(manifest, target).keys() - dtypes.keys()
        dtypes |= {dtype: shipped(manifest, target, dtype) for dtype in kept}
        archive.write_bytes(lzma.compress(write_objects(united(dtypes.values())), preset=9))
        manifest["targets"][target] = {
            "archive": archive.name,
            "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
            "cpu": row.cpu,
            "features": row.features,
            "objects": {dtype: hashes(dtypes[dtype]) for dtype in sorted(dtypes)},
        }
        print(f"{target}: {archive.stat().st_size / 1000:.0f} kB", file=sys.stderr)
    targets = {target: manifest["targets"][target] for target in BUILDS}
    manifest = {"sources": sources_hash(), **about(), "targets": targets}
    MANIFEST.write_text(json.dumps(manifest, indent=1) + "\n", "ascii")


def united(parts: Iterable[Objects]) -> Objects:
    objects: Objects = {}
    for part in parts:
        differing = [name for name in part if objects.get(name, part[name]) != part[name]]
        assert not differing, f"dtypes make other bytes of {differing}"
        objects |= part
    return objects


def hashes(objects: Objects) -> dict[str, str]:
    return {name: hashlib.sha256(objects[name]).hexdigest() for name in sorted(objects)}


def shipped(manifest: dict[str, Any], target: str, dtype: str) -> Objects:
    """Return the objects of the archive that a build has made."""
    from tinygpt.kernels.cpu.native import FOLDER

    row = manifest["targets"][target]
    objects = read_objects(lzma.decompress((FOLDER / row["archive"]).read_bytes()))
    return {name: objects[name] for name in row["objects"][dtype]}


def check(chosen: list[tuple[str, str]], is_pinned: bool) -> int:
    """Return 1 if an object is not of the sources, or if one of the chosen builds makes others."""
    manifest = read_manifest()
    if other := differences(manifest):
        print(f"not compared: the objects are of {other}, and this is {about()}", file=sys.stderr)
        return int(is_pinned)
    if void := void_builds(manifest):
        print(f"of other sources, build_kernels.py builds them: {void}", file=sys.stderr)
        return 1
    built = compile_builds(chosen)
    differing = [build for build in chosen if built[build] != shipped(manifest, *build)]
    print(f"compared: {chosen}; other bytes: {differing or 'none'}", file=sys.stderr)
    return int(bool(differing))


def about() -> dict[str, str]:
    """Return the versions that decide the bytes."""
    import llvmlite
    import numba

    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, "numba": numba.__version__, "llvmlite": llvmlite.__version__}


def differences(manifest: dict[str, Any]) -> dict[str, str]:
    return {name: manifest[name] for name, value in about().items() if value != manifest[name]}


def compile_builds(chosen: list[tuple[str, str]]) -> dict[tuple[str, str], Objects]:
    """Return the objects of each. A process for each: the bytes depend on what a process compiled before."""

    def compiled(build: tuple[str, str]) -> Objects:
        target, dtype = build
        file = Path(folder, f"{target} {dtype}")
        command = [sys.executable, __file__, "--into", str(file), target, dtype]
        subprocess.run(command, check=True, env={**os.environ, **BUILDS[target].environment})
        print(f"{target} {dtype}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
        return read_objects(file.read_bytes())

    begun = time.monotonic()
    cores = min(os.cpu_count() or 1, max(len(chosen), 1))
    seconds = SECONDS * -(-len(chosen) // cores)
    print(f"{len(chosen)} of {len(builds())} builds: some {seconds} s of {cores} cores", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(cores) as pool:
        return dict(zip(chosen, pool.map(compiled, chosen), strict=True))


def read_objects(content: bytes) -> Objects:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_objects(objects: Objects) -> bytes:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for name in sorted(objects):
            archive.writestr(zipfile.ZipInfo(name), objects[name])
    return whole.getvalue()


def compile_all(file: Path, target: str, dtype: str) -> None:
    from llvmlite import binding

    row = BUILDS[target]
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

    from tinygpt.kernels.cpu.keys import Sources
    from tinygpt.kernels.cpu.native import SOURCES, asked_of, named, words_of

    asked = asked_of(target, vars(row))
    sources = Sources(SOURCES.parent)
    objects: Objects = {}

    def compile_only(kernel, *arguments):
        words, layout = words_of(arguments)
        name = f"{kernel.__module__}.{kernel.__qualname__}"
        member = f"{named(name, layout)}-{sources.key(name, asked)}"
        if member not in objects:
            objects[member] = compile_kernel(kernel, arguments, len(words))
            print(member, len(objects[member]), file=sys.stderr, flush=True)
        return lambda: None

    with mock.patch.object(jit.Kernel, "bound", compile_only):
        call_kernels(dtype)
    file.write_bytes(write_objects(objects))


def call_kernels(dtype: str) -> None:
    from tinygpt.kernels import cpu
    from tinygpt.kernels.backend import Batch
    from tinygpt.weights.open import open_checkpoint

    checkpoint = open_checkpoint("demo")
    params = cpu.load_params(checkpoint, dtype)
    kv_cache = cpu.new_kv_cache(checkpoint.config, 1, 1, cpu.kv_cache_dtypes(dtype)[0])
    workspace = cpu.new_workspace(checkpoint.config, 1, 1, 1, dtype)
    batch = Batch.of([[0]], [0], [0])
    logits = cpu.forward(params, batch, kv_cache, workspace)
    if dtype == SHARED:
        choose_tokens(logits)
    look = mock.Mock(points={("resid_pre", 0)}, changes=False, first=0)
    cpu.forward(params, batch, kv_cache, workspace, look)


def choose_tokens(logits) -> None:
    import numpy as np

    from tinygpt.kernels import cpu
    from tinygpt.kernels.numbers import Processors, Ragged, Warpers

    warpers = Warpers(*np.ones((len(Warpers._fields), 1)))
    cpu.sample(logits, warpers, *np.zeros((3, 1), np.uint64))
    cpu.filter_logits(logits, warpers)
    cpu.top_logprobs(logits[0], 0, 1)
    ids = Ragged.of([np.zeros(1, np.int32)])
    numbers = np.ones((3, 1), np.float32)
    rows = np.zeros(1, np.int64)
    biases = Ragged.of([np.zeros(1, np.float32)])
    cpu.process_logits(logits, Processors(rows, ids, rows, *numbers, ids, biases))


def compile_kernel(kernel, arguments: tuple, count: int) -> bytes:
    """Return the object of a kernel whose arguments have `count` words."""
    import numba
    from llvmlite import binding
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler_lock import global_compiler_lock

    kinds = tuple(map(numba.typeof, arguments))
    with global_compiler_lock:
        kernel.in_numba.compile(kinds)
        result = kernel.in_numba.overloads[kinds]
        assert result.signature.return_type == numba.types.none, f"{kernel} returns a value"
        library = result.library
        library._ensure_finalized()
        module = binding.parse_assembly(str(library._final_module))
        add_entry(module, result.fndesc.llvm_func_name, count)
        with mock.patch.object(library, "_final_module", module):  # other kernels link the one before
            JITCodeLibrary._optimize_final_module(library)
            module = library._final_module
        declared = hide_parts(module)
        code = library.codegen._tm.emit_object(module)
    foreign = {symbol for symbol in declared - LIBC if symbol.encode() in code}
    assert not foreign, f"{kernel} refers to {foreign}"
    return code


def add_entry(module, function: str, count: int) -> None:
    """Add a function that calls a kernel with the words at an address."""
    from llvmlite import binding

    from tinygpt.kernels.cpu.native import ENTRY

    kinds = [str(kind) for kind in module.get_function(function).global_value_type.get_function_parameters()]
    assert len(kinds) == 2 + count, f"{function} takes {len(kinds) - 2} words, not {count}"
    lines = [f'declare i32 @"{function}"({", ".join(kinds)})', f"define i32 @{ENTRY}(ptr %words) {{"]
    lines += ["%result = alloca [64 x i64]", "%error = alloca ptr"]
    operands = ["ptr %result", "ptr %error"]
    for i, kind in enumerate(kinds[2:]):
        lines += [f"%at{i} = getelementptr i64, ptr %words, i64 {i}"]
        lines += [f"%word{i} = load {kind}, ptr %at{i}, align 8"]
        operands += [f"{kind} %word{i}"]
    lines += [f'%status = call i32 @"{function}"({", ".join(operands)})', "ret i32 %status", "}"]
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
