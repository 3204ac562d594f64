"""Compiled CPU kernels on disk: a run finds those of earlier ones, and no file that it finds can harm it."""

import os
import pickle
import runpy
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core import caching, compiler

from support.paths import ROOT
from tinygpt.kernels.cpu import jit
from tinygpt.kernels.cpu.disk_cache import DiskCache
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
from tinygpt.kernels.cpu import jit
compiled = []
with jit.on_compilation(lambda: compiled.append(1)):
    import tiny
    print(tiny.triple(4), len(compiled))
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with a module, `tiny.py`, whose kernels are kept in `cache` beside it."""
    (tmp_path / "tiny.py").write_text(MODULE)
    return tmp_path


@pytest.fixture
def compiled(tmp_path, monkeypatch) -> list[int]:
    """How many kernels this test's have compiled; they are kept in a folder of its own."""
    files, compiled = KernelFiles(tmp_path), []
    monkeypatch.setattr(jit, "kernel_files", lambda: files)
    with jit.on_compilation(lambda: compiled.append(1)):
        yield compiled


def start(folder: Path, code: str = RUN, root: Path = ROOT, **environment: str) -> subprocess.Popen:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "XDG_"))}
    places = {
        "NUMBA_CACHE_DIR": str(folder / "cache"),
        "TMPDIR": str(folder),
        "PYTHONPATH": os.pathsep.join((str(folder), str(root))),
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
        assert (triple_of_four(folder), len(compiled)) == (15, 2 * (i + 2)), name
    assert (triple_of_four(folder), len(compiled)) == (15, 12)
    assert not (folder / "exploded").exists()


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


def test_copies_of_the_same_sources_share_kernels(folder, tmp_path):
    for name in ("tinygpt", "kernels", "weights"):
        skip = shutil.ignore_patterns("__pycache__", "demo")
        shutil.copytree(ROOT / name, tmp_path / "copy" / name, ignore=skip)
    shutil.copy(ROOT / "setup.cfg", tmp_path / "copy")
    draw = RUN.replace("import tiny", "from tinygpt.kernels.cpu.sampling import philox").replace(
        "tiny.triple(4)", "philox.__file__, philox.uniform(*np.ones(3, np.uint64))"
    )
    draw = f"import numpy as np{draw}"
    here, drawn, compiled = run(folder, draw).rsplit(maxsplit=2)
    assert int(compiled) > 0
    there, drawn_there, compiled_there = run(folder, draw, root=tmp_path / "copy").rsplit(maxsplit=2)
    assert (drawn_there, compiled_there) == (drawn, "0")
    assert here == str(ROOT / "kernels" / "cpu" / "sampling" / "philox.py")
    assert there == str(tmp_path / "copy" / "kernels" / "cpu" / "sampling" / "philox.py")


def test_two_processes_that_compile_at_once_agree(folder):
    both = [start(folder) for _ in range(2)]
    results = [process.communicate() for process in both]
    assert all(out.startswith("15 ") and not err for out, err in results)
    assert run(folder) == "15 0"


def test_a_changed_source_is_compiled_anew(folder):
    """Here one outside of the package, whose sources name the folder."""
    assert run(folder) == "15 2"
    (folder / "tiny.py").write_text(MODULE.replace("x + 1", "x + 2"))
    assert run(folder) == "18 2"


def last_field(record):
    return record[-1]


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
    assert ours.stats.cache_path == str(jit.cache_folder().path), "Numba asks its cache for nothing"
