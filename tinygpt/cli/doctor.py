"""`tinygpt doctor`: what a bug report should quote of this machine."""

import argparse
import ctypes
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import tinygpt
from tinygpt.cli import loading
from tinygpt.cli.flags import add_checkpoint, add_flag, one_of_both
from tinygpt.cli.output import elapsed, print_fields, print_json, size_text
from tinygpt.hardware.cpu import cpu_name
from tinygpt.hardware.threads import logical_cores, thread_count

USAGE = "tinygpt doctor [flags] [CHECKPOINT]"
SUMMARY = "show what this machine offers and which kernels it uses: what a bug report should quote"
REQUIRED = ("numpy", "numba", "llvmlite", "safetensors", "tiktoken", "huggingface-hub", "tqdm")
OPTIONAL = ("tokenizers", "transformers", "torch", "numba-cuda")
# LLVM's names of what the kernels use, or could use.
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512vnni", "avx512bf16", "avxvnni", "amx-int8", "amx-bf16", "neon")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser, "a checkpoint to report on too")
    add_flag(parser, "threads")
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: text)")


def run(args: argparse.Namespace) -> None:
    """Print the report. CheckpointError where there is no checkpoint, and behind the report if it cannot be used."""
    given = {name: os.environ.get(name) for name in loading.THREAD_POOLS}
    loading.set_thread_pools(args.threads)
    model = one_of_both("CHECKPOINT", args.checkpoint, args.model)
    of_checkpoint = {} if model is None else {"checkpoint": _checkpoint(model)}
    report = examine(thread_count(args.threads), given) | of_checkpoint
    print_json(report) if args.json else _print_text(report)
    if of_checkpoint:
        from tinygpt.cli.info import check_report

        check_report(*(report["checkpoint"][name] for name in ("path", "refused", "tokenizer_error")))


def _print_text(report: dict[str, dict[str, Any]]) -> None:
    report["versions"] = {name: version or "not installed" for name, version in report["versions"].items()}
    report["cache"]["size"] = size_text(report["cache"]["size"])
    report["cache"]["other_builds_size"] = size_text(report["cache"]["other_builds_size"])
    report["memory"]["read_bandwidth"] = f"{report['memory']['read_bandwidth'] / 1e9:.1f} GB/s"
    for dtype, rate in report["decode_limits"]["tokens_per_second"].items():
        report["decode_limits"][dtype] = f"{rate:.0f} tokens/s"
    del report["decode_limits"]["tokens_per_second"]
    for name in ("total", "available"):
        report["memory"][name] = size_text(report["memory"][name])
    if checkpoint := report.get("checkpoint"):
        error = checkpoint["tokenizer_error"]
        report = {**report, "checkpoint": {**checkpoint, "tokenizer_error": error}}
    for title, values in report.items():
        print_fields(title, values)


def examine(threads: int, variables: dict[str, str | None]) -> dict[str, dict[str, Any]]:
    """The report, by section. Sizes are in bytes, the bandwidth in bytes a second.

    variables: what the environment says of thread pools, None where it says nothing.
    """
    memory = _memory(threads)
    return {
        "versions": _versions(),
        "system": {"platform": platform.platform(), "machine": platform.machine()},
        "threads": _threads(threads, variables),
        "cpu": _cpu(),
        "kernels": _instructions(),
        "blas": _blas(),
        "memory": memory,
        "decode_limits": _decode_limits(memory["read_bandwidth"]),
        "cache": _cache(),
        "gpu": _gpu(),
    }


def _checkpoint(model: str) -> dict[str, Any]:
    """Which one it is, and why it or its tokenizer cannot be loaded."""
    from tinygpt.cli.info import describe
    from tinygpt.weights.open import resolve

    report = describe(resolve(model))
    kept = ("path", "container", "family", "quirks", "content_hash", "converted_to", "refused")
    return {name: report[name] for name in kept} | {"tokenizer_error": report["tokenizer"]["error"]}


def _versions() -> dict[str, str | None]:
    python = f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})"
    packages = {name: _version_of(name) for name in (*REQUIRED, *OPTIONAL)}
    return {"tinygpt": tinygpt.__version__, "python": python, **packages}


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _threads(threads: int, variables: dict[str, str | None]) -> dict[str, Any]:
    return {
        "used": threads,
        "physical_cores_allowed": thread_count(),
        "logical_cores_allowed": logical_cores(),
        "logical_cores": os.cpu_count(),
        "layer": "tinygpt's own: Numba's threading layers are not used",
        **variables,
    }


