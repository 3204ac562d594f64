"""`tinygpt doctor` reports on the machine, the kernels and the packages, and on a checkpoint, too."""

import argparse
import os
import platform
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import tinygpt

from ..hardware import cpu_name, logical_cores, thread_count
from .flags import THREAD_POOLS, Command, add_checkpoint, add_flag, set_thread_pools
from .info import Report, check_report, once
from .streams import log, print_fields, print_json, size_text

PACKAGES = ("numpy", "numba", "llvmlite", "safetensors", "tiktoken", "huggingface-hub", "tqdm")
PACKAGES += ("tokenizers", "transformers", "torch", "numba-cuda")
# LLVM's names of the features that kernels use, or could use.
FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512vnni",
    "avx512bf16",
    "avxvnni",
    "amx-int8",
    "amx-bf16",
    "neon",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser, default=None, help="a checkpoint to report on too (default: none)")
    add_flag(parser, "threads")


def run(args: argparse.Namespace) -> None:
    from ..weights.open import resolve

    variables = {name: os.environ.get(name) for name in THREAD_POOLS}
    set_thread_pools(args.threads)
    described = None if args.model is None else Report(resolve(args.model)).to_json()
    report = examine(thread_count(args.threads), variables)
    if described is not None:
        kept = ("path", "container", "family", "quirks", "content_hash", "converted_to", "refused")
        error = {"tokenizer_error": described["tokenizer"]["error"]}
        report["checkpoint"] = {name: described[name] for name in kept} | error
    print_json(report) if args.json else _print_text(report)
    if described is not None:
        check_report(described)


def _print_text(report: dict[str, dict[str, Any]]) -> None:
    memory = report["memory"]
    cache = report["cache"]
    memory |= {name: size_text(memory[name]) for name in ("total", "available")}
    memory["read_bandwidth"] = f"{memory['read_bandwidth'] / 1e9:.1f} GB/s"
    cache |= {name: size_text(cache[name]) for name in ("size", "other_builds_size")}
    limits = report["decode_limits"]
    rates = {dtype: f"{rate:.0f} tokens/s" for dtype, rate in limits.pop("tokens_per_second").items()}
    shown = {"decode_limits": limits | rates}
    shown["versions"] = {name: version or "not installed" for name, version in report["versions"].items()}
    if checkpoint := report.get("checkpoint"):
        error = once(checkpoint["tokenizer_error"], checkpoint["refused"])
        shown["checkpoint"] = {**checkpoint, "tokenizer_error": error}
    for title, values in {**report, **shown}.items():
        print_fields(title, values)


def examine(threads: int, variables: dict[str, str | None]) -> dict[str, dict[str, Any]]:
    """Return sections. Sizes are in bytes, the bandwidth in bytes a second."""
    import numpy as np
    from llvmlite import binding

    from ..bench.roofline import weight_bytes
    from ..hardware import read_bandwidth
    from ..kernels.cpu.simd.targets import has_feature
    from ..weights.config import DTYPES, ModelConfig

    log("measuring the memory's bandwidth")
    bandwidth = read_bandwidth(threads)
    blas = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    limits = {dtype: bandwidth / weight_bytes(ModelConfig(), dtype) for dtype in DTYPES}
    return {
        "versions": {
            "tinygpt": tinygpt.__version__,
            "python": f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})",
            **{name: _version_of(name) for name in PACKAGES},
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


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def instructions() -> dict[str, str]:
    """Return the kernels' target, the instructions of each dtype's products with their width, and the object code."""
    from ..kernels.cpu.native import status
    from ..kernels.cpu.simd.targets import PRODUCTS, TARGET

    lanes = TARGET.vector_bytes // 4
    shown = {
        dtype: f"{step}, {lanes * PRODUCTS[step]} products an instruction"
        for dtype, step in TARGET.steps.items()
    }
    if TARGET.has_amx:
        shown["bfloat16"] = "tdpbf16ps, 8192 products an instruction"
        shown["int8"] = f"tdpbsud, 16384; few rows: {shown['int8']}"
    return {"target": TARGET.name, **shown, "object_code": status()}


def _memory_sizes() -> dict[str, int | None]:
    path = Path("/proc/meminfo")  # of Linux
    sizes = dict(line.split(":") for line in path.read_text("ascii").splitlines()) if path.exists() else {}
    names = {"total": "MemTotal", "available": "MemAvailable"}
    return {name: int(sizes[key].split()[0]) * 1024 if key in sizes else None for name, key in names.items()}


def _cache() -> dict[str, Any]:
    from ..kernels.cpu.compiler import kernel_cache

    cache = kernel_cache()
    path = cache.folder
    others = [] if path is None else [build for build in path.parent.glob("kernels-*") if build != path]
    return {
        "folder": None if path is None else str(path),
        "note": cache.note or None,
        "kernels": len(cache.names()),
        "size": _size_of([] if path is None else [path]),
        "other_builds": len(others),
        "other_builds_size": _size_of(others),
    }


def _size_of(folders: list[Path]) -> int:
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())


def _gpu() -> dict[str, Any]:
    from ..kernels.backend import DeviceError
    from ..kernels.cuda.device import the_device
    from ..kernels.cuda.params import DTYPES

    oldest = {dtype: row.numbers.oldest for dtype, row in DTYPES.items()}
    try:
        capability = the_device().capability
        answer = "they run here in " + ", ".join(dtype for dtype in oldest if capability >= oldest[dtype])
        if missing := ", ".join(dtype for dtype in oldest if capability < oldest[dtype]):
            answer += f"; a later GPU is needed for {missing}"
    except DeviceError as error:
        answer = str(error)
    return {"numba_cuda": _version_of("numba-cuda"), **driver(), "kernels": answer}


def driver() -> dict[str, Any]:
    """Ask the driver's own tool, which may be there without numba-cuda."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    rows = []
    with suppress(OSError, subprocess.CalledProcessError):
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows = [line.split(", ") for line in listed.splitlines()]
    return {"driver": rows[0][-1] if rows else None, "devices": [row[0] for row in rows]}


DOCTOR = Command(
    add_arguments,
    run,
    "[flags] [MODEL]",
)
