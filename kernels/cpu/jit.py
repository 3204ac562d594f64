"""Kernels as modules declare them: functions that run as object code, or that Numba compiles when they are called.

Declaring one imports no Numba, which takes a quarter of a start.

A function that a kernel calls is a part: LLVM code that becomes machine code once, with the kernel. Numba would compile
it for itself and in each caller, in twice the time.
"""

import functools
import sys
import threading
from collections.abc import Callable
from functools import cached_property
from types import MappingProxyType
from typing import Any

from . import native


class Declared:
    """A name in compiled code. Numba asks for its type."""

    @cached_property
    def in_numba(self) -> Callable:
        raise NotImplementedError

    @cached_property
    def _numba_type_(self):
        from .compiler import type_of

        return type_of(self.in_numba)


class Kernel(Declared):
    def __init__(self, function: Callable, **options: Any):
        functools.update_wrapper(self, function)
        self.py_func = function
        self._options = options
        self._lock = threading.Lock()  # a leader and its followers come at once
        self._compiled: Callable | None = None

    def __call__(self, *arguments):
        return self.bound(*arguments)()

    def bound(self, *arguments) -> Callable[[], Any]:
        """Return a call with these arguments, for calls that only change the numbers in arrays."""
        objects = native.objects()
        name = f"{self.__module__}.{self.__qualname__}"
        call = None if objects is None else objects.bound(name, arguments)
        return call or functools.partial(self.compiled, *arguments)

    @property
    def compiled(self) -> Callable:
        """Return Numba's dispatcher."""
        with self._lock:
            if self._compiled is None:
                from .compiler import new_dispatcher

                self._compiled = new_dispatcher(self.py_func, self._options)
            return self._compiled

    @cached_property
    def in_numba(self) -> Callable:
        from .compiler import new_part

        return new_part(self.py_func, self._options)


class Inline(Declared):
    """A function whose code a caller contains. Numba reads its options and source."""

    targetoptions = MappingProxyType({"inline": "always"})

    def __init__(self, function: Callable):
        functools.update_wrapper(self, function)
        self.py_func = function

    def __call__(self, *arguments):
        return self.in_numba(*arguments)

    @cached_property
    def in_numba(self) -> Callable:
        import numba

        return numba.njit(**self.targetoptions, error_model="numpy", fastmath=False)(self.py_func)


class Choice(Declared):
    """One name of several functions: the type of an argument chooses."""

    def __init__(self, *choices: Any):
        self._choices = choices

    @cached_property
    def in_numba(self) -> Callable:
        from .compiler import new_choice

        return new_choice(*self._choices)


class Intrinsic(Declared):
    """A function of LLVM code, as numba.extending.intrinsic takes it."""

    def __init__(self, function: Callable):
        functools.update_wrapper(self, function)
        self.py_func = function

    @cached_property
    def in_numba(self) -> Callable:
        from numba.extending import intrinsic

        return intrinsic(self.py_func)


def jit(function: Callable) -> Kernel:
    """Declare a module-level function, a kernel if Python calls it and a part if a kernel does.

    A kernel may not call itself. Floating point is strict IEEE: LLVM neither reorders a sum nor fuses operations.
    """
    return Kernel(function)


def kernel(function: Callable) -> Kernel:
    """Declare as `jit` does, without reference counts: for functions that make no array.

    Numba's atomic counters take 150 of a tile's 300 ns.
    """
    return Kernel(function, _nrt=False)


def inline(function: Callable) -> Inline:
    """Inline a function into its callers before types are known: loops in one function compile slowly."""
    return Inline(function)


def overload_by_dtype(
    choices: dict[Any, Callable], otherwise: Callable | None = None, argument: int = 0
) -> Choice:
    """Return one name of several functions. Keys: a NamedTuple's class, an array's dtype by its name, or None.

    Numba itself removes `if x is None`.
    """
    return Choice(choices, otherwise, argument)


def compile_times() -> tuple[int, float]:
    """Return how many kernels this process has compiled, and the seconds."""
    if (compiler := sys.modules.get(f"{__package__}.compiler")) is None:
        return 0, 0.0
    cache = compiler.kernel_cache()
    return cache.num_compiled, cache.seconds
