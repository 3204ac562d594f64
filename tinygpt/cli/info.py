"""`tinygpt info` reports on a checkpoint, `tinygpt doctor` on the machine, the kernels and the packages."""

import argparse
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tinygpt

from ..errors import CheckpointError, NoTokenizerError
from ..hardware import cpu_name, logical_cores, thread_count
from ..weights.files import PACKED_FILE, PREPARED_FILE, followed
from .flags import THREAD_POOLS, Command, add_checkpoint, add_flag, set_thread_pools
from .streams import log, print_fields, print_json, print_table, size_text

if TYPE_CHECKING:
    from ..weights.checkpoint import Checkpoint
    from ..weights.config import ModelConfig
    from ..weights.families.family import Source

NUM_SHOWN = 5  # tokens without a row of the embedding

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

# Of every GPT-2, and of no name or shape.
CONDITIONS = (
    "compare it with the model's code. Names cannot show that each layer is x = x + attention(norm(x)), then x = x + "
    "mlp(norm(x)), that norms subtract the mean, with an epsilon of 1e-05, that attention is causal, and its scores "
    "divided once, by a root, that neither tables, scores, sums nor logits are scaled, capped or added to otherwise, "
    "which norm is the first, how square matrices lie, and that all of the file is used."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    about = "list the models of the Hub that are in the cache, and read none (default: off)"
    parser.add_argument("--cached", action="store_true", help=about)
    about = "write a tensor_names.json next to a GPT-2 of unknown names, if words and shapes leave one answer by which "
    about += "it loads, and say what they cannot show: its matrices are "
    about += "(out, in), as torch's Linear, with -qkv if one matrix has all queries, then keys, then values, or (in, "
    about += "out), as transformers' Conv1D (default: off)"
    parser.add_argument("--write-names", choices=("linear", "linear-qkv", "conv1d"), help=about)


def run(args: argparse.Namespace) -> None:
    """Print the report. Raise CheckpointError before it without a checkpoint, and after it for an unusable one."""
    if args.cached:
        _print_cached(args)
        return
    from ..weights.containers.formats import reader_of
    from ..weights.open import resolve

    path = resolve(args.model)
    if path.is_file():
        reader_of(followed(path))  # raises for a file in no format of weights
    if args.write_names:
        _write_names(path, args.write_names)
    report = describe(path)
    print_json(report) if args.json else _print_text(report)
    check_report(report)


def _write_names(path: Path, layout: str) -> None:
    """Raise CheckpointError for a model that loads, or without one answer, or next to an older file."""
    from ..weights.containers.formats import read_weights
    from ..weights.families.family import Source
    from ..weights.families.proposal import proposed_names
    from ..weights.files import TENSOR_NAMES
    from ..weights.matching import family_of, match, read_checkpoint

    if (loaded := _attempt([], read_checkpoint, path)) is not None:
        raise CheckpointError(f"{path} loads, as {loaded.family}: it needs no other names.")
    source = Source(path, read_weights(path))
    source = replace(source, description=proposed_names(source, layout))
    family = family_of(source)
    match(source, family, family.config(source))
    place = source.folder / TENSOR_NAMES
    try:
        with place.open("x", encoding="utf-8") as file:
            json.dump(source.description, file, indent=1)
    except FileExistsError:
        raise CheckpointError(f"{place} is there already: move it to have another.") from None
    log(f"wrote {place}: {CONDITIONS}")


def _print_cached(args: argparse.Namespace) -> None:
    from ..weights.hub import cached_models

    models = cached_models()
    if args.json:
        print_json({"models": models})
        return
    rows = [
        (at["id"], ", ".join(at["revisions"]), size_text(at["size"]), f"{at['files']} files") for at in models
    ]
    print_table("cached models of the Hub", rows or [("none",)])


def check_report(report: dict[str, Any]) -> None:
    """Raise CheckpointError, after the report, for a checkpoint that cannot be used."""
    path, refused = report["path"], report["refused"]
    if refused:
        is_tokenizer = refused == [report["tokenizer"]["error"]]
        part = (
            f"the tokenizer of {path} cannot be used, only token ids"
            if is_tokenizer
            else f"{path} cannot be used"
        )
        error = CheckpointError(f'{part}: the report says why, under "refused".')
        error.work_started = True
        raise error


def describe(path: Path) -> dict[str, Any]:
    """Return the report, with None for unknown fields. An error in one part hides none in another.

    refused: why the checkpoint, or its tokenizer, cannot be loaded. size: bytes in the file, 0 for unknown formats.
    """
    from ..weights.containers.formats import read_weights
    from ..weights.containers.safetensors import read_safetensors
    from ..weights.families.family import Source
    from ..weights.matching import by_own_names, family_of, match
    from ..weights.tensor import Container

    refused: list[str] = []
    unread: list[str] = []
    place = path / PACKED_FILE if (path / PACKED_FILE).exists() else path
    container = _attempt(unread, read_weights if place == path else read_safetensors, place)
    source = Source(path, container or Container("unreadable weights", {}))
    source = _attempt(refused, by_own_names, source) or source
    family = _attempt(refused, family_of, source)
    config = _attempt(refused, family.config, source) if family else None
    # Unreadable files are of no family either.
    refused = [*refused, *unread] if family or container else unread
    tied = dtype = checkpoint = None
    if config and container and place.name == PACKED_FILE:
        dtype, tied = _attempt(refused, _load_packed, path) or (None, None)
    elif config and container:
        checkpoint = _attempt(refused, match, source, family, config)
        tied = checkpoint.tied if checkpoint else None
    files = _files(source, place)
    # As sha256sum prints them.
    digests = "".join(f"{file['sha256']}  {name}\n" for name, file in sorted(files.items()))
    return {
        "path": str(path),
        "container": container.format if container else None,
        "family": family.name if family else None,
        "config": asdict(config) if config else None,
        "tied": tied,
        "converted_to": dtype,
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "size": tensor.nbytes,
                "file": tensor.path.name,
            }
            for name, tensor in source.container.tensors.items()
        },
        "ignored": list(checkpoint.ignored) if checkpoint else None,
        "quirks": list(checkpoint.quirks) if checkpoint else None,
        "tokenizer": _tokenizer(refused, source, checkpoint, config),
        "files": files,
        "content_hash": hashlib.sha256(digests.encode()).hexdigest(),
        "refused": refused,
    }


