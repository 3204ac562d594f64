"""Compiled CUDA kernels on disk: two kernels are never taken for one another, nor one for two."""

import itertools
import subprocess
import sys
from types import SimpleNamespace

import pytest

from support.paths import ROOT
from tinygpt.kernels.cuda.layers.attention import attend_decode_kernel, attend_prefill_kernel
from tinygpt.kernels.cuda.layers.epilogue import ADD, LOGITS, QKV
from tinygpt.kernels.cuda.layers.gemm import TILES, gemm_kernel
from tinygpt.kernels.cuda.layers.linear import linear_kernel, normed_linear_kernel
from tinygpt.kernels.cuda.layers.rows import layer_norm_kernel
from tinygpt.kernels.cuda.runtime import jit
from tinygpt.kernels.cuda.runtime.jit import DiskCache, describe
from tinygpt.kernels.kernel_cache import KernelCache

EPILOGUES = (ADD, LOGITS, QKV, "gelu_tanh", "relu")


def kernels():
    for dtype, epilogue in itertools.product(("bfloat16", "int8"), EPILOGUES):
        yield normed_linear_kernel(dtype, 768, epilogue)
        yield from (gemm_kernel(dtype, tile, epilogue) for tile in TILES)
        yield from (linear_kernel(dtype, tiles, epilogue) for tiles in (1, 2, 4))
    yield from (linear_kernel("float32", 1, epilogue) for epilogue in EPILOGUES)
    for dtype in ("float32", "bfloat16"):
        yield from (layer_norm_kernel(dtype, columns) for columns in (768, 1024))
        yield from (make(size, dtype) for size in (64, 96) for make in (attend_decode_kernel, attend_prefill_kernel))


def test_each_kernel_has_a_description_of_its_own():
    found = [describe(kernel.py_func) for kernel in kernels()]
    assert len(found) > 100
    assert len(set(found)) == len(found)
    assert not any(" at 0x" in text for text in found)


def test_a_description_is_the_same_in_another_process():
    script = (
        "from tinygpt.kernels.cuda.layers.gemm import TILES, gemm_kernel;"
        "from tinygpt.kernels.cuda.runtime.jit import describe;"
        "print(describe(gemm_kernel('int8', TILES[0], 'relu').py_func))"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == describe(gemm_kernel("int8", TILES[0], "relu").py_func)


class FakeKernel:
    """As far as the cache sees numba-cuda's."""

    def __init__(self, **states):
        self.states = states

    def _reduce_states(self):
        return self.states

    @classmethod
    def _rebuild(cls, **states):
        return cls(**states)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> DiskCache:
    pytest.importorskip("numba_cuda", reason="needs pip install '.[cuda]'")
    from numba import cuda
    from numba.cuda import dispatcher

    files = KernelCache(tmp_path)
    monkeypatch.setattr(jit, "kernel_cache", lambda: files)
    monkeypatch.setattr(dispatcher, "_Kernel", FakeKernel)
    monkeypatch.setattr(cuda, "get_current_device", lambda: SimpleNamespace(compute_capability=(9, 0)))
    return DiskCache(linear_kernel("int8", 1, ADD).py_func)


def test_what_was_saved_is_loaded_for_the_same_types_alone(cache, tmp_path):
    assert cache.load_overload("types", None) is None
    cache.save_overload("types", FakeKernel(name="compiled", size=3))
    assert cache.load_overload("types", None).states == {"name": "compiled", "size": 3}
    assert cache.load_overload("other types", None) is None
    assert DiskCache(linear_kernel("int8", 1, LOGITS).py_func).load_overload("types", None) is None
    assert len(KernelCache(tmp_path).names()) == 1


def test_a_damaged_file_is_compiled_again(cache, tmp_path):
    cache.save_overload("types", FakeKernel(name="compiled"))
    (file,) = tmp_path.glob("*.kernel")
    file.write_bytes(file.read_bytes()[:-5])
    assert cache.load_overload("types", None) is None


def test_what_cannot_be_taken_apart_runs_all_the_same(cache, tmp_path, caplog):
    cache.save_overload("types", FakeKernel(name=lambda: 0, stuck=(number for number in range(3))))
    assert not KernelCache(tmp_path).names()
    assert str(tmp_path) in caplog.text
