"""`tinygpt info`: what is in a checkpoint, and whatever in it would be refused."""

import argparse
import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygpt.cli.flags import add_checkpoint, checkpoint_of
from tinygpt.cli.output import print_fields, print_json, print_table, size_text
from tinygpt.converted import PACKED_FILE, PREPARED_FILE
from tinygpt.errors import CheckpointError, NoTokenizerError

if TYPE_CHECKING:
    from tinygpt.weights.checkpoint import Checkpoint
    from tinygpt.weights.config import ModelConfig
    from tinygpt.weights.containers.container import Container, StoredTensor
    from tinygpt.weights.families.family import Source

USAGE = "tinygpt info [flags] [CHECKPOINT]"
NUM_SHOWN = 5  # of the tokens that the model lacks
SUMMARY = "show a checkpoint's config, tensors, tokenizer and hashes, and what would be refused"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: text)")


def run(args: argparse.Namespace) -> None:
    """Print the report. CheckpointError where there is no checkpoint, and behind the report if it cannot be used."""
    from tinygpt.weights.containers.formats import reader_of
    from tinygpt.weights.open import resolve

    path = resolve(checkpoint_of(args))
    if path.is_file():
        reader_of(path)  # what is in no format is no checkpoint
    report = describe(path)
    print_json(report) if args.json else _print_text(report)
    check_report(report["path"], report["refused"], report["tokenizer"]["error"])


def check_report(path: str, refused: list[str], tokenizer_error: str | None) -> None:
    """Behind the report on a checkpoint: CheckpointError for what of it cannot be used, which the report says why."""
    if refused:
        is_tokenizer = refused == [tokenizer_error]
        what = f"the tokenizer of {path} cannot be used, only token ids" if is_tokenizer else f"{path} cannot be used"
        error = CheckpointError(f'{what}: the report says why, under "refused".')
        error.work_started = True
        raise error


def describe(path: Path) -> dict[str, Any]:
    """The report on the checkpoint `path`. Each part is read by itself: what is wrong with one hides no other.

    `refused` lists why the checkpoint, or its tokenizer, cannot be loaded; fields such as `config` are None where that
    keeps them from being known. Sizes are in bytes, as the tensors lie in the files; 0 for formats that are not known.
    """
    from tinygpt.weights.containers.container import Container
    from tinygpt.weights.families.family import Source
    from tinygpt.weights.families.table import family_of
    from tinygpt.weights.matching import match

    refused: list[str] = []
    unread: list[str] = []
    is_packed = (path / PACKED_FILE).exists()
    container = _attempt(unread, _container, path / PACKED_FILE if is_packed else path)
    source = Source(path, container or Container("unreadable weights", {}))
    family = _attempt(refused, family_of, source)
    config = _attempt(refused, family.config, source) if family else None
    refused = [*refused, *unread] if family or container else unread  # what cannot be read is of no family either
    tied = dtype = checkpoint = None
    if config and container and is_packed:
        dtype, tied = _attempt(refused, _check_packed, path) or (None, None)
    elif config and container:
        checkpoint = _attempt(refused, match, source, family, config)
        tied = checkpoint.tied if checkpoint else None
    files, tokenizer = _files(source), _tokenizer(refused, source, checkpoint, config)
    return {
        "path": str(path),
        "container": container.format if container else None,
        "family": family.name if family else None,
        "config": asdict(config) if config else None,
        "tied": tied,
        "converted_to": dtype,
        "tensors": {name: _tensor(tensor) for name, tensor in source.container.tensors.items()},
        "ignored": list(checkpoint.ignored) if checkpoint else None,
        "quirks": list(checkpoint.quirks) if checkpoint else None,
        "tokenizer": tokenizer,
        "files": files,
        "content_hash": _hash_of_all(files),
        "refused": refused,
    }


def _attempt(problems: list[str], function: Callable, *arguments: Any) -> Any:
    """function(*arguments), or None and one more problem."""
    try:
        return function(*arguments)
    except CheckpointError as error:
        problems.append(str(error))
        return None


def _container(path: Path) -> "Container":
    from tinygpt.weights.containers.formats import read_weights

    return read_weights(path)


def _check_packed(path: Path) -> tuple[str, bool]:
    """Load it, which is quick: its dtype, and whether it is tied."""
    from tinygpt.execution.model_source import ModelSource

    source = ModelSource.open(str(path))
    source.load_params(threads=1)
    return source.dtype, source.checkpoint.tied


def _tensor(tensor: "StoredTensor") -> dict[str, Any]:
    return {
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "size": tensor.nbytes,
        "file": tensor.path.name,
    }


