"""One name for several functions of compiled code, chosen by the type of an argument.

Numba compiles a kernel anew for the types that it is called with, so a type can decide the code: `products` is one
function for int8 weights and another for float32 weights, and no branch is left. Numba calls this `overload`: a Python
function, which nobody ever runs, gives the name; a second one, which the compiler runs with the arguments' types,
returns the function to compile in its place.
"""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import overload

from tinygpt.kernels.cpu.jit import PART_OPTIONS


def by_type(choices: dict[Any, Callable], otherwise: Callable | None = None, argument: int = 0) -> Callable:
    """A function for compiled code that stands for one of `choices`, or `otherwise`.

    Which one, the type of one of its arguments decides: a NamedTuple's class, or the dtype of an array's values.
    """

    def name_only(*arguments):
        raise NotImplementedError("compiled code alone can call this")

    @overload(name_only, jit_options=PART_OPTIONS, strict=False)  # not strict: the choices' parameters have names
    def choose(*argument_types):
        return choices.get(_kind_of(argument_types[argument]), otherwise)

    return name_only


def _kind_of(numba_type):
    return numba_type.instance_class if isinstance(numba_type, types.BaseNamedTuple) else numba_type.dtype
