"""Kernels as object code in the package: llvmlite links them, nothing compiles, and Numba is not imported.

scripts/build_kernels.py makes an archive for each target and a manifest. An object is a kernel for one layout of
arguments, the types that Numba would compile for, and of the sources that its key stands for (keys.py): its name has
all three. It refers to libc's memset and sched_yield alone, and so depends on no version of Python, NumPy or Numba. Its
one argument is the address of 64-bit words: the fields that Numba makes of the kernel's arguments, in Numba's order.
"""

import array
import ctypes
import functools
import hashlib
import io
import json
import logging
import os
import platform
import struct
import sys
import threading
import zipfile
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding

from ..backend import DeviceError
from ..kernel_cache import fingerprint
from .simd.targets import OF_THE_CPU, TARGET, has_feature

SOURCES = Path(__file__).resolve().parent
OTHERS = (SOURCES.parent / "backend.py", SOURCES.parent / "numbers.py")  # which kernels import
FOLDER = SOURCES / "objects"
MANIFEST = FOLDER / "manifest.json"
ENTRY = "kernel"  # the symbol of every object
VARIABLE = "TINYGPT_KERNELS"
COMPILE = "compile"  # its one value
# NUMBA_* variables that do not change the machine code.
HARMLESS = ("NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS", "NUMBA_THREADING_LAYER", "NUMBA_THREADING_LAYER_PRIORITY")
WHOLE_NUMBERS = range(-(2**63), 2**63)

logger = logging.getLogger(__name__)


class Objects:
    """The objects of a target that are of these sources. A kernel is linked when it is first called, and stays."""

    def __init__(self, archive: zipfile.ZipFile, members: Iterable[str]):
        self._archive = archive
        self._members = {member.rpartition("-")[0]: member for member in members}
        self._names = {member.partition("-")[0] for member in self._members}
        self.count = len(self._members)
        self._linked: dict[tuple[Hashable, ...], Callable | None] = {}
        self._lock = threading.Lock()  # a leader and its followers come at once

    def bound(self, name: str, arguments: tuple) -> Callable[[], None] | None:
        """Return a call of a kernel with these arguments, or None if there is no object for their layout."""
        if name not in self._names:
            return None
        words, layout = words_of(arguments)
        key = (name, *layout)
        if key not in self._linked:
            self._link(key, named(name, layout))
        if (function := self._linked[key]) is None:
            return None
        kept = array.array("q", words)
        address, _ = kept.buffer_info()

        def call() -> None:
            if function(address):
                raise RuntimeError(f"the kernel {name} failed")

        call.keeps = kept, arguments  # whose memory the words name
        return call

    def _link(self, key: tuple[Hashable, ...], name: str) -> None:
        with self._lock:
            if key in self._linked:
                return
            member = self._members.get(name)
            logger.debug("%s: %s", name, "object code" if member else "no object code for these arguments")
            self._linked[key] = linked(self._archive.read(member)) if member else None


