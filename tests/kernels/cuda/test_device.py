"""What may be missing where kernels are to run, and what a kernel is granted: with no GPU."""

import threading

import numpy as np
import pytest

from tinygpt.kernels.cuda.runtime import jit
from tinygpt.kernels.cuda.runtime.device import Device, let_kernels_begin_early
from tinygpt.kernels.cuda.runtime.jit import DeviceError, need_compilers


def missing(*arguments):
    raise RuntimeError('Failure finding "nvvm"')  # cuda-pathfinder's error is one


@pytest.mark.toolchain
def test_the_compilers_here_will_do():
    need_compilers()


@pytest.mark.toolchain
@pytest.mark.parametrize(
    ("module", "name", "answer", "message"),
    [
        ("numba.cuda.cudadrv.nvvm", "is_available", missing, "libNVVM, which compiles kernels, is not found: pip inst"),
        ("numba.cuda.cudadrv.libs", "get_libdevice", lambda: None, r"libdevice\.10\.bc, .* is not found: pip install"),
        ("cuda.bindings.nvjitlink", "version", missing, "nvJitLink, which links kernels, is not found: pip install"),
    ],
)
def test_a_missing_compiler_is_refused_in_a_sentence(monkeypatch, module, name, answer, message):
    monkeypatch.setattr(f"{module}.{name}", answer)
    with pytest.raises(DeviceError, match=message):
        need_compilers()


@pytest.mark.toolchain
def test_a_linker_older_than_the_compiler_is_refused_in_a_sentence(monkeypatch):
    from cuda.bindings import nvjitlink

    major, minor = compiler = jit.release_of_libnvvm()
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
    device._lock, device._stream, device._granted, device.grants = threading.RLock(), "stream", {}, []
    monkeypatch.setattr(Device, "_grant", lambda self, *what: self.grants.append(what))
    return device


def test_what_a_launch_asks_for_is_granted_beside_what_the_kernel_has_of_its_own(device):
    """The 48 KiB that need no grant are for both, and of the kernel's own share the launch knows nothing."""
    kernel = Kernel()
    for shared_bytes in (0, 33 << 10):
        device.launch(kernel, 3, 64, 7, shared_bytes=shared_bytes)
    assert kernel.launches == [((3,), 64, "stream", 0, np.int32(7)), ((3,), 64, "stream", 33 << 10, np.int32(7))]
    assert [(granted, size) for granted, _, size in device.grants] == [(kernel, 33 << 10)]


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
    monkeypatch.setattr(driver, "cuGraphRemoveDependencies", lambda *given: calls.append(("remove", *given)) or (ok,))
    monkeypatch.setattr(driver, "cuGraphAddDependencies", lambda *given: calls.append(("add", *given)) or (ok,))
    let_kernels_begin_early("graph")
    if not count:
        assert calls == []
        return
    (*removed, old, _), (*added, new, size) = calls
    assert removed == ["remove", "graph", *edges[:2]]
    assert added == ["add", "graph", *edges[:2]]
    assert old is plain
    assert size == len(new) == count
    assert {(edge.type, edge.from_port, edge.to_port) for edge in new} == {(1, 1, 0)}  # cuda.h: both PROGRAMMATIC
