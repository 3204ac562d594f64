"""What `generate` says where kernels compile, where they are kept, and which threads it sets."""

import io
import os
import re
import sys

import numba
import pytest

from tinygpt.cli import loading
from tinygpt.cli.messages import elapsed
from tinygpt.kernels import cpu as kernels
from tinygpt.kernels.cpu import jit

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


def test_a_mark_that_cannot_be_kept_is_no_error(run, monkeypatch, tmp_path):
    monkeypatch.setattr(jit, "cache_folder", lambda: jit.CacheFolder(tmp_path / "absent"))
    assert run("Once --max-tokens 1").code == 0


def test_a_cache_in_an_unusual_place_is_mentioned(run, monkeypatch, tmp_path):
    monkeypatch.setattr(jit, "cache_folder", lambda: jit.CacheFolder(tmp_path, "kept elsewhere"))
    assert "tinygpt: kept elsewhere\n" in run("Once --max-tokens 1").err


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
