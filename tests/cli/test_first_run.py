"""What `generate` says where kernels compile, where they are kept, and which threads it sets."""

import errno
import io
import os
import re
import subprocess
import sys
import tempfile

import numba
import pytest

from tinygpt.cli import loading
from tinygpt.cli.messages import elapsed
from tinygpt.kernels import cpu as kernels
from tinygpt.kernels.cpu import jit
from tinygpt.kernels.kernel_files import KernelFiles

pytestmark = pytest.mark.usefixtures("llm")  # its kernels are compiled: stderr is free of the notice of a first run


def compile_a_kernel() -> None:
    numba.njit(lambda x: x)(1)


def test_the_first_run_says_that_it_compiles(run, monkeypatch):
    """From the loading on, where the weights are packed."""
    warm = run("Once --seed 7 --max-tokens 8")
    assert "compiling" not in warm.err
    forward, pack = kernels.forward, kernels.load_params
    monkeypatch.setattr(kernels, "load_params", lambda *weights: compile_a_kernel() or pack(*weights))
    cold = run("Once --seed 7 --max-tokens 8 --dtype float32")
    assert cold.err.startswith("tinygpt: compiling float32 kernels for this machine, once (10 to 20 s)\n")
    assert cold.err.count("compiling") == 1
    assert cold.out == warm.out
    monkeypatch.setattr(kernels, "load_params", pack)
    monkeypatch.setattr(kernels, "forward", lambda *step: compile_a_kernel() or forward(*step))
    monkeypatch.setattr(jit, "cache_is_cold", lambda name: True)
    assert run("Once --seed 7 --max-tokens 8").err.startswith("tinygpt: compiling kernels for this machine, once")
    assert "compiling" not in run("Once --max-tokens 600").err  # refused before


def test_no_notice_where_nothing_compiles(run, monkeypatch):
    monkeypatch.setattr(jit, "cache_is_cold", lambda name: True)
    assert "compiling" not in run("Once --max-tokens 2").err
    assert "compiling" not in run("Once --max-tokens 2 --device reference").err


class Processes:
    """The second processes that runs in this one start, as on a machine with two cores that never compiled."""

    def __init__(self, monkeypatch):
        self.started, self.start = [], subprocess.Popen
        monkeypatch.setattr(jit, "is_first_run", lambda: True)
        monkeypatch.setattr(loading, "thread_count", lambda threads=None: 2)
        monkeypatch.setattr(subprocess, "Popen", self.keep)

    def keep(self, *args, **options) -> subprocess.Popen:
        self.started.append(self.start(*args, **options))
        return self.started[-1]


def test_a_first_run_compiles_the_draw_in_a_second_process(run, monkeypatch):
    alone = run("Once --seed 7 --max-tokens 8")
    processes = Processes(monkeypatch)
    assert run("Once --seed 7 --max-tokens 8").out == alone.out
    assert [process.returncode for process in processes.started] == [0]
    assert run("Once --temperature 0 --max-tokens 2").code == 0  # draws nothing
    assert len(processes.started) == 1


def test_a_second_process_that_fails_is_not_missed(run, monkeypatch):
    alone = run("Once --seed 7 --max-tokens 8")
    processes = Processes(monkeypatch)
    monkeypatch.setattr(loading, "COMPILE_DRAW", "import sys; sys.exit('no {} {}')")
    failed = run("Once --seed 7 --max-tokens 8")
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    absent = run("Once --seed 7 --max-tokens 8")
    assert failed.out == absent.out == alone.out
    assert "no " not in failed.err
    assert [process.returncode for process in processes.started] == [1]


def test_no_second_process_outlives_the_first(run, monkeypatch):
    processes = Processes(monkeypatch)
    monkeypatch.setattr(loading, "COMPILE_DRAW", "import time; time.sleep(100); {} {}")
    assert run("Once --max-tokens 600").code == 2  # refused
    monkeypatch.setattr(loading, "PATIENCE", 0.1)
    assert run("Once --max-tokens 2").code == 0
    assert [process.poll() is None for process in processes.started] == [False, False]


def test_a_mark_that_cannot_be_kept_is_no_error(run, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(jit, "kernel_files", lambda: KernelFiles(tmp_path / "file"))
    assert run("Once --max-tokens 1").code == 0


def test_a_cache_in_an_unusual_place_is_mentioned(run, monkeypatch, tmp_path):
    monkeypatch.setattr(jit, "cache_folder", lambda: jit.CacheFolder(tmp_path, "kept elsewhere"))
    assert "tinygpt: kept elsewhere\n" in run("Once --max-tokens 1").err


def test_a_disk_that_takes_no_kernel_is_said_once_and_ends_no_run(run, monkeypatch, tmp_path):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def load_kernels():
        for number in range(3):
            files.save(f"{number}.kernel", b"code")
            assert files.load("damaged.kernel") is None

    pack, files = kernels.load_params, KernelFiles(tmp_path)
    files.save("damaged.kernel", b"code")
    monkeypatch.setattr(tempfile, "mkstemp", full)
    monkeypatch.setattr(kernels, "load_params", lambda *weights: load_kernels() or pack(*weights))
    said = f"tinygpt: compiled kernels cannot be kept in {tmp_path} (No space left on device); this run goes on\n"
    for flags, damage in (("", 0), (" --debug", 1)):
        files.is_keeping = True
        (tmp_path / "damaged.kernel").write_bytes(b"")
        result = run("Once --max-tokens 1" + flags)
        assert result.code == 0
        assert result.err.count(said) == 1
        assert result.err.count(f"tinygpt: {tmp_path / 'damaged.kernel'} is damaged") == damage


def test_a_terminal_shows_the_seconds(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with elapsed("waiting"):
        pass
    assert re.fullmatch(r"(\rtinygpt: waiting: [\d.]+ s)+\n", terminal.getvalue())


def test_threads_own_every_pool(monkeypatch):
    monkeypatch.delitem(sys.modules, "numba")
    for name in loading.THREAD_POOLS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    loading.set_thread_pools(None)
    pools = {name: os.environ[name] for name in loading.THREAD_POOLS}
    assert pools.pop("OMP_NUM_THREADS") == "3"
    assert set(pools.values()) == {str(loading.thread_count())}
    loading.set_thread_pools(7)
    assert {os.environ[name] for name in loading.THREAD_POOLS} == {"7"}
