"""`tinygpt doctor`: the machine, the kernels and the packages, for a bug report to quote."""

import argparse
import ctypes
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import tinygpt
from tinygpt.cli.flags import add_checkpoint, add_flag, one_of_both
from tinygpt.cli.loading import THREAD_POOLS, set_thread_pools
from tinygpt.cli.output import log, print_fields, print_json, size_text
from tinygpt.hardware import cpu_name, logical_cores, thread_count

USAGE = "tinygpt doctor [flags] [CHECKPOINT]"
SUMMARY = "report on the machine, the kernels and the packages, for a bug report"
PACKAGES = ("numpy", "numba", "llvmlite", "safetensors", "tiktoken", "huggingface-hub", "tqdm")
OPTIONAL = ("tokenizers", "transformers", "torch", "numba-cuda")
# LLVM's names of the features that kernels use, or could use.
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512vnni", "avx512bf16", "avxvnni", "amx-int8", "amx-bf16", "neon")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser, "a checkpoint to report on too")
    add_flag(parser, "threads")
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: text)")


def run(args: argparse.Namespace) -> None:
    """Print the report. CheckpointError before it if there is no checkpoint, and after it if it cannot be used."""
    variables = {name: os.environ.get(name) for name in THREAD_POOLS}
    set_thread_pools(args.threads)
    model = one_of_both("CHECKPOINT", args.checkpoint, args.model)
    checkpoint = None if model is None else _checkpoint(model)
    report = examine(thread_count(args.threads), variables) | ({} if checkpoint is None else {"checkpoint": checkpoint})
    print_json(report) if args.json else _print_text(report)
    if checkpoint is not None:
        from tinygpt.cli.info import check_report

        check_report(*(checkpoint[name] for name in ("path", "refused", "tokenizer_error")))


def _print_text(report: dict[str, dict[str, Any]]) -> None:
    memory, cache, limits = report["memory"], report["cache"], report["decode_limits"]
    versions = {name: version or "not installed" for name, version in report["versions"].items()}
    memory |= {name: size_text(memory[name]) for name in ("total", "available")}
    memory["read_bandwidth"] = f"{memory['read_bandwidth'] / 1e9:.1f} GB/s"
    cache |= {name: size_text(cache[name]) for name in ("size", "other_builds_size")}
    rates = {dtype: f"{rate:.0f} tokens/s" for dtype, rate in limits["tokens_per_second"].items()}
    checkpoint = report.get("checkpoint")
    if checkpoint and checkpoint["tokenizer_error"] in checkpoint["refused"]:
        report["checkpoint"] = {**checkpoint, "tokenizer_error": 'see "refused"'}
    for title, values in (report | {"versions": versions, "decode_limits": {"of": limits["of"], **rates}}).items():
        print_fields(title, values)


def examine(threads: int, variables: dict[str, str | None]) -> dict[str, dict[str, Any]]:
    """Return the report by section. Sizes are in bytes, the bandwidth in bytes a second.

    variables: the environment's settings of thread pools, None if there is none.
    """
    import numpy as np
    from llvmlite import binding

    from tinygpt.bench.work import BYTES, weight_bytes
    from tinygpt.hardware import read_bandwidth
    from tinygpt.kernels.cpu.simd.targets import has_feature
    from tinygpt.weights.config import ModelConfig

    log("measuring the memory's bandwidth")
    bandwidth = read_bandwidth(threads)
    blas = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    limits = {dtype: bandwidth / weight_bytes(ModelConfig(), dtype) for dtype in BYTES}
    return {
        "versions": {
            "tinygpt": tinygpt.__version__,
            "python": f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})",
            **{name: _version_of(name) for name in (*PACKAGES, *OPTIONAL)},
        },
        "system": {"platform": platform.platform(), "machine": platform.machine()},
        "threads": {
            "used": threads,
            "physical_cores_allowed": thread_count(),
            "logical_cores_allowed": logical_cores(),
            "logical_cores": os.cpu_count(),
            "layer": "tinygpt's own: Numba's threading layers are not used",
            **variables,
        },
        "cpu": {
            "name": cpu_name(),
            "llvm_name": binding.get_host_cpu_name(),
            "features": [name for name in FEATURES if has_feature(name)],
        },
        "kernels": instructions(),
        "blas": {name: blas.get(name) for name in ("name", "version")},
        "memory": {**_memory_sizes(), "read_bandwidth": bandwidth, "threads": threads},
        "decode_limits": {
            "of": "GPT-2 124M, one sequence, by the memory's bandwidth",
            "tokens_per_second": limits,
        },
        "cache": _cache(),
        "gpu": _gpu(),
    }


