"""Compiles CUDA kernels for an H200 on a machine without a GPU, and says what each thread needs."""

import functools
import pickle
import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tinygpt.kernels.kernel_cache import FunctionCache, KernelCache, fingerprint, open_cache

ARCHITECTURE = (9, 0, "a")  # what numba-cuda compiles for where it finds a GPU of compute capability 9.0


@dataclass(frozen=True)
class Compiled:
    """A kernel for arguments of some types. spilled: bytes of a thread's registers that went to memory."""

    about: tuple  # kernel, signature, architecture

    target = property(lambda self: self._used(r"for '(\w+)'")[1])
    registers = property(lambda self: int(self._used(r"Used (\d+) registers")[1]))
    spilled = property(lambda self: int(self._used(r"(\d+) bytes spill stores")[1]))
    stack = property(lambda self: int(self._used(r"(\d+) bytes stack frame")[1]))
    shared_bytes = property(lambda self: int((self._used(r"(\d+) bytes smem") or [0, 0])[1]))

    @property
    def ptx(self) -> str:
        return linked_ptx(*self.about)

    def _used(self, pattern: str) -> re.Match | None:
        return re.search(pattern, _log(*self.about))


def need_toolchain() -> None:
    """Skip the test where numba-cuda, libNVVM or nvJitLink is absent."""
    for module in ("numba_cuda", "cuda.bindings.nvjitlink"):
        pytest.importorskip(module, reason="needs pip install '.[cuda]': it compiles without a GPU")


def compile_kernel(kernel, *arguments, architecture: tuple = ARCHITECTURE) -> Compiled:
    """Compile for arguments like these: flat arrays, NumPy's and Python's numbers (int is int32)."""
    return Compiled((kernel, signature_of(arguments), architecture))


def llvm_of(kernel, *arguments) -> str:
    """What libNVVM is given."""
    return _library(kernel, signature_of(arguments), ARCHITECTURE).get_llvm_str()


def kept(make: Callable) -> Callable:
    """Keep a text made of a kernel, which takes seconds: in memory, and on disk for other workers and later runs."""

    @functools.cache
    def text_of(kernel, signature: tuple, architecture: tuple) -> str:
        function = kernel.py_func
        if not function.__module__.startswith("tinygpt.kernels.cuda"):  # texts() does not know its source
            return make(kernel, signature, architecture)
        from tinygpt.kernels.cuda.jit import describe

        known = f"{make.__name__} {describe(function)} {kernel.targetoptions} {signature} {architecture}"
        name = FunctionCache(function).file_name(known)
        text = texts().load(name, lambda body: zlib.decompress(body).decode())
        if text is None:
            text = make(kernel, signature, architecture)
            texts().save(name, lambda: pickle.dumps(zlib.compress(text.encode())))
        return text

    return text_of


@functools.cache
def texts() -> KernelCache:
    from tinygpt.kernels.cuda.jit import SOURCES

    installed = sorted(f"{each.name} {each.version}" for each in metadata.distributions())
    build = installed, sys.version, Path(__file__).read_bytes()
    return open_cache(f"ptx-{fingerprint(SOURCES.parent, build)}")


def _library(kernel, signature: tuple, architecture: tuple):
    """Lower a kernel as `cuda.compile` does."""
    from numba.cuda import compiler, dispatcher

    # Device functions ask the driver which GPU they are for.
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=architecture)
    options = {"cc": architecture, "device": False, "abi": "numba", "lineinfo": True}
    options["launch_bounds"] = kernel.targetoptions.get("launch_bounds")
    library, _ = compiler._compile_pyfunc_with_fixup(kernel.py_func, signature, **options)
    return library


@kept
def _ltoir(*about) -> str:
    """Return the bytes that are linked, as characters: of them both a log and PTX are made."""
    return _library(*about).get_ltoir(cc=about[-1]).decode("latin-1")


@kept
def _log(*about) -> str:
    return _link(*about)[0]


@kept
def linked_ptx(*about) -> str:
    """Return the PTX after link-time optimization, of which a GPU's program is assembled."""
    return _link(*about, options=("-ptx",))[1]


def _link(*about, options: tuple[str, ...] = ()) -> tuple[str, str]:
    """Return the log, and PTX if an option asks for it."""
    from cuda.bindings import nvjitlink

    ltoir = _ltoir(*about).encode("latin-1")
    options = (f"-arch={sm(about[-1])}", "-lto", "-verbose", *options)
    handle = nvjitlink.create(len(options), options)
    nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, ltoir, len(ltoir), "kernel")
    nvjitlink.complete(handle)
    log = bytearray(nvjitlink.get_info_log_size(handle))
    ptx = bytearray()
    nvjitlink.get_info_log(handle, log)
    if "-ptx" in options:
        ptx = bytearray(nvjitlink.get_linked_ptx_size(handle))
        nvjitlink.get_linked_ptx(handle, ptx)
    nvjitlink.destroy(handle)
    return log.decode(errors="replace"), ptx.rstrip(b"\0").decode()


def sm(architecture: tuple) -> str:
    return "sm_" + "".join(map(str, architecture))


def signature_of(arguments: tuple) -> tuple:
    return tuple(map(_type_of, arguments))


def _type_of(argument):
    from numba import types
    from numba.np import numpy_support

    if isinstance(argument, tuple):
        return types.NamedTuple([_type_of(part) for part in argument], type(argument))
    if isinstance(argument, np.ndarray):
        return types.Array(numpy_support.from_dtype(argument.dtype), 1, "C")
    if isinstance(argument, int):
        return types.int32
    return numpy_support.from_dtype(np.dtype(type(argument)))
