"""Runs a command on an emulated 64-bit ARM CPU, or else the tests of single kernels:

    python tests/support/arm_machine.py [--cpu NAME] FOLDER [ARGUMENT...]

The arguments are Python's ("-m pytest -x tests/kernels/cpu/test_linear.py"). FOLDER keeps what the first run fetches,
half a gigabyte: QEMU and an arm64 Python of this Debian, by apt-get, and the wheels of this environment's versions, by
pip. Nothing is installed on this machine, and no rights are needed.
"""

import argparse
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = [
    "tests/kernels/cpu/test_targets.py",
    "tests/kernels/cpu/test_dtype_kernels.py",
    "tests/kernels/cpu/test_linear.py",
    "tests/kernels/cpu/test_attention.py",
    "tests/kernels/cpu/test_layers.py",
]
WHEELS = (
    "numba",
    "llvmlite",
    "numpy",
    "safetensors",
    "tiktoken",
    "huggingface_hub",
    "tqdm",
    "pytest",
    "hypothesis",
)
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
# LLVM's name of a CPU, as it cannot see the one that QEMU plays, and QEMU's of one that has what it has.
CPUS = {"neoverse-v1": "max", "apple-m1": "neoverse-n1", "cortex-a72": "cortex-a72"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--cpu", choices=CPUS, default="neoverse-v1", help="LLVM's name (default: %(default)s)"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="Python's")
    given = parser.parse_args()
    folder = given.folder.resolve()
    if not (folder / "ready").exists():
        fetch_debian(folder)
        fetch_wheels(folder)
        (folder / "ready").touch()
    arguments = given.arguments or ["-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    return subprocess.run(command(folder, arguments), cwd=ROOT, env=environment(folder, given.cpu)).returncode


def fetch_debian(folder: Path) -> None:
    """An arm64 Python and all that it needs, and QEMU for this machine."""
    apt = folder / "apt"
    for part in ("lists/partial", "archives/partial"):
        (apt / part).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()  # nothing is installed
    own = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
        "Dir::State": apt,
        "Dir::State::lists": apt / "lists",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt,
        "Dir::Cache::archives": apt / "archives",
    }
    options = [f"-o={name}={value}" for name, value in own.items()]
    run("apt-get", *options, "update")
    run(
        "apt-get",
        *options,
        "install",
        "--yes",
        "--no-install-recommends",
        "--download-only",
        "python3",
        "libstdc++6",
    )
    (qemu := folder / "qemu").mkdir(exist_ok=True)
    subprocess.run(["apt-get", "download", "qemu-user-static"], cwd=qemu, check=True)
    for package in qemu.glob("*.deb"):
        run("dpkg-deb", "--extract", package, qemu)
    for package in (apt / "archives").glob("*.deb"):
        run("dpkg-deb", "--extract", package, folder / "system")


def fetch_wheels(folder: Path) -> None:
    release = python_of(folder).name.removeprefix("python")
    platforms = [f"--platform={name}_aarch64" for name in PLATFORMS]
    wanted = [f"{name}=={version(name)}" for name in WHEELS]
    pip = [sys.executable, "-m", "pip", "install", "--target", folder / "packages", "--only-binary=:all:"]
    run(*pip, f"--python-version={release}", "--implementation=cp", *platforms, *wanted)


def run(*words) -> None:
    subprocess.run([str(word) for word in words], check=True)


def python_of(folder: Path) -> Path:
    return next((folder / "system/usr/bin").glob("python3.[0-9]*[0-9]"))


def command(folder: Path, arguments: list[str]) -> list[str]:
    """How Python runs there; what its files name is looked for in `system` first."""
    qemu = folder / "qemu/usr/bin/qemu-aarch64-static"
    return [str(qemu), "-L", str(folder / "system"), str(python_of(folder)), *arguments]


def environment(folder: Path, cpu: str) -> dict[str, str]:
    paths = (folder / "packages", ROOT, ROOT / "tests")
    return os.environ | {
        "QEMU_CPU": CPUS[cpu],
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


if __name__ == "__main__":
    sys.exit(main())