def _tokenizer(
    refused: list[str], source: "Source", checkpoint: "Checkpoint | None", config: "ModelConfig | None"
) -> dict[str, Any]:
    """Without one a checkpoint still takes token ids, so that the reason stands here; a damaged one is refused.

    `outside_vocabulary` lists the tokens that the model has no row for, without which texts are read as ever.
    """
    from tinygpt.execution.model_source import load_tokenizer
    from tinygpt.tokenizer.tokenizer import Tokenizer

    try:
        tokenizer = load_tokenizer(checkpoint) if checkpoint else Tokenizer.from_folder(source.folder)
    except CheckpointError as error:
        refused += [] if isinstance(error, NoTokenizerError) else [str(error)]
        return {"vocab_size": None, "special_ids": None, "outside_vocabulary": None, "error": str(error)}
    outside = tokenizer.ids_from(config.vocab_size) if config else None
    return {
        "vocab_size": tokenizer.vocab_size,
        "special_ids": sorted(tokenizer.special_ids),
        "outside_vocabulary": outside and [{"id": i, "text": tokenizer.decode([i])} for i in outside],
        "error": None,
    }


def _files(source: "Source") -> dict[str, dict[str, Any]]:
    """The files that the checkpoint is read from, with their sizes and the hashes that the Hub shows too."""
    from tinygpt.tokenizer_files import TOKENIZER_FILES
    from tinygpt.weights.hub import CONFIG_FILES

    folder, container = source.folder, source.container
    weights = sorted({tensor.path for tensor in container.tensors.values()}) or _without_tensors(source)
    tokenizer = (folder / name for name in (*TOKENIZER_FILES, PREPARED_FILE))
    paths = [*(folder / name for name in CONFIG_FILES), *weights, *tokenizer]
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": _hash_of_file(path)}
        for path in paths
        if path.is_file()
    }


def _without_tensors(source: "Source") -> list[Path]:
    """The file that holds none, or cannot be read: its hash says whether it is what was to be downloaded."""
    from tinygpt.weights.containers.formats import find_weights

    if source.path.is_file():
        return [source.path]
    if (source.path / PACKED_FILE).exists():
        return [source.path / PACKED_FILE]
    found = _attempt([], find_weights, source.path)
    return [found[0]] if found else []


def _hash_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _hash_of_all(files: dict[str, dict[str, Any]]) -> str:
    """SHA-256 of what `sha256sum` prints for the files in the order of their names."""
    lines = (f"{file['sha256']}  {name}\n" for name, file in sorted(files.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _print_text(report: dict[str, Any]) -> None:
    print_table(report["path"], [("content hash", report["content_hash"])])
    if report["config"]:
        print_fields("config", report["config"])
    tensors = report["tensors"]
    print_fields("weights", _summary(report))
    if tensors:
        print_table("tensors", _rows(tensors))
    tokenizer = report["tokenizer"]
    kept = ("error",) if tokenizer["error"] else ("vocab_size", "special_ids")
    outside = {"outside_vocabulary": _shown(tokenizer["outside_vocabulary"])} if tokenizer["outside_vocabulary"] else {}
    print_fields("tokenizer", {name: tokenizer[name] for name in kept} | outside)
    if report["files"]:
        print_table(
            "files", [(name, size_text(file["size"]), file["sha256"]) for name, file in report["files"].items()]
        )
    print_fields("refused", {str(i): problem for i, problem in enumerate(report["refused"], 1)} or {"nothing": ""})


def _shown(outside: list[dict[str, Any]]) -> str:
    """The first tokens that the model has no row for, and what this means."""
    first = ", ".join(f"{token['id']} {token['text']!r}" for token in outside[:NUM_SHOWN])
    more = f" and {len(outside) - NUM_SHOWN} more" if len(outside) > NUM_SHOWN else ""
    return f"{first}{more}, which the model has no row for: a text that holds one is refused"


def _summary(report: dict[str, Any]) -> dict[str, Any]:
    tensors = report["tensors"].values()
    is_known = report["tied"] is not None
    return {
        "container": report["container"],
        "family": report["family"],
        "tensors": len(tensors),
        "elements": f"{sum(math.prod(tensor['shape']) for tensor in tensors):,}",
        "size": size_text(sum(tensor["size"] for tensor in tensors)),
        "dtypes": sorted({tensor["dtype"] for tensor in tensors}),
        "converted_to": report["converted_to"],
        "head": ("tied to wte" if report["tied"] else "its own") if is_known else "unknown",
        "ignored": report["ignored"],
        "quirks": report["quirks"],
    }


def _rows(tensors: dict[str, dict[str, Any]]) -> Iterable[tuple[str, ...]]:
    """One row for what layers share: there are hundreds of tensors, of a dozen kinds."""
    from tinygpt.weights.messages import of_any_layer

    groups: dict[tuple, list[str]] = {}
    for name, tensor in tensors.items():
        kind = of_any_layer(name), tensor["dtype"], tuple(tensor["shape"]), tensor["size"]
        groups.setdefault(kind, []).append(name)
    for (pattern, dtype, shape, size), names in groups.items():
        count = f"{len(names)} x " if len(names) > 1 else ""
        yield (pattern if len(names) > 1 else names[0]), dtype, str(shape), f"{count}{size_text(size)}"