def _attempt(problems: list[str], function: Callable, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except CheckpointError as error:
        problems.append(str(error))
        return None


def _load_packed(path: Path) -> tuple[str, bool]:
    """Load a converted checkpoint, which checks it. Return its dtype, and whether the head is tied."""
    from ..engine.model_runner import ModelSource
    from ..llm_args import LLMArgs

    source = ModelSource.open(LLMArgs(path))
    source.load_params(threads=1)
    return source.dtype, source.checkpoint.tied


def _tokenizer(
    refused: list[str], source: "Source", checkpoint: "Checkpoint | None", config: "ModelConfig | None"
) -> dict[str, Any]:
    """Describe the tokenizer. `outside_vocabulary` lists its tokens without a row of the embedding."""
    from ..engine.model_runner import load_tokenizer
    from ..text.tokenizer import Tokenizer

    try:
        tokenizer = load_tokenizer(checkpoint) if checkpoint else Tokenizer.from_folder(source.folder)
    except CheckpointError as error:
        if not isinstance(error, NoTokenizerError):  # without one, token ids are taken
            refused.append(str(error))
        return {"vocab_size": None, "special_ids": None, "outside_vocabulary": None, "error": str(error)}
    outside = tokenizer.ids_from(config.vocab_size) if config else None
    return {
        "vocab_size": tokenizer.vocab_size,
        "special_ids": sorted(tokenizer.special_ids),
        "outside_vocabulary": outside and [{"id": i, "text": tokenizer.decode([i])} for i in outside],
        "error": None,
    }


def _files(source: "Source", place: Path) -> dict[str, dict[str, Any]]:
    """Return the files that the checkpoint is read from, damaged or not, with their sizes and SHA-256.

    Special files and links out of the folder are left out. place: the file or folder of the weights.
    """
    from ..weights.containers.formats import find_weights
    from ..weights.files import CONFIG_FILES, TOKENIZER_FILES, open_regular

    weights = sorted({tensor.path for tensor in source.container.tensors.values()})
    if not weights:
        weights = [place] if place.is_file() else (_attempt([], find_weights, place) or [])[:1]
    configs, tokenizers = (
        [source.folder / name for name in names]
        for names in (CONFIG_FILES, (*TOKENIZER_FILES, PREPARED_FILE))
    )
    found = {}
    for path in filter(Path.is_file, [*configs, *weights, *tokenizers]):
        with suppress(OSError), open_regular(path) as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
            is_beside = path.is_relative_to(source.folder)
            name = path.relative_to(source.folder).as_posix() if is_beside else path.name
            found[name] = {"size": path.stat().st_size, "sha256": digest.hexdigest()}
    return found


def _print_text(report: dict[str, Any]) -> None:
    print_table(report["path"], [("content hash", report["content_hash"])])
    if report["config"]:
        print_fields("config", report["config"])
    tensors = report["tensors"].values()
    summary = {
        **{name: report[name] for name in ("container", "family")},
        "tensors": len(tensors),
        "elements": f"{sum(math.prod(tensor['shape']) for tensor in tensors):,}",
        "size": size_text(sum(tensor["size"] for tensor in tensors)),
        "dtypes": sorted({tensor["dtype"] for tensor in tensors}),
        "converted_to": report["converted_to"],
        "head": {True: "tied to wte", False: "its own", None: "unknown"}[report["tied"]],
        **{name: report[name] for name in ("ignored", "quirks")},
    }
    print_fields("weights", summary)
    if tensors:
        print_table("tensors", _rows(report["tensors"]))
    tokenizer = report["tokenizer"]
    refused = report["refused"]
    if tokenizer["error"]:
        shown = {"error": _once(tokenizer["error"], refused)}
    else:
        shown = {name: tokenizer[name] for name in ("vocab_size", "special_ids")}
    if outside := tokenizer["outside_vocabulary"]:
        first = ", ".join(f"{token['id']} {token['text']!r}" for token in outside[:NUM_SHOWN])
        more = f" and {len(outside) - NUM_SHOWN} more" if len(outside) > NUM_SHOWN else ""
        about = "tokens without a row of the embedding: a text with such a token is refused"
        shown["outside_vocabulary"] = f"{first}{more}, {about}"
    print_fields("tokenizer", shown)
    if files := report["files"]:
        print_table(
            "files", [(name, size_text(file["size"]), file["sha256"]) for name, file in files.items()]
        )
    print_fields("refused", {str(i): problem for i, problem in enumerate(refused, 1)} or {"nothing": ""})


def _once(error: str | None, refused: list[str]) -> str | None:
    return 'see "refused"' if error in refused else error


def _rows(tensors: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield one row for the tensors of the same name, dtype and shape in several layers."""
    from ..weights.errors import of_any_layer

    groups: dict[tuple, list[str]] = {}
    for name, tensor in tensors.items():
        kind = of_any_layer(name), tensor["dtype"], tuple(tensor["shape"]), tensor["size"]
        groups.setdefault(kind, []).append(name)
    for (pattern, dtype, shape, size), names in groups.items():
        count = f"{len(names)} x " if len(names) > 1 else ""
        yield (pattern if len(names) > 1 else names[0]), dtype, str(shape), f"{count}{size_text(size)}"


def _add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser, default=None, help="a checkpoint to report on too (default: none)")
    add_flag(parser, "threads")


def _run_doctor(args: argparse.Namespace) -> None:
    from ..weights.open import resolve

    variables = {name: os.environ.get(name) for name in THREAD_POOLS}
    set_thread_pools(args.threads)
    described = None if args.model is None else describe(resolve(args.model))
    report = examine(thread_count(args.threads), variables)
    if described is not None:
        kept = ("path", "container", "family", "quirks", "content_hash", "converted_to", "refused")
        error = {"tokenizer_error": described["tokenizer"]["error"]}
        report["checkpoint"] = {name: described[name] for name in kept} | error
    print_json(report) if args.json else _print_machine(report)
    if described is not None:
        check_report(described)


def _print_machine(report: dict[str, dict[str, Any]]) -> None:
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
        error = _once(checkpoint["tokenizer_error"], checkpoint["refused"])
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


INFO = Command(
    add_arguments,
    run,
    "[flags] [MODEL]",
)
DOCTOR = Command(
    _add_doctor_arguments,
    _run_doctor,
    "[flags] [MODEL]",
)
