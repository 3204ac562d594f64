"""Compiled CPU kernels on disk: a run finds those of earlier ones, and no file that it finds can harm it."""

import math
import os
import pickle
import runpy
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import pytest
from numba.core import caching, compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime import rtsys

from support.compiled import compiled_kernels
from support.paths import ROOT
from tinygpt.cli import main as cli
from tinygpt.kernels import compiling
from tinygpt.kernels.compiling import CompileClock
from tinygpt.kernels.cpu import jit
from tinygpt.kernels.cpu.disk_cache import DiskCache
from tinygpt.kernels.cpu.parts import KernelCompiler, PartCompiler
from tinygpt.kernels.kernel_files import KernelFiles

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
from support.compiled import compiled_kernels
with compiled_kernels() as compiled:
    import tiny
    print(tiny.triple(4), len(compiled.names))
"""

# Prints a kernel's result, and whether Numba has filled its registries by then; and the same of another kernel's.
FILLED = """
from numba.core.cpu import CPUContext
fill, filled = CPUContext.load_additional_registries, []
CPUContext.load_additional_registries = lambda context: filled.append(fill(context))
from support.compiled import compiled_kernels
with compiled_kernels():
    from arrays import ones, tens
    print(ones(3).sum(), bool(filled), tens(3).sum() if {both} else None, bool(filled))
"""


def doubled(x):
    return 2 * x


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with a module, `tiny.py`, whose kernels are kept in `cache` beside it."""
    (tmp_path / "tiny.py").write_text(MODULE)
    return tmp_path


@pytest.fixture
def compiled(tmp_path, monkeypatch) -> list[str]:
    """The kernels that this test has compiled; they are kept in a folder of its own."""
    files = KernelFiles(tmp_path)
    monkeypatch.setattr(jit, "kernel_files", lambda: files)
    with compiled_kernels() as compiled:
        yield compiled.names


def start(folder: Path, code: str = RUN, root: Path = ROOT, **environment: str) -> subprocess.Popen:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "XDG_"))}
    places = {
        "NUMBA_CACHE_DIR": str(folder / "cache"),
        "TMPDIR": str(folder),
        "PYTHONPATH": os.pathsep.join((str(folder), str(root), str(ROOT / "tests"))),
    }
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=root,
        env=kept | places | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments, **options) -> str:
    """What the process printed, which ended well and complained of nothing."""
    process = start(*arguments, **options)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    return out.strip()


