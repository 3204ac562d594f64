"""A GPU for numba-cuda and the backend's own Device, without one: fake_cuda.c, which runs each kernel's PTX here.

    python tests/support/fake_gpu.py FOLDER 8.6 generate --device cuda "Once"   # tinygpt's command, on an RTX 30
    pytest -p support.fake_gpu -m gpu ...                                       # in environment(FOLDER, "8.6")

Needs gcc and the extras `cuda` and `test`. Each instruction of a kernel takes microseconds: a text takes minutes.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
LAUNCH_FAILED = 719  # of cuda.h
MAX_BLOCKS = 1 << 12


def why_not() -> str:
    """Return what is missing to compile the driver, or nothing."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        return "the extra cuda"
    missing = {"gcc": shutil.which("gcc"), "cuda.h": find_nvidia_header_directory("cudart")}
    return ", ".join(name for name, found in missing.items() if not found)


def environment(folder: Path, capability: str) -> dict[str, str]:
    """Compile the driver into a folder. Return the environment of a process that loads it and keeps kernels there."""
    from cuda.pathfinder import find_nvidia_header_directory

    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libcuda.so.1"
    if not library.exists():
        flags = ["-shared", "-fPIC", "-O1", "-I", str(find_nvidia_header_directory("cudart"))]
        subprocess.run(
            ["gcc", *flags, "-o", str(library), str(Path(__file__).with_name("fake_cuda.c"))], check=True
        )
    paths = {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    return os.environ | paths | {"NUMBA_CACHE_DIR": str(folder), "FAKE_CUDA_CC": capability.replace(".", "")}


class FakeGpu:
    """What the driver calls to run a kernel. Programs by the numbers of their libraries."""

    def __init__(self, driver: ctypes.CDLL):
        self.driver, self.programs = driver, {}
        pointer = ctypes.POINTER(ctypes.c_uint)
        run = [ctypes.c_int, pointer, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p)]
        self.callbacks = (  # which must live as long as the driver
            ctypes.CFUNCTYPE(ctypes.c_int, *run)(self.run),
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, pointer)(self.params),
        )
        driver.fake_set(*self.callbacks)

    def link(self, library: Any, cc: Any = None) -> Any:
        """Take the place of numba-cuda's linker: the image that the driver loads is the number of a program."""
        from cuda.core import ObjectCode

        from support.ptx_code import read_ptx

        number = len(self.programs)
        self.programs[number] = read_ptx(library.get_lto_ptx(cc))
        return ObjectCode.from_cubin(str(number).encode())

    def params(self, number: int, sizes: Any) -> int:
        kinds = self._kinds(number)
        for i, kind in enumerate(kinds):
            sizes[i] = kind.itemsize
        return len(kinds)

    def run(self, number: int, sizes: Any, shared_bytes: int, params: Any) -> int:
        from support.ptx_machine import Memory, run

        try:
            kinds = self._kinds(number)
            values = [
                np.frombuffer(ctypes.string_at(params[i], k.itemsize), k)[0] for i, k in enumerate(kinds)
            ]
            memory = Memory(self._blocks_of(values))
            run(self.programs[number], sizes[:3], sizes[3], values, memory, shared_bytes, None)
        except Exception:  # nothing may be raised through the driver
            traceback.print_exc()
            return LAUNCH_FAILED
        return 0

    def _kinds(self, number: int) -> list[np.dtype]:
        from support.ptx_code import KINDS

        return [np.dtype(KINDS[kind]) for kind in self.programs[number].params.values()]

    def _blocks_of(self, values: list[Any]) -> list[tuple[int, int]]:
        """Return the allocations into which parameters point: address and size."""
        found = np.empty((MAX_BLOCKS, 2), np.int64)
        blocks = found[: self.driver.fake_blocks(found.ctypes.data_as(ctypes.c_void_p), MAX_BLOCKS)].tolist()
        return [(at, size) for at, size in blocks if any(at <= value < at + size for value in values)]


def pytest_configure() -> None:
    from numba.cuda.codegen import CUDACodeLibrary

    gpu = FakeGpu(ctypes.CDLL("libcuda.so.1"))
    CUDACodeLibrary.get_cubin = lambda self, cc=None: gpu.link(self, cc)


def main() -> int:
    if missing := why_not():
        sys.exit(f"The fake GPU needs {missing}: pip install -e '.[cuda,test]'.")
    folder, capability, *arguments = sys.argv[1:]
    program = "from support import fake_gpu; fake_gpu.pytest_configure(); from tinygpt.cli.main import main; "
    program += f"raise SystemExit(main({arguments!r}))"
    return subprocess.run(
        [sys.executable, "-c", program], env=environment(Path(folder), capability)
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
