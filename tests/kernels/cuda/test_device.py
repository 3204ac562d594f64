"""What may be missing where kernels are to run, and what a kernel is granted: with no GPU."""

import itertools
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda, float32, int32

from support.cuda_compile import compile_kernel, llvm_of
from support.cuda_device import INTS
from support.paths import ROOT
from tinygpt.kernels import numbers
from tinygpt.kernels.backend import DeviceError
from tinygpt.kernels.cuda import check_model, jit
from tinygpt.kernels.cuda.device import (
    MAX_GRAPHS,
    Device,
    Graphs,
    NewKernel,
    let_kernels_begin_early,
    need_compilers,
    release_of_libnvvm,
)
from tinygpt.kernels.cuda.jit import (
    BF16,
    DiskCache,
    describe,
    kernel,
    let_next_kernel_begin,
    prefetch_run,
    wait_for_kernel_before,
)
from tinygpt.kernels.cuda.layers.attention import attend_decode_kernel, attend_prefill_kernel
from tinygpt.kernels.cuda.layers.epilogue import ACTIVATIONS, ADD, LOGITS, QKV
from tinygpt.kernels.cuda.layers.gemm import gemm_kernel
from tinygpt.kernels.cuda.layers.linear import linear_kernel, normed_linear_kernel
from tinygpt.kernels.cuda.layers.rows import layer_norm_kernel
from tinygpt.kernels.cuda.layers.tiles import FMA_TILES, MMA_TILES
from tinygpt.kernels.kernel_cache import KernelCache
from tinygpt.weights.config import ModelConfig


def test_an_activation_without_a_kernel_is_refused_by_name(monkeypatch):
    monkeypatch.delitem(ACTIVATIONS, "gelu_tanh")
    with pytest.raises(DeviceError, match="has the activation gelu_tanh, which no kernel for a GPU computes"):
        check_model(ModelConfig())


def test_the_graph_that_was_used_longest_ago_makes_room():
    captured = []
    graphs = Graphs(SimpleNamespace(capture=lambda step: captured.append(step()) or (lambda: None)))
    for kind in (*range(MAX_GRAPHS), 0, MAX_GRAPHS, 0, 1):
        graphs.run(kind, lambda kind=kind: kind)
    assert captured == [*range(MAX_GRAPHS + 1), 1]


def missing(*arguments):
    raise RuntimeError('Failure finding "nvvm"')  # cuda-pathfinder's error is one


@pytest.mark.toolchain
def test_the_compilers_here_will_do():
    need_compilers()


@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("module", "name", "answer", "message"),
    [
        (
            "numba.cuda.cudadrv.nvvm",
            "is_available",
            missing,
            "libNVVM, which compiles kernels, is not found: pip inst",
        ),
        (
            "numba.cuda.cudadrv.libs",
            "get_libdevice",
            lambda: None,
            r"libdevice\.10\.bc, .* is not found: pip install",
        ),
        (
            "cuda.bindings.nvjitlink",
            "version",
            missing,
            "nvJitLink, which links kernels, is not found: pip install",
        ),
    ],
)
def test_a_missing_compiler_is_refused_in_a_sentence(monkeypatch, module, name, answer, message):
    monkeypatch.setattr(f"{module}.{name}", answer)
    with pytest.raises(DeviceError, match=message):
        need_compilers()


@pytest.mark.toolchain
def test_a_linker_older_than_the_compiler_is_refused_in_a_sentence(monkeypatch):
    from cuda.bindings import nvjitlink

    major, minor = compiler = release_of_libnvvm()
    monkeypatch.setattr(nvjitlink, "version", lambda: compiler)
    need_compilers()
    monkeypatch.setattr(nvjitlink, "version", lambda: (major - 1, 9))
    found = rf"libNVVM is of CUDA {major}\.{minor} and nvJitLink of {major - 1}\.9"
    with pytest.raises(DeviceError, match=rf"{found}, .*: pip install 'nvidia-nvvm=={major - 1}\.9\.\*'"):
        need_compilers()