def linked(code: bytes) -> Callable[[int], int]:
    """Return an object's function, which takes the address of words and returns 0, or a status."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = engine.get_function_address(ENTRY)
    engine.detach()  # a follower may run the code until the process ends
    return ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(address)


def objects() -> Objects | None:
    """Return the objects for this CPU, or None: then Numba compiles."""
    return _open()[0]


def status() -> str:
    """Return how many objects there are for this CPU, or why there are none."""
    objects_here, reason = _open()
    return f"{objects_here.count} in the package{reason}" if objects_here else f"none: {reason}"


def check_device(number: int = 0) -> None:
    if (asked := os.environ.get(VARIABLE, "")) not in ("", COMPILE):
        raise DeviceError(f"{VARIABLE} is {asked!r}, and may be {COMPILE!r} or unset.")


def _open() -> tuple[Objects | None, str]:
    with _opening:  # a leader and its followers come at once
        return _opened()


_opening = threading.Lock()


@functools.cache
def _opened() -> tuple[Objects | None, str]:
    try:
        check_device()
    except DeviceError as error:
        return None, str(error)
    if asked := other_code(os.environ):
        return None, f"{asked} asks for other code"
    if platform.system() != "Linux" or sys.maxsize < 2**32:
        return None, "they are for 64-bit Linux"
    try:
        return _read()
    except Exception as error:  # of a damaged package, or a Python without liblzma: Numba compiles
        return None, f"{MANIFEST.name} or an archive cannot be read: {error!r}"


def _read() -> tuple[Objects | None, str]:
    import lzma  # which some Pythons lack

    manifest = json.loads(MANIFEST.read_text("ascii"))
    target = manifest["targets"].get(TARGET.name)
    if target is None or not all(map(has_feature, target["features"])):
        return None, f"{TARGET.name} of this CPU is not among their targets"
    content = (FOLDER / target["archive"]).read_bytes()
    if hashlib.sha256(content).hexdigest() != target["sha256"]:
        return None, f"{target['archive']} is damaged"
    archive = zipfile.ZipFile(io.BytesIO(lzma.decompress(content)))
    members = all_members = archive.namelist()
    if manifest["sources"] != sources_hash():  # of a file at least, be it in a comment
        from .keys import of_sources

        members = of_sources(members, asked_of(TARGET.name, target), SOURCES.parent)
    void = len(all_members) - len(members)
    if not members:
        return None, "the kernels' sources have changed since"
    return Objects(archive, members), f", and {void} of other sources" if void else ""


def asked_of(name: str, target: Mapping[str, Any]) -> list[str]:
    """Return what the compiler is asked for a target of the manifest."""
    return [name, target["cpu"], *target["features"]]


def sources_hash() -> str:
    return fingerprint(SOURCES, "", OTHERS)


def other_code(environment: Mapping[str, str]) -> str:
    """Return the name of a setting of Numba's, or TINYGPT_KERNELS, by which the user asks for other code, or "" """
    known = HARMLESS + OF_THE_CPU  # which decide the target
    if environment.get(VARIABLE) == COMPILE:
        return VARIABLE
    if os.path.isfile(".numba_config.yaml"):  # Path.is_file raises in a folder that this user may not search
        return ".numba_config.yaml"
    return next((name for name in environment if name.startswith("NUMBA_") and name not in known), "")


def named(name: str, layout: Sequence[Hashable]) -> str:
    """Return the name of a kernel's object in an archive, before its key."""
    return f"{name}-{hashlib.sha256(' '.join(map(str, layout)).encode()).hexdigest()[:16]}"


def words_of(arguments: tuple) -> tuple[list[int], list[Hashable]]:
    """Return the words of a kernel's arguments, and their layout: all that decides the machine code."""
    words: list[int] = []
    layout: list[Hashable] = []
    for argument in arguments:
        _flatten(argument, words, layout)
    return words, layout


def _flatten(value: Any, words: list[int], layout: list[Hashable]) -> None:
    if isinstance(value, np.ndarray):
        flags = value.flags
        layout += value.dtype, value.ndim, "C" if flags.c_contiguous else "F" if flags.f_contiguous else "A"
        if not flags.aligned:
            layout.append("unaligned")
        no_owner = (0, 0)
        words += (*no_owner, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides)
    elif isinstance(value, tuple):
        layout += type(value).__name__, getattr(value, "_fields", len(value))
        for field in value:
            _flatten(field, words, layout)
    elif value is None:
        layout.append(None)
        words.append(0)
    elif isinstance(value, int) and value in WHOLE_NUMBERS:  # a bool, too
        layout.append(type(value).__name__)
        words.append(int(value))
    elif isinstance(value, float):
        layout.append("float")
        words += struct.unpack("<q", struct.pack("<d", value))
    elif isinstance(value, np.generic):
        layout.append(value.dtype)
        words.append(int.from_bytes(value.tobytes().ljust(8, b"\0"), "little", signed=True))
    else:  # Numba may know it
        layout.append(f"{type(value).__name__}?")