def _cpu() -> dict[str, Any]:
    from llvmlite import binding

    from tinygpt.kernels.cpu.jit import has_feature

    return {
        "name": cpu_name(),
        "llvm_name": binding.get_host_cpu_name(),
        "features": [name for name in FEATURES if has_feature(name)],
    }


def _instructions() -> dict[str, str]:
    """Return the target of the kernels, and the instructions of each dtype's products with their width."""
    from tinygpt.kernels.cpu.simd.targets import PRODUCTS, SINGLES, TARGET

    steps = {"float32": SINGLES, "bfloat16": TARGET.bfloat16, "int8": TARGET.int8, "int4": TARGET.int4}
    steps |= {"int8 KV cache": TARGET.int8_cache}
    lanes = TARGET.vector_bytes // 4
    shown = {dtype: f"{step}, {lanes * PRODUCTS[step]} products an instruction" for dtype, step in steps.items()}
    return {"target": TARGET.name, **shown}


def _blas() -> dict[str, Any]:
    import numpy as np

    blas = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    return {name: blas.get(name) for name in ("name", "version")}


def _memory(threads: int) -> dict[str, Any]:
    from tinygpt.hardware.bandwidth import read_bandwidth

    with elapsed("measuring the memory's bandwidth"):
        bandwidth = read_bandwidth(threads)
    return {**_memory_sizes(), "read_bandwidth": bandwidth, "threads": threads}


def _decode_limits(bandwidth: float) -> dict[str, Any]:
    """What a sequence by itself can reach, where reading the weights is all that takes time, as it nearly is."""
    from tinygpt.bench.work import BYTES, weight_bytes
    from tinygpt.weights.config import ModelConfig

    config = ModelConfig()
    rates = {dtype: bandwidth / weight_bytes(config, dtype) for dtype in BYTES}
    return {"of": "GPT-2 124M, one sequence, by the memory's bandwidth", "tokens_per_second": rates}


def _memory_sizes() -> dict[str, int | None]:
    sizes = {}
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, amount = line.partition(":")
            sizes[name] = int(amount.split()[0]) * 1024
    except OSError:  # no Linux
        pass
    return {"total": sizes.get("MemTotal"), "available": sizes.get("MemAvailable")}


def _cache() -> dict[str, Any]:
    from tinygpt.kernels.cpu.jit import cache_folder, kernel_files

    path, files = cache_folder().path, kernel_files()
    folders = files.folders
    others = [] if path is None else [build for build in path.parent.glob("kernels-*") if build != path]
    return {
        "folder": None if path is None else str(path),
        "note": cache_folder().note or None,
        "kernels": len(files.names()),
        "kernels_in": [str(folder) for folder in folders],
        "size": sum(map(_size_of, folders)),
        "compiled_for": files.marks(),
        "other_builds": len(others),
        "other_builds_size": sum(map(_size_of, others)),
    }


def _size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # another process has just removed it
            continue
    return total


def _gpu() -> dict[str, Any]:
    from tinygpt.kernels.cuda.runtime.jit import DeviceError, need_driver

    try:
        need_driver()
        answer = "they run here"
    except DeviceError as error:
        answer = str(error)
    return {"numba_cuda": _version_of("numba-cuda"), **_cuda_driver(), "kernels": answer}


def _cuda_driver() -> dict[str, Any]:
    """What NVIDIA's driver says of itself: its library is there exactly where the driver is."""
    absent = {"driver": None, "devices": []}
    try:
        driver = ctypes.WinDLL("nvcuda.dll") if sys.platform == "win32" else ctypes.CDLL("libcuda.so.1")
    except OSError:
        return absent
    if error := driver.cuInit(0):
        return {**absent, "error": f"cuInit returned {error}"}
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    driver.cuDeviceGetCount(ctypes.byref(count))
    return {
        "driver": f"CUDA {version.value // 1000}.{version.value % 1000 // 10}",
        "devices": [_device_name(driver, i) for i in range(count.value)],
    }


def _device_name(driver: ctypes.CDLL, index: int) -> str:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    return name.value.decode(errors="replace")
