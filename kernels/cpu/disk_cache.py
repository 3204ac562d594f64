"""Compiled CPU kernels on disk, in place of Numba's own cache.

Numba's looks at the file alone that holds a kernel, and would keep a callee that has changed in another one; it files
kernels by the folder of their sources; and it unpickles whatever it finds.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import binding
from numba.core import sigutils
from numba.core.compiler import CompileResult
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from tinygpt.kernels.kernel_files import KernelFiles

SOURCES = Path(__file__).resolve().parent


class DiskCache:
    """What Numba asks before it compiles a function, and tells when it has."""

    def __init__(self, function: Callable, find_files: Callable[[], KernelFiles]):
        self._function = function
        self._find_files = find_files

    def load_overload(self, signature: Any, target_context: Any) -> CompileResult | None:
        """The compiled function for arguments of these types, or None."""
        # Numba's cache fills the registries here, which a compiler alone asks, and fills them.
        name = self._name(signature, target_context.codegen())
        if name is None:
            return None
        result = self._load(name, signature, target_context)
        if result is None:
            self._find_files().claim(name)
            result = self._load(name, signature, target_context)
            if result is not None:
                self._find_files().end_claim()
        return result

    def save_overload(self, signature: Any, result: CompileResult) -> None:
        name = self._name(signature, result.codegen)
        if name is not None and not result.library.has_dynamic_globals:  # addresses, which are of this process alone
            self._find_files().save_object(name, lambda: dumps(_for_python(result._reduce())))
        self._find_files().end_claim()

    def _load(self, name: str, signature: Any, target_context: Any) -> CompileResult | None:
        result = self._find_files().load_object(name, lambda parts: _rebuilt(target_context, parts))
        # Two types may look the same in words.
        is_it = result is not None and result.signature.args == sigutils.normalize_signature(signature)[0]
        return result if is_it else None

    @property
    def cache_path(self) -> str | None:
        folder = self._find_files().folder
        return None if folder is None else str(folder)

    def flush(self) -> None:
        """There is nothing to forget: a file that is there is right."""

    def enable(self) -> None:
        """It is never disabled."""

    def disable(self) -> None:
        raise NotImplementedError("kernels are compiled with this cache or without any")

    def _name(self, signature: Any, codegen: Any) -> str | None:
        """The name of the file; None for what another process would not know again."""
        function = self._function
        source = _digest_of(function.__code__.co_filename)
        known = repr((function.__module__, function.__qualname__, function.__code__.co_firstlineno, source, signature))
        if source is None or function.__closure__ or " at 0x" in known:
            return None
        digest = hashlib.sha256(f"{known} {codegen.magic_tuple()}".encode()).hexdigest()[:32]
        return f"{function.__name__.strip('<>')}-{digest}.kernel"


def _rebuilt(target_context: Any, parts: tuple) -> CompileResult:
    """The compiled function. Where it calls Numba's runtime, that is made first: LLVM compiles it, which takes as long
    as all else to read a step."""
    (_, _, (machine_code, _)), *_ = parts
    if b"NRT_" in machine_code:
        rtsys.initialize(target_context)
    return CompileResult._rebuild(target_context, *parts)


def _for_python(reduced: tuple) -> tuple:
    """What is kept of a compiled function, without what others would link: nothing calls a kernel but Python.

    Beside the machine code, Numba keeps all functions in LLVM's language. To list them took half the time in which a
    step is read from the disk; the two that Python looks for are left.
    """
    (library, kind, (machine_code, _)), descriptor, *rest = reduced
    names = descriptor.llvm_func_name, descriptor.llvm_cpython_wrapper_name
    stubs = "".join(f'define void @"{name}"() {{ unreachable }}\n' for name in names)
    return (library, kind, (machine_code, binding.parse_assembly(stubs).as_bitcode())), descriptor, *rest


@functools.cache
def _digest_of(file: str) -> str | None:
    """What stands for a function's source beside the folder's name, which stands for all sources in this package."""
    path = Path(file).resolve()
    try:
        return "" if path.is_relative_to(SOURCES) else hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:  # typed in, for one
        return None
