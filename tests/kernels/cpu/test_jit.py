"""Compiled CPU kernels: a run loads those of earlier ones, and a function that a kernel calls is a part of it."""

import os
import runpy
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
import pytest
from numba.core import caching, compiler
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompileResult, DefaultPassBuilder
from numba.core.errors import NumbaError
from numba.core.runtime import rtsys

from support.kernel_tools import compiled_kernels
from support.paths import ROOT
from tinygpt.cli import main as cli
from tinygpt.kernels.cpu import compiler as kernel_compiler
from tinygpt.kernels.cpu import jit
from tinygpt.kernels.cpu.compiler import DiskCache
from tinygpt.kernels.cpu.jit import overload_by_dtype
from tinygpt.kernels.kernel_cache import KernelCache

MODULE = """
from tinygpt.kernels.cpu import jit

@jit.jit
def inner(x):
    return x + 1

@jit.jit
def triple(x):
    return 3 * inner(x)
"""
# Prints the result, and how many kernels were compiled for it.
RUN = """
from support.kernel_tools import compiled_kernels
with compiled_kernels() as compiled:
    import tiny
    print(tiny.triple(4), len(compiled.names))
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "tiny.py").write_text(MODULE)
    return tmp_path


@pytest.fixture
def compiled(tmp_path, monkeypatch) -> list[str]:
    """The kernels that this test compiles and keeps in an empty cache."""
    cache = KernelCache(tmp_path)
    monkeypatch.setattr(kernel_compiler, "kernel_cache", lambda: cache)
    with compiled_kernels() as compiled:
        yield compiled.names


def run(folder: Path, code: str = RUN, **environment: str) -> str:
    """Return what a process prints. Its kernels are kept in `folder`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "XDG_"))}
    paths = os.pathsep.join(map(str, (folder, ROOT, ROOT / "tests")))
    environment = kept | {"NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": paths} | environment
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_fingerprint_changes_with_settings_that_change_code(tmp_path, monkeypatch):
    before = kernel_compiler.build()
    monkeypatch.setenv("NUMBA_NUM_THREADS", "1")
    assert kernel_compiler.build() == before
    with monkeypatch.context() as patch:
        patch.setenv("NUMBA_CPU_NAME", "generic")
        assert kernel_compiler.build() != before
    monkeypatch.chdir(tmp_path)
    assert kernel_compiler.build() == before
    (tmp_path / ".numba_config.yaml").write_text("opt: 1\n")
    assert kernel_compiler.build() != before


def test_floating_point_is_strict():
    @jit.jit
    def adds_in_order(x, y):
        return (x + y) - x  # 0 under strict IEEE where y is lost in x; y if a compiler may reorder

    @jit.jit
    def is_nan(x):
        return x != x

    assert adds_in_order(1e30, 1.0) == 0.0
    assert is_nan(float("nan"))


def triple_of_four(folder: Path) -> int:
    """Run `tiny.py` as in a process that has not imported it."""
    return runpy.run_path(str(folder / "tiny.py"))["triple"](4)


def test_a_kernel_from_disk_makes_no_part_and_lists_no_function_but_its_own(folder, compiled):
    """Either took a tenth of a start that finds all its kernels."""
    assert triple_of_four(folder) == 15
    triple = runpy.run_path(str(folder / "tiny.py"))["triple"]
    assert (triple(4), len(compiled)) == (15, 1)
    [result] = triple.compiled.overloads.values()
    listed = {function.name for function in result.library._shared_module.functions}
    assert listed == {result.fndesc.llvm_func_name, result.fndesc.llvm_cpython_wrapper_name}


def test_a_step_and_a_draw_are_read_without_numbas_runtime(folder):
    """LLVM compiles that for each process, which takes as long as all else to read a step."""
    assert cli.main(["convert", "demo", str(folder / "packed"), "--dtype", "int8"]) == 0
    code = """
import os
from numba.core.runtime import nrt
compile_runtime, compiled = nrt.nrtdynmod.compile_nrt_functions, []
nrt.nrtdynmod.compile_nrt_functions = lambda context: compiled.append(1) or compile_runtime(context)
from tinygpt import LLM
llm = LLM(os.environ["PACKED"], max_num_seqs=1)
for asked in ({"repetition_penalty": 1.1}, {"temperature": 0.8, "top_k": 40, "seed": 1}, {"logprobs": 1}):
    llm.generate("Once", max_tokens=2, **asked)
print(bool(compiled))
"""
    kept = os.environ.get("NUMBA_CACHE_DIR", "")  # where other tests' kernels are
    environment = {"NUMBA_CACHE_DIR": kept, "PACKED": str(folder / "packed"), "TINYGPT_KERNELS": "compile"}
    run(folder, code, **environment)  # which may compile
    assert run(folder, code, **environment) == "False"


def test_a_kernel_whose_part_makes_an_array_is_read_with_numbas_runtime(folder):
    """Though a kernel counts no references: the part was compiled for another function, which does."""
    source = """
import numpy as np
from tinygpt.kernels.cpu.jit import jit, kernel

@jit
def total(n):
    return np.full(n, 2.0).sum()

@jit
def plain(n):
    return total(n)

@kernel
def counted(n):
    return total(n)
"""
    (folder / "parts_of.py").write_text(source)
    both = "import parts_of; print(parts_of.plain(3), parts_of.counted(3))"
    run(folder, both)  # which compiles
    assert run(folder, both) == "6.0 6.0"
    assert run(folder, "import parts_of; print(parts_of.counted(3))") == "6.0"