class Kernel:
    """Can be launched as a compiled one."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, launch):
        return lambda *arguments: self.launches.append((*launch, *arguments))


@pytest.fixture
def device(monkeypatch) -> Device:
    """One whose driver is never asked; `grants` is what would be."""
    device = object.__new__(Device)
    device._turn = threading.RLock()
    device._stream = "stream"
    device._granted = {}
    device._is_capturing = False
    device.grants = []
    monkeypatch.setattr(Device, "_grant", lambda self, *what: self.grants.append(what))
    return device


def test_what_a_launch_asks_for_is_granted_beside_what_the_kernel_has_of_its_own(device):
    """The 48 KiB that need no grant are for both, and of the kernel's own share the launch knows nothing."""
    kernel = Kernel()
    for shared_bytes in (0, 33 << 10):
        device.launch(kernel, 3, 64, 7, shared_bytes=shared_bytes)
    assert kernel.launches == [
        ((3,), 64, "stream", 0, np.int32(7)),
        ((3,), 64, "stream", 33 << 10, np.int32(7)),
    ]
    assert [(granted, size) for granted, _, size in device.grants] == [(kernel, 33 << 10)]


def test_a_kernel_that_failed_to_start_is_not_captured(device):
    """As by Ctrl-C while it is compiled."""
    kernel = Kernel()
    launches, kernel.launches = kernel.launches, None
    with pytest.raises(AttributeError):
        device.launch(kernel, 1, 1)
    kernel.launches = launches
    device._is_capturing = True
    with pytest.raises(NewKernel):
        device.launch(kernel, 1, 1)


@pytest.mark.parametrize("reads_the_host", [False, True])
def test_written_values_may_change_after_the_return(device, reads_the_host):
    """A GPU that reads a process's memory itself copies when the stream comes to it."""
    under_way = []
    copy = SimpleNamespace(
        cuMemcpyHtoDAsync=lambda *places: under_way.append(places) or (SimpleNamespace(value=0),)
    )
    device._driver = copy
    device._stream = SimpleNamespace(synchronize=under_way.clear)
    device._stream_handle = 0
    device._reads_the_host = reads_the_host
    target = SimpleNamespace(
        dtype=np.dtype(np.int32), size=2, device_ctypes_pointer=SimpleNamespace(value=4096)
    )
    device.write(target, np.zeros(2, np.int32))
    assert len(under_way) == (not reads_the_host)


@pytest.mark.toolchain
def test_a_cached_kernel_has_the_constants_of_numbers(monkeypatch):
    monkeypatch.setattr(jit, "fingerprint", lambda sources, build, *others: others)
    monkeypatch.setattr(jit, "open_cache", str)
    assert str(Path(numbers.__file__).resolve()) in jit.kernel_cache.__wrapped__()


@pytest.mark.toolchain
@pytest.mark.parametrize("count", [0, 2])
def test_a_graphs_kernels_depend_on_one_another_so_that_each_may_begin_early(monkeypatch, count):
    from cuda.bindings import driver

    ok, calls = driver.CUresult.CUDA_SUCCESS, []
    nodes = [driver.CUgraphNode(number) for number in range(1, 4)]
    plain = [driver.CUgraphEdgeData() for _ in range(count)]
    edges = nodes[:count], nodes[1 : count + 1], plain

    def get(graph, size=0):
        return (ok, *edges, count) if size else (ok, [], [], [], count)

    monkeypatch.setattr(driver, "cuGraphGetEdges", get)
    monkeypatch.setattr(
        driver, "cuGraphRemoveDependencies", lambda *given: calls.append(("remove", *given)) or (ok,)
    )
    monkeypatch.setattr(
        driver, "cuGraphAddDependencies", lambda *given: calls.append(("add", *given)) or (ok,)
    )
    let_kernels_begin_early("graph")
    if not count:
        assert calls == []
        return
    (*removed, old, _), (*added, new, size) = calls
    assert removed == ["remove", "graph", *edges[:2]]
    assert added == ["add", "graph", *edges[:2]]
    assert old is plain
    assert size == len(new) == count
    kinds = {(edge.type, edge.from_port, edge.to_port) for edge in new}
    assert kinds == {(1, 1, 0)}  # cuda.h: both PROGRAMMATIC


@pytest.mark.toolchain
def test_a_driver_that_refuses_such_edges_keeps_the_plain_ones(monkeypatch):
    from cuda.bindings import driver

    edges = ["before"]
    refused = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    plain, kept = [driver.CUgraphEdgeData()], []

    def add(graph, before, after, given, count):
        kept[:] = given if given is plain else kept
        return (driver.CUresult.CUDA_SUCCESS if given is plain else refused,)

    ok = driver.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(driver, "cuGraphGetEdges", lambda graph, size=0: (ok, edges, ["after"], plain, 1))
    monkeypatch.setattr(driver, "cuGraphRemoveDependencies", lambda *given: (ok,))
    monkeypatch.setattr(driver, "cuGraphAddDependencies", add)
    let_kernels_begin_early("graph")
    assert kept == plain


