"""What a kernel calls is optimised as a part of it, and is no machine code of its own."""

from typing import NamedTuple

import numpy as np
import pytest
from numba.core.codegen import JITCodeLibrary

from tinygpt.kernels.cpu import jit
from tinygpt.kernels.cpu.runtime.by_type import by_type
from tinygpt.kernels.kernel_files import KernelFiles


class Metres(NamedTuple):
    length: float


class Feet(NamedTuple):
    length: float


@jit.kernel
def thrice(x):
    if x > 100:
        raise ValueError("more than a hundred")
    return 3 * x


@jit.kernel
def nine_times(x):
    return thrice(thrice(x))


def _as_it_is(record):
    return record.length


def _to_metres(record):
    return thrice(record.length) * 0.1


in_metres = by_type({Feet: _to_metres}, otherwise=_as_it_is)


@jit.jit
def nine_times_and_thrice(record):
    return nine_times(in_metres(record)) + thrice(in_metres(record))


@pytest.fixture
def made(monkeypatch, tmp_path) -> list[str]:
    """The functions that have become machine code, but for Numba's own; none is kept beyond the test."""
    files, names, finish = KernelFiles(tmp_path), [], JITCodeLibrary._finalize_specific

    def note(library):
        names.extend({library.name} - {"nrt"})
        finish(library)

    monkeypatch.setattr(jit, "kernel_files", lambda: files)
    monkeypatch.setattr(JITCodeLibrary, "_finalize_specific", note)
    return names


def test_only_what_python_calls_becomes_machine_code(made, tmp_path):
    for record, expected in ((Metres(2.0), 24.0), (Feet(20.0), 72.0)):
        made.clear()
        assert nine_times_and_thrice(record) == expected
        assert made == ["nine_times_and_thrice"]
    assert len(KernelFiles(tmp_path).names()) == 2
    made.clear()
    assert nine_times(np.int32(2)) == 18  # Python may call each
    assert made == ["nine_times"]


def test_a_part_is_in_a_kernel_once():
    @jit.jit
    def kernel(x):
        total = 0.0
        for i in range(x.size):
            total += nine_times(x[i])
        return total

    kernel(np.ones(3))
    (code,) = kernel.inspect_llvm().values()
    defined = [line for line in code.splitlines() if line.startswith("define") and "thrice" in line]
    assert len(defined) <= 1


def test_an_error_within_a_part_reaches_python():
    with pytest.raises(ValueError, match="more than a hundred"):
        nine_times_and_thrice(Metres(40.0))
