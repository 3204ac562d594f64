"""What a kernel calls is optimised as a part of it, and is no machine code of its own."""

from typing import NamedTuple

import numba
import numpy as np
import pytest
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompileResult, DefaultPassBuilder
from numba.core.errors import NumbaError

from support.compiled import compiled_kernels
from tinygpt.kernels.cpu import jit
from tinygpt.kernels.cpu.parts import PartCompiler, _PartLibrary
from tinygpt.kernels.cpu.runtime.by_type import by_type


class Metres(NamedTuple):
    length: float


class Feet(NamedTuple):
    length: float


@pytest.fixture
def made(monkeypatch) -> list[str]:
    """The functions that have become machine code, but for Numba's own."""
    names, finish = [], JITCodeLibrary._finalize_specific

    def note(library):
        names.extend({library.name.split(".")[-1]} - {"nrt"})
        finish(library)

    monkeypatch.setattr(JITCodeLibrary, "_finalize_specific", note)
    return names


def new_kernels():
    """Two kernels, the first of which calls the second; closures, and so compiled anew."""

    @jit.kernel
    def thrice(x):
        if x > 100:
            raise ValueError("more than a hundred")
        return 3 * x

    @jit.kernel
    def nine_times(x):
        return thrice(thrice(x))

    def as_it_is(record):
        return record.length

    def to_metres(record):
        return thrice(record.length) * 0.1

    in_metres = by_type({Feet: to_metres}, otherwise=as_it_is)

    @jit.jit
    def twelve_times(record):
        return nine_times(in_metres(record)) + thrice(in_metres(record))

    return twelve_times, nine_times


def test_only_what_python_calls_becomes_machine_code(made):
    twelve_times, nine_times = new_kernels()
    for record, expected in ((Metres(2.0), 24.0), (Feet(20.0), 72.0)):
        made.clear()
        assert twelve_times(record) == expected
        assert made == ["twelve_times"]
    assert nine_times(np.int32(2)) == 18  # Python may call each
    assert made == ["twelve_times", "nine_times"]


@pytest.mark.filterwarnings("ignore:.*object mode")
def test_what_a_part_may_not_have_is_refused():
    """Python may call both."""

    @jit.jit
    def in_object_mode(x):
        with numba.objmode(y="int64"):
            y = x + 1
        return y

    @jit.jit
    def factorial(n):
        if n > 1:
            return n * factorial(n - 1)
        return 1

    assert in_object_mode(3) == 4
    assert factorial(4) == 24
    for function, says in ((in_object_mode, "a block in object mode"), (factorial, "re-entrant")):
        with pytest.raises(NumbaError, match=says):
            jit.jit(lambda x, function=function: function(x) + 1)(3)


def test_each_part_is_compiled_once_for_each_type(monkeypatch):
    parts, compile_extra = [], PartCompiler.compile_extra
    monkeypatch.setattr(
        PartCompiler, "compile_extra", lambda one, func: parts.append(func.__name__) or compile_extra(one, func)
    )
    twelve_times, nine_times = new_kernels()
    with compiled_kernels() as compiled:
        twelve_times(Metres(2.0))
        assert (compiled.names, parts) == (["twelve_times"], ["as_it_is", "nine_times", "thrice"])
        twelve_times(Feet(20.0))
        assert compiled.names == ["twelve_times"] * 2
        assert parts[3:] == ["to_metres"]
        nine_times(2.0)
        nine_times(2.0)
        assert compiled.names[2:] == ["nine_times"]
        assert parts[4:] == []  # `thrice` is there


def test_an_error_within_a_part_reaches_python():
    twelve_times, _ = new_kernels()
    with pytest.raises(ValueError, match="more than a hundred"):
        twelve_times(Metres(40.0))


def new_errors():
    """Two kernels and their part; what it says of a value needs Python."""

    @jit.jit
    def checked(x):
        if x > 100:
            raise ValueError("more than a hundred", x)
        return x

    @jit.jit
    def negative(x):
        return -checked(x)

    @jit.jit
    def doubled(x):
        return 2 * checked(x)

    return negative, doubled, checked


def test_an_error_of_a_part_tells_values_whichever_kernel_it_is_a_part_of():
    for kernel in new_errors():
        with pytest.raises(ValueError, match="more than a hundred") as raised:
            kernel(101)
        assert raised.value.args == ("more than a hundred", 101)


def test_a_part_that_calls_itself_is_refused():
    with pytest.raises(numba.NumbaError, match="re-entrant"):
        call_factorial(5)
    assert factorial(5) == 120  # a kernel may


@jit.jit
def factorial(n):
    return 1 if n < 2 else n * factorial(n - 1)


@jit.jit
def call_factorial(n):
    return factorial(n)


def test_numba_has_what_parts_are_made_of(monkeypatch):
    """Numba promises none of it."""
    for owner, names in {
        Compiler: ("compile_extra",),
        DefaultPassBuilder: ("define_nopython_pipeline",),
        JITCodeLibrary: ("_optimize_final_module", "_finalize_final_module"),
        CompileResult: ("_replace", "_find_referenced_environments"),
    }.items():
        missing = [name for name in names if not hasattr(owner, name)]
        assert not missing, f"Numba's {owner.__name__} has no {missing} any more"

    results, compile_extra = [], PartCompiler.compile_extra
    monkeypatch.setattr(
        PartCompiler, "compile_extra", lambda *given: results.append(compile_extra(*given)) or results[-1]
    )
    _, nine_times = new_kernels()
    assert nine_times(2) == 18
    assert len(results) == 1, "Numba asks a function for its part otherwise than by get_call_template and get_overload"
    (part,) = results
    assert isinstance(part.library, _PartLibrary), "Numba compiles into another library than the state's"
    assert part.library._finalized, "Numba finishes a library otherwise"
    assert part.environment.env_name, "Numba's environments have no name any more"
    assert hasattr(part.codegen, "set_env"), "Numba's code generator has no set_env any more"