def files_of(folder: Path) -> list[Path]:
    """All that the runs have written, whoever wrote it."""
    return [path for path in (folder / "cache").rglob("*") if path.is_file()]


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_what_is_damaged_or_planted_is_compiled_again(folder, compiled):
    damages = {
        "emptied": lambda content: b"",
        "halved": lambda content: content[: len(content) // 2],
        "garbage": lambda content: bytes(range(256)) * 4,
        "a flipped bit": flip_in_the_middle,
        "a bomb": lambda content: pickle.dumps(Bomb(folder / "exploded")),
    }
    assert triple_of_four(folder) == 15
    for i, (name, damage) in enumerate(damages.items()):
        for path in folder.glob("*.kernel"):
            path.write_bytes(damage(path.read_bytes()))
        assert (triple_of_four(folder), len(compiled)) == (15, i + 2), name
    assert (triple_of_four(folder), len(compiled)) == (15, 6)
    assert not (folder / "exploded").exists()


def test_what_is_read_makes_no_part_and_lists_no_function_but_its_own(folder, compiled, monkeypatch):
    """Either took a tenth of a start that finds all its kernels."""
    made = []
    counted = SimpleNamespace(njit=lambda **options: made.append(options["pipeline_class"]) or numba.njit(**options))
    monkeypatch.setattr(jit, "numba", counted)
    assert triple_of_four(folder) == 15
    assert PartCompiler in made  # of the inner function, which was compiled within
    made.clear()
    triple = runpy.run_path(str(folder / "tiny.py"))["triple"]
    assert (triple(4), len(compiled)) == (15, 1)
    assert set(made) == {jit.ClaimedCompiler}
    [result] = triple.overloads.values()
    listed = {function.name for function in result.library._shared_module.functions}
    assert listed == {result.fndesc.llvm_func_name, result.fndesc.llvm_cpython_wrapper_name}


def triple_of_four(folder: Path) -> int:
    """As in a process that has not seen the module yet."""
    return runpy.run_path(str(folder / "tiny.py"))["triple"](4)


def flip_in_the_middle(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :]


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners of folders on Windows")
def test_a_cache_folder_that_others_may_write_to_is_not_used(folder):
    """The folder of all caches may be anywhere; what lies there may be anybody's."""
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    code = "from tinygpt.kernels.cpu import jit; print(jit.cache_folder().path); print(jit.cache_folder().note)"
    places = {"XDG_CACHE_HOME": str(folder / "open"), "NUMBA_CACHE_DIR": "", "TMPDIR": str(folder)}
    path, note = run(folder, code, **places).splitlines()
    assert Path(path).parent == folder / f"tinygpt-{os.geteuid()}"
    assert f"others may write to {folder / 'open'}" in note
    assert not list((folder / "open").iterdir())


DRAW = RUN.replace("import tiny", "from tinygpt.kernels.cpu.sampling import philox").replace(
    "tiny.triple(4)", "philox.__file__, philox.uniform(*np.ones(3, np.uint64))"
)


def test_copies_of_the_same_sources_share_kernels(folder, tmp_path):
    """So what is installed from a clone, and not editable, compiles nothing that has been compiled in the clone."""
    skip, philox = shutil.ignore_patterns("__pycache__", "demo"), Path("kernels", "cpu", "sampling", "philox.py")
    here, drawn, compiled = run(folder, f"import numpy as np{DRAW}").rsplit(maxsplit=2)
    assert int(compiled) > 0
    assert here == str(ROOT / philox)
    for name in ("installed", "a second clone"):
        copy = tmp_path / name
        inner = copy / ("tinygpt" if name == "installed" else "")
        shutil.copytree(ROOT / "tinygpt", copy / "tinygpt", ignore=skip)
        for folder_ in ("kernels", "weights"):
            shutil.copytree(ROOT / folder_, inner / folder_, ignore=skip)
        if name == "a second clone":
            shutil.copy(ROOT / "setup.cfg", copy)
        there, *found = run(folder, f"import numpy as np{DRAW}", root=copy).rsplit(maxsplit=2)
        assert (there, *found) == (str(inner / philox), drawn, "0")


COMPILED_HERE = """
from numba.core import event
import tiny

class Begun(event.Listener):
    def on_start(self, event):
        names.append(event.data["dispatcher"].py_func.__name__)

    def on_end(self, event):
        pass

names = []
event.register("numba:compile", Begun())
from support.compiled import compiled_kernels
with compiled_kernels() as compiled:
    print(tiny.triple(4), names.count("triple"))
"""


def test_of_processes_that_begin_at_once_one_compiles(folder):
    all_of_them = [start(folder, COMPILED_HERE) for _ in range(3)]
    results = [process.communicate() for process in all_of_them]
    assert sorted(results) == [("15 0\n", ""), ("15 0\n", ""), ("15 1\n", "")]
    assert run(folder) == "15 0"
    assert not [path for path in files_of(folder) if path.suffix == ".lock"]


@pytest.mark.skipif(os.name == "nt", reason="nobody waits on Windows")
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_nobody_waits_for_a_kernel_that_was_broken_off(compiled, monkeypatch, tmp_path, error):
    """This process goes on, as a notebook does."""

    def break_off(*arguments):
        assert len([*tmp_path.glob("*.lock")]) == 1
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(KernelCompiler, "compile_extra", break_off)
        with pytest.raises(error):
            jit.jit(doubled)(1)
    assert not [*tmp_path.glob("*.lock")]
    assert (jit.jit(doubled)(1), compiled) == (2, ["doubled", "doubled"])
    assert not [*tmp_path.glob("*.lock")]


def test_a_kernel_of_an_earlier_run_waits_for_nothing_that_only_compiling_takes(folder):
    """Numba's registries, which are a tenth of a short run. What is compiled behind it has them all the same."""
    functions = [
        f"@jit\ndef {name}(n):\n    return np.full(n, {value})\n" for name, value in (("ones", 1), ("tens", 10))
    ]
    (folder / "arrays.py").write_text(
        "\n".join(["import numpy as np\nfrom tinygpt.kernels.cpu.jit import jit", *functions])
    )
    assert run(folder, FILLED.format(both=False)) == "3 True None True"
    assert run(folder, FILLED.format(both=True)) == "3 False 30 True"
    assert run(folder, FILLED.format(both=True)) == "3 False 30 False"


def test_a_step_and_a_draw_are_read_without_numbas_runtime(folder):
    """LLVM compiles that for each process, which takes as long as all else to read a step. What makes arrays has it."""
    assert cli.main(["convert", "demo", str(folder / "packed"), "--dtype", "int8"]) == 0
    code = """
import os
from numba.core.runtime import nrt
compile_runtime, compiled = nrt.nrtdynmod.compile_nrt_functions, []
nrt.nrtdynmod.compile_nrt_functions = lambda context: compiled.append(1) or compile_runtime(context)
from tinygpt import LLM
llm = LLM(os.environ["PACKED"], max_num_seqs=1)
for asked in ({}, {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 1}, {"logprobs": 1}):
    llm.generate("Once", max_tokens=2, **asked)
print(bool(compiled))
llm.generate("Once", max_tokens=2, repetition_penalty=1.1)
print(bool(compiled))
"""
    kept = os.environ.get("NUMBA_CACHE_DIR", "")  # where other tests' kernels are
    environment = {"NUMBA_CACHE_DIR": kept, "PACKED": str(folder / "packed")}
    start(folder, code, **environment).communicate()  # which may compile, and say so
    assert run(folder, code, **environment) == "False\nTrue"


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
    start(folder, both).communicate()  # which compiles, and says so
    assert run(folder, both) == "6.0 6.0"
    assert run(folder, "import parts_of; print(parts_of.counted(3))") == "6.0"


def test_a_changed_source_is_compiled_anew(folder):
    """Here one outside of the package, whose sources name the folder."""
    assert run(folder) == "15 1"
    (folder / "tiny.py").write_text(
        MODULE.replace("x + 1", "x + 20")
    )  # of another size: within a second, Python looks at that
    assert run(folder) == "72 1"


ERRORS = """
from tinygpt.kernels.cpu import jit

@jit.jit
def checked(x):
    if x > 3:
        raise ValueError("too much", x)
    return x

@jit.jit
def triple(x):
    return 3 * checked(x)
"""
RUN_ERRORS = """
from support.compiled import compiled_kernels
with compiled_kernels() as compiled:
    import tiny
    try:
        tiny.triple(4)
    except ValueError as error:
        print(error, len(compiled.names))
"""


def test_a_part_has_what_it_needs_of_python_compiled_and_read(folder):
    (folder / "tiny.py").write_text(ERRORS)
    for compiled in (1, 0):
        assert run(folder, RUN_ERRORS) == f"('too much', 4) {compiled}"


HASHES = """
from tinygpt.kernels.cpu import jit

@jit.jit
def hashes(text):
    found = {"king": 1, "queen": 2}
    return hash(text), hash("wolf"), found[text], hash(("king", 2))
"""
RUN_HASHES = """
from support.compiled import compiled_kernels
with compiled_kernels() as compiled:
    import tiny
    print(tiny.hashes("queen") == (hash("queen"), hash("wolf"), 2, hash(("king", 2))), len(compiled.names))
"""


def test_no_process_finds_the_secret_of_another_in_a_kernel(folder):
    """Python hashes texts by a secret of each process's own."""
    (folder / "tiny.py").write_text(HASHES)
    found = [run(folder, RUN_HASHES, PYTHONHASHSEED=seed) for seed in ("1", "2", "random")]
    assert found == ["True 1", "True 0", "True 0"]


def last_field(record):
    return record[-1]


def test_a_kernel_is_told_where_it_compiles_and_waited_for_wherever_it_comes_from(tmp_path, monkeypatch):
    files = KernelFiles(tmp_path)
    monkeypatch.setattr(jit, "kernel_files", lambda: files)
    for expected in (["last_field"], []):  # compiled, and read
        clock, function = CompileClock(), jit.jit(last_field)
        with clock.watching(), compiled_kernels() as compiled:
            assert function((1, 2)) == 2
        assert (compiled.names, compiled.num_open) == (expected, 0)
        assert clock.seconds(0, math.inf) > 0
        with (clock := CompileClock()).watching():
            assert function((3, 4)) == 4  # there it is
        assert clock.seconds(0, math.inf) == 0


def test_functions_of_others_are_none_of_our_business():
    with compiled_kernels() as compiled:
        assert numba.njit(last_field)((1, 2)) == 2
    assert not compiled.names


def test_a_thread_waits_for_what_another_compiles(monkeypatch, tmp_path):
    files, clock, is_waiting, now = KernelFiles(tmp_path), CompileClock(), threading.Event(), [0.0]
    monkeypatch.setattr(jit, "kernel_files", lambda: files)
    monkeypatch.setattr(compiling, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    begin_wait = compiling.begin_wait

    def begin():
        begin_wait()
        if threading.current_thread() is thread:
            is_waiting.set()

    def call():
        with clock.watching():
            jit.jit(last_field)((1, 2))

    thread = threading.Thread(target=call)
    monkeypatch.setattr(compiling, "begin_wait", begin)
    with global_compiler_lock:
        thread.start()
        assert is_waiting.wait(60)
        now[0] = 5.0
    thread.join()
    assert clock.seconds(0, math.inf) == 5


def test_arguments_that_look_alike_are_told_apart(compiled):
    """Two classes of one name, with fields of one type, are one and the same in Numba's words."""
    first, second = namedtuple("Record", "a b"), namedtuple("Record", "c d")
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
    assert not KernelFiles(tmp_path).names()


def test_what_numba_cannot_take_apart_runs_all_the_same(compiled, tmp_path, monkeypatch, caplog):
    """As it may be with a version of Numba to come."""
    monkeypatch.setattr(compiler.CompileResult, "_reduce", lambda result: 1 / 0)
    assert jit.jit(last_field)((1, 2)) == 2
    assert not KernelFiles(tmp_path).names()
    assert str(tmp_path) in caplog.text
    monkeypatch.undo()


def test_what_numba_cannot_put_together_is_compiled_again(compiled, monkeypatch):
    assert jit.jit(last_field)((1, 2)) == 2
    with monkeypatch.context() as patch:
        patch.setattr(compiler.CompileResult, "_rebuild", classmethod(lambda cls, *parts: 1 / 0))
        assert jit.jit(last_field)((1, 2)) == 2
    assert len(compiled) == 2
    assert jit.jit(last_field)((1, 2)) == 2
    assert len(compiled) == 2


def test_numba_has_what_the_cache_is_made_of():
    """Numba promises none of it. Where this fails, kernels run, and every process compiles them."""
    plain, ours = numba.njit(last_field), jit.jit(last_field)
    assert isinstance(plain._cache, caching.NullCache), "Numba keeps a function's cache elsewhere than in _cache"
    asked = caching._Cache.__abstractmethods__
    assert asked <= {*dir(DiskCache)}, f"Numba asks more of a cache: {asked - {*dir(DiskCache)}}"
    assert {"_reduce", "_rebuild"} <= {*dir(compiler.CompileResult)}, "Numba takes compiled functions apart otherwise"
    assert plain.targetctx.codegen().magic_tuple(), "Numba describes the machine otherwise"
    assert callable(rtsys.initialize), "Numba starts what compiled code calls otherwise"
    assert ours.stats.cache_path == str(jit.cache_folder().path), "Numba asks its cache for nothing"