def test_a_changed_source_is_compiled_anew(folder):
    """Here one outside of the package, whose sources name the folder."""
    assert run(folder) == "15 1"
    # Of another size, at which Python looks.
    (folder / "tiny.py").write_text(MODULE.replace("x + 1", "x + 20"))
    assert run(folder) == "72 1"


def last_field(record):
    return record[-1]


def test_arguments_that_look_alike_are_told_apart(compiled):
    """Two classes of one name, with fields of one type, are one and the same in Numba's words."""
    first = namedtuple("Record", "a b")
    second = namedtuple("Record", "c d")
    for record in (first(1, 2.0), second(3, 4.0), first(5, 6.0)):
        assert jit.jit(last_field)(record) == record[1]
    assert len(compiled) >= 2


def test_a_kernel_that_another_process_would_not_know_is_not_kept(compiled, tmp_path):
    number = 5

    @jit.jit
    def closure(x):
        return x + number

    @jit.jit
    def call(function, x):
        return function(x)

    table = np.arange(300_000)  # a large global array is held by its address
    typed_in = {"table": table}
    exec("def look_up(i):\n    return table[i]", typed_in)
    assert closure(1) == 6
    assert call(numba.njit(last_field), (1, 2)) == 2
    assert jit.jit(typed_in["look_up"])(7) == 7
    assert len(compiled) >= 3
    assert not KernelCache(tmp_path).names()


def test_what_numba_cannot_take_apart_runs_all_the_same(compiled, tmp_path, monkeypatch, caplog):
    """As it may be with a version of Numba to come."""
    monkeypatch.setattr(compiler.CompileResult, "_reduce", lambda result: 1 / 0)
    assert jit.jit(last_field)((1, 2)) == 2
    assert not KernelCache(tmp_path).names()
    assert str(tmp_path) in caplog.text
    monkeypatch.undo()


class Metres(NamedTuple):
    length: float


class Feet(NamedTuple):
    length: float


@pytest.fixture
def made(monkeypatch) -> list[str]:
    """The functions that have become machine code, but for Numba's own."""
    names = []
    finish = JITCodeLibrary._finalize_specific

    def note(library):
        names.extend({library.name.split(".")[-1]} - {"nrt"})
        finish(library)

    monkeypatch.setattr(JITCodeLibrary, "_finalize_specific", note)
    return names


def new_kernels():
    """Two kernels, the first of which calls the second; closures, and so compiled anew."""

    @jit.kernel
    def thrice(x):
        if x > 100:
            raise ValueError("more than a hundred")
        return 3 * x

    @jit.kernel
    def nine_times(x):
        return thrice(thrice(x))

    def as_it_is(record):
        return record.length

    def to_metres(record):
        return thrice(record.length) * 0.1

    in_metres = overload_by_dtype({Feet: to_metres}, otherwise=as_it_is)

    @jit.jit
    def twelve_times(record):
        return nine_times(in_metres(record)) + thrice(in_metres(record))

    return twelve_times, nine_times


def test_only_what_python_calls_becomes_machine_code(made):
    twelve_times, nine_times = new_kernels()
    for record, expected in ((Metres(2.0), 24.0), (Feet(20.0), 72.0)):
        made.clear()
        assert twelve_times(record) == expected
        assert made == ["twelve_times"]
    assert nine_times(np.int32(2)) == 18  # Python may call each
    assert made == ["twelve_times", "nine_times"]


@pytest.mark.filterwarnings("ignore:.*object mode")
def test_what_is_not_compiled_is_refused():
    """Python may call the first."""

    @jit.jit
    def in_object_mode(x):
        with numba.objmode(y="int64"):
            y = x + 1
        return y

    @jit.jit
    def factorial(n):
        if n > 1:
            return n * factorial(n - 1)
        return 1

    assert in_object_mode(3) == 4
    with pytest.raises(NumbaError, match="a block in object mode"):
        jit.jit(lambda x: in_object_mode(x) + 1)(3)
    with pytest.raises(NumbaError, match="re-entrant"):
        factorial(4)


def test_numba_has_the_internals_that_the_cache_and_parts_use():
    """Numba promises none of them. If this fails, kernels may run, and every process compiles them."""
    plain = numba.njit(last_field)
    ours = jit.jit(last_field)
    assert isinstance(plain._cache, caching.NullCache)
    assert caching._Cache.__abstractmethods__ <= {*dir(DiskCache)}
    assert plain.targetctx.codegen().magic_tuple()
    assert callable(rtsys.initialize)
    assert ours.compiled.stats.cache_path == str(kernel_compiler.kernel_cache().folder)
    for owner, names in {
        Compiler: ("compile_extra",),
        DefaultPassBuilder: ("define_nopython_pipeline",),
        JITCodeLibrary: ("_optimize_final_module", "_finalize_final_module"),
        CompileResult: ("_reduce", "_rebuild", "_replace", "_find_referenced_environments"),
    }.items():
        missing = [name for name in names if not hasattr(owner, name)]
        assert not missing, f"Numba's {owner.__name__} has no {missing} any more"
