"""Numba as the compiler of what jit.py declares: with parts, and with a cache that knows all sources."""

import functools
import hashlib
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite import binding
from numba import types
from numba.core import config, sigutils
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompilerBase, CompileResult, DefaultPassBuilder
from numba.core.errors import UnsupportedError
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys
from numba.core.serialize import dumps
from numba.extending import overload

from ..kernel_cache import FunctionCache, KernelCache, fingerprint, open_cache
from .native import HARMLESS, OTHERS, SOURCES
from .simd.targets import TARGET


class KernelCompiler(Compiler):
    def compile_extra(self, func) -> CompileResult:
        result = super().compile_extra(func)
        for environment in result._find_referenced_environments():  # parts need it to raise an error
            result.codegen.set_env(environment.env_name, environment)
        return result


class PartCompiler(CompilerBase):
    def define_pipelines(self) -> list:
        state = self.state
        state.flags.no_compile = True
        state.library = PartLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        return [DefaultPassBuilder.define_nopython_pipeline(state)]

    def compile_extra(self, func) -> CompileResult:
        result = super().compile_extra(func)
        key = [].append  # a unique built-in function
        self.state.targetctx.insert_user_function(key, result.fndesc, [result.library])
        return result._replace(entry_point=key)

    def compile_ir(self, func_ir, lifted=(), lifted_from=None) -> CompileResult:
        raise UnsupportedError("a part of a kernel has a block in object mode: put it into what Python calls")


class PartLibrary(JITCodeLibrary):
    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": False, "no_cfunc_wrapper": True}
KERNEL_OPTIONS = OPTIONS | {"pipeline_class": KernelCompiler}
PART_OPTIONS = OPTIONS | {"no_cpython_wrapper": True, "pipeline_class": PartCompiler}


def new_dispatcher(function: Callable, options: dict[str, Any]) -> Callable:
    """Return the function as Python calls it."""
    compiled = numba.njit(**KERNEL_OPTIONS, **options)(function)
    compiled._cache = DiskCache(function)
    return compiled


def new_part(function: Callable, options: dict[str, Any]) -> Callable:
    """Return the function as kernels call it."""
    return numba.njit(**PART_OPTIONS, **options)(function)


def new_choice(choices: dict[Any, Callable], otherwise: Callable | None, argument: int) -> Callable:
    """Return the function of jit.Choice."""

    def name_only(*arguments):
        raise NotImplementedError("only compiled code can call this")

    @overload(name_only, jit_options=PART_OPTIONS, strict=False)
    def choose(*argument_types):
        return choices.get(_key_of(argument_types[argument]), otherwise)

    return name_only


def _key_of(numba_type):
    if isinstance(numba_type, types.BaseNamedTuple):
        return numba_type.instance_class
    return None if numba_type == types.none else str(numba_type.dtype)


def type_of(function: Callable) -> types.Type:
    typing = cpu_target.typing_context
    typing.refresh()  # which takes in new functions
    return typing.resolve_value_type(function)


class DiskCache(FunctionCache):
    def load_overload(self, signature: Any, target_context: Any) -> CompileResult | None:
        result = None
        name = self._name(signature, target_context.codegen())
        if name is not None:
            result = kernel_cache().load(name, lambda parts: _rebuilt(target_context, parts))
        # Two types may have the same description.
        if result is not None and result.signature.args == sigutils.normalize_signature(signature)[0]:
            return result
        kernel_cache().announce(self._function.__name__)
        return None

    def save_overload(self, signature: Any, result: CompileResult) -> None:
        name = self._name(signature, result.codegen)
        if name is not None and not result.library.has_dynamic_globals:  # addresses of this process
            kernel_cache().save(name, lambda: dumps(_for_python(result._reduce())))

    @property
    def cache_path(self) -> str:
        return str(kernel_cache().folder)

    def enable(self) -> None:
        pass

    def disable(self) -> None:
        raise NotImplementedError("kernels are compiled with this cache or without any")

    def _name(self, signature: Any, codegen: Any) -> str | None:
        """Return the file's name, or None if another process would not find the kernel by it."""
        function = self._function
        source = _digest_of(function.__code__.co_filename)
        known = repr(
            (function.__module__, function.__qualname__, function.__code__.co_firstlineno, source, signature)
        )
        if source is None or function.__closure__ or " at 0x" in known:
            return None
        return self.file_name(f"{known} {codegen.magic_tuple()}")


def _rebuilt(target_context: Any, parts: tuple) -> CompileResult:
    """Rebuild a compiled function. Numba's runtime compiles slowly: only if it is called."""
    (_, _, (machine_code, _)), *_ = parts
    if b"NRT_" in machine_code:
        rtsys.initialize(target_context)
    return CompileResult._rebuild(target_context, *parts)


def _for_python(reduced: tuple) -> tuple:
    """Replace LLVM code by stubs of two names, which halves the loading time."""
    (library, kind, (machine_code, _)), descriptor, *rest = reduced
    names = descriptor.llvm_func_name, descriptor.llvm_cpython_wrapper_name
    stubs = "".join(f'define void @"{name}"() {{ unreachable }}\n' for name in names)
    return (library, kind, (machine_code, binding.parse_assembly(stubs).as_bitcode())), descriptor, *rest


@functools.cache
def _digest_of(file: str) -> str | None:
    """Return a digest of a source outside of this package; the folder's name has the others."""
    path = Path(file).resolve()
    try:
        return "" if path.is_relative_to(SOURCES) else hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:  # typed into an interpreter
        return None


@functools.cache
def kernel_cache() -> KernelCache:
    return open_cache(f"kernels-{fingerprint(SOURCES, build(), OTHERS)}")


def build() -> tuple:
    """Return all that decides the machine code, except the sources."""
    settings = ".numba_config.yaml"
    return (
        platform.machine(),
        binding.get_process_triple(),
        binding.get_host_cpu_name(),
        TARGET.name,  # the system may refuse AMX
        binding.get_host_cpu_features().flatten(),
        f"{sys.version}{'' if __debug__ else ' -O'}",  # -O compiles no assertion
        numba.__version__,
        llvmlite.__version__,
        np.__version__,  # Numba's types follow NumPy's rules
        config.USING_SVML,
        sorted(
            item for item in os.environ.items() if item[0].startswith("NUMBA_") and item[0] not in HARMLESS
        ),
        Path(settings).read_bytes() if os.path.isfile(settings) else None,
    )