# The toolchain that the compile checks of the other files rely on.


mma = BF16.mma


@kernel
def partly_wanted(out, words, few):
    lane = int32(cuda.threadIdx.x)
    a = words[lane]
    b = words[lane + 32]
    zero = float32(0)
    c = mma((a, b, a, b), (a, b), (zero, zero, zero, zero))
    if lane < few:
        out[lane] = c[0]


@kernel
def begins_early(counts, words):
    let_next_kernel_begin()
    wait_for_kernel_before()
    prefetch_run(words, 0, 64)
    counts[0] = 1


@pytest.mark.toolchain
@pytest.mark.parametrize(("architecture", "count"), [((8, 6), 0), ((9, 0, "a"), 3), ((12, 0), 3)])
def test_what_a_gpu_lacks_is_left_out(architecture, count):
    ptx = compile_kernel(begins_early, INTS, np.zeros(4, np.uint32), architecture=architecture).ptx
    assert len(re.findall(r"griddepcontrol|cp\.async\.bulk", ptx)) == count


@pytest.mark.toolchain
def test_a_warp_multiplies_together_even_where_few_lanes_want_the_product():
    """Without `convergent`, the compiler may move an mma to where its result is wanted: past the branch."""
    arguments = np.zeros(4, np.float32), np.zeros(4, np.uint32), 3
    (product,) = (line for line in llvm_of(partly_wanted, *arguments).splitlines() if "mma.sync" in line)
    assert "convergent" in product
    ptx = compile_kernel(partly_wanted, *arguments).ptx
    assert ptx.count("mma.sync") == 1
    assert ptx.index("mma.sync") < ptx.index("bra ")


# Compiled kernels on disk: two are never taken for one another, nor one for two.

EPILOGUES = (ADD, LOGITS, QKV, "gelu_tanh", "relu")


def kernels():
    for dtype, epilogue in itertools.product(("bfloat16", "int8"), EPILOGUES):
        yield normed_linear_kernel(dtype, 768, epilogue)
        yield from (gemm_kernel(dtype, tile, epilogue) for tile in MMA_TILES)
        yield from (linear_kernel(dtype, octets, epilogue, 2) for octets in (1, 2, 4, 8))
    yield from (linear_kernel("float32", 1, epilogue, 1) for epilogue in EPILOGUES)
    yield from (gemm_kernel("float32", tile, epilogue) for tile in FMA_TILES for epilogue in EPILOGUES)
    for dtype in ("float32", "bfloat16"):
        yield from (layer_norm_kernel(dtype, columns) for columns in (768, 1024))
        yield from (
            make(size, dtype) for size in (64, 96) for make in (attend_decode_kernel, attend_prefill_kernel)
        )


def test_each_kernel_has_a_description_of_its_own():
    found = [describe(kernel.py_func) for kernel in kernels()]
    assert len(found) > 90
    assert len(set(found)) == len(found)
    assert not any(" at 0x" in text for text in found)


def test_a_description_is_the_same_in_another_process():
    script = (
        "from tinygpt.kernels.cuda.layers.gemm import gemm_kernel;"
        "from tinygpt.kernels.cuda.layers.tiles import MMA_TILES;"
        "from tinygpt.kernels.cuda.jit import describe;"
        "print(describe(gemm_kernel('int8', next(iter(MMA_TILES)), 'relu').py_func))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == describe(gemm_kernel("int8", next(iter(MMA_TILES)), "relu").py_func)


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
    return DiskCache(linear_kernel("int8", 1, ADD, 2).py_func)


def test_what_was_saved_is_loaded_for_the_same_types_alone(cache, tmp_path):
    assert cache.load_overload("types", None) is None
    cache.save_overload("types", FakeKernel(name="compiled", size=3))
    assert cache.load_overload("types", None).states == {"name": "compiled", "size": 3}
    assert cache.load_overload("other types", None) is None
    assert DiskCache(linear_kernel("int8", 1, LOGITS, 2).py_func).load_overload("types", None) is None
    assert len(KernelCache(tmp_path).names()) == 1


def test_what_cannot_be_taken_apart_runs_all_the_same(cache, tmp_path, caplog):
    cache.save_overload("types", FakeKernel(name=lambda: 0, stuck=(number for number in range(3))))
    assert not KernelCache(tmp_path).names()
    assert str(tmp_path) in caplog.text