def _checkpoint(model: str) -> dict[str, Any]:
    from tinygpt.cli.info import describe
    from tinygpt.weights.open import resolve

    report = describe(resolve(model))
    kept = ("path", "container", "family", "quirks", "content_hash", "converted_to", "refused")
    return {name: report[name] for name in kept} | {"tokenizer_error": report["tokenizer"]["error"]}


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def instructions() -> dict[str, str]:
    """Return the target of the kernels, and the instructions of each dtype's products with their width."""
    from tinygpt.kernels.cpu.simd.targets import PRODUCTS, SINGLES, TARGET

    steps = {"float32": SINGLES, "bfloat16": TARGET.bfloat16, "int8": TARGET.int8, "int4": TARGET.int4}
    steps |= {"int8 KV cache": TARGET.int8_cache}
    lanes = TARGET.vector_bytes // 4
    shown = {dtype: f"{step}, {lanes * PRODUCTS[step]} products an instruction" for dtype, step in steps.items()}
    return {"target": TARGET.name, **shown}


def _memory_sizes() -> dict[str, int | None]:
    sizes = {}
    if (path := Path("/proc/meminfo")).exists():  # Linux
        for line in path.read_text(encoding="ascii").splitlines():
            name, _, amount = line.partition(":")
            sizes[name] = int(amount.split()[0]) * 1024
    return {"total": sizes.get("MemTotal"), "available": sizes.get("MemAvailable")}


def _cache() -> dict[str, Any]:
    from tinygpt.kernels.cpu.jit import kernel_cache

    cache = kernel_cache()
    path = cache.folder
    others = [] if path is None else [build for build in path.parent.glob("kernels-*") if build != path]
    return {
        "folder": None if path is None else str(path),
        "note": cache.note or None,
        "kernels": len(cache.names()),
        "size": 0 if path is None else _size_of(path),
        "other_builds": len(others),
        "other_builds_size": sum(map(_size_of, others)),
    }


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _gpu() -> dict[str, Any]:
    from tinygpt.kernels.cuda.runtime.jit import DeviceError, need_driver

    try:
        need_driver()
        answer = "they run here"
    except DeviceError as error:
        answer = str(error)
    return {"numba_cuda": _version_of("numba-cuda"), **_cuda_driver(), "kernels": answer}


def _cuda_driver() -> dict[str, Any]:
    """Return the version and the devices of NVIDIA's driver, whose library comes with it."""
    found: dict[str, Any] = {"driver": None, "devices": []}
    try:
        driver = ctypes.WinDLL("nvcuda.dll") if sys.platform == "win32" else ctypes.CDLL("libcuda.so.1")
    except OSError:
        return found
    if error := driver.cuInit(0):
        return {**found, "error": f"cuInit returned {error}"}
    version, count, device, name = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    driver.cuDriverGetVersion(ctypes.byref(version))
    driver.cuDeviceGetCount(ctypes.byref(count))
    for i in range(count.value):
        driver.cuDeviceGet(ctypes.byref(device), i)
        driver.cuDeviceGetName(name, len(name), device)
        found["devices"].append(name.value.decode(errors="replace"))
    found["driver"] = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    return found
