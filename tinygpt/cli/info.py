"""`tinygpt info`: the content of a checkpoint, and every reason why it cannot be loaded."""

import argparse
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinygpt.cli.flags import add_checkpoint, checkpoint_of
from tinygpt.cli.output import print_fields, print_json, print_table, size_text
from tinygpt.errors import CheckpointError, NoTokenizerError
from tinygpt.weights.files import PACKED_FILE, PREPARED_FILE

if TYPE_CHECKING:
    from tinygpt.weights.checkpoint import Checkpoint
    from tinygpt.weights.config import ModelConfig
    from tinygpt.weights.families.family import Source

USAGE = "tinygpt info [flags] [CHECKPOINT]"
SUMMARY = "show a checkpoint's config, tensors, tokenizer and hashes, and every reason not to load it"
NUM_SHOWN = 5  # tokens without a row of the embedding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: text)")


def run(args: argparse.Namespace) -> None:
    """Print the report. CheckpointError before it if there is no checkpoint, and after it if it cannot be used."""
    from tinygpt.weights.containers.formats import reader_of
    from tinygpt.weights.open import resolve

    path = resolve(checkpoint_of(args))
    if path.is_file():
        reader_of(path)  # raises for a file in no format of weights
    report = describe(path)
    print_json(report) if args.json else _print_text(report)
    check_report(report["path"], report["refused"], report["tokenizer"]["error"])


def check_report(path: str, refused: list[str], tokenizer_error: str | None) -> None:
    """Raise CheckpointError, after the report, for a checkpoint that cannot be used."""
    if refused:
        is_tokenizer = refused == [tokenizer_error]
        part = f"the tokenizer of {path} cannot be used, only token ids" if is_tokenizer else f"{path} cannot be used"
        error = CheckpointError(f'{part}: the report says why, under "refused".')
        error.work_started = True
        raise error


def describe(path: Path) -> dict[str, Any]:
    """Return the report. Each part is read by itself: an error in one hides no other.

    `refused` lists why the checkpoint, or its tokenizer, cannot be loaded. Fields that are unknown for that reason are
    None. Sizes are in bytes, as the tensors lie in the files; 0 for unknown formats.
    """
    from tinygpt.weights.containers.formats import read_weights
    from tinygpt.weights.containers.mapped_file import Container
    from tinygpt.weights.families.family import Source
    from tinygpt.weights.families.table import family_of
    from tinygpt.weights.matching import match

    refused: list[str] = []
    unread: list[str] = []
    is_packed = (path / PACKED_FILE).exists()
    container = _attempt(unread, read_weights, path / PACKED_FILE if is_packed else path)
    source = Source(path, container or Container("unreadable weights", {}))
    family = _attempt(refused, family_of, source)
    config = _attempt(refused, family.config, source) if family else None
    refused = [*refused, *unread] if family or container else unread  # unreadable files are of no family either
    tied = dtype = checkpoint = None
    if config and container and is_packed:
        dtype, tied = _attempt(refused, _load_packed, path) or (None, None)
    elif config and container:
        checkpoint = _attempt(refused, match, source, family, config)
        tied = checkpoint.tied if checkpoint else None
    files = _files(source)
    digests = "".join(f"{file['sha256']}  {name}\n" for name, file in sorted(files.items()))  # as sha256sum prints
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
    """Return function(*arguments), or None and one more problem."""
    try:
        return function(*arguments)
    except CheckpointError as error:
        problems.append(str(error))
        return None


def _load_packed(path: Path) -> tuple[str, bool]:
    """Load a converted checkpoint, which checks it. Return its dtype, and whether the head is tied."""
    from tinygpt.engine.model_source import ModelSource

    source = ModelSource.open(str(path))
    source.load_params(threads=1)
    return source.dtype, source.checkpoint.tied


def _tokenizer(
    refused: list[str], source: "Source", checkpoint: "Checkpoint | None", config: "ModelConfig | None"
) -> dict[str, Any]:
    """Describe the tokenizer. `outside_vocabulary` lists its tokens without a row of the embedding.

    A checkpoint without a tokenizer takes token ids; a damaged tokenizer is refused.
    """
    from tinygpt.engine.model_source import load_tokenizer
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
    """Return the files that the checkpoint is read from, with their sizes and SHA-256, as the Hub shows them."""
    from tinygpt.weights.containers.formats import find_weights
    from tinygpt.weights.files import TOKENIZER_FILES
    from tinygpt.weights.hub import CONFIG_FILES

    folder, path = source.folder, source.path
    weights = sorted({tensor.path for tensor in source.container.tensors.values()})
    if not weights and path.is_file():  # an empty or a damaged file has a hash too
        weights = [path]
    elif not weights:
        packed = path / PACKED_FILE
        weights = [packed] if packed.exists() else (_attempt([], find_weights, path) or [])[:1]
    names = [*(folder / name for name in CONFIG_FILES), *weights]
    names += [folder / name for name in (*TOKENIZER_FILES, PREPARED_FILE)]
    found = {}
    for name in filter(Path.is_file, names):
        digest = hashlib.sha256()
        with name.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        found[name.relative_to(folder).as_posix()] = {"size": name.stat().st_size, "sha256": digest.hexdigest()}
    return found


def _print_text(report: dict[str, Any]) -> None:
    print_table(report["path"], [("content hash", report["content_hash"])])
    if report["config"]:
        print_fields("config", report["config"])
    tensors = report["tensors"].values()
    head = {True: "tied to wte", False: "its own", None: "unknown"}[report["tied"]]
    summary = {
        "container": report["container"],
        "family": report["family"],
        "tensors": len(tensors),
        "elements": f"{sum(math.prod(tensor['shape']) for tensor in tensors):,}",
        "size": size_text(sum(tensor["size"] for tensor in tensors)),
        "dtypes": sorted({tensor["dtype"] for tensor in tensors}),
        "converted_to": report["converted_to"],
        "head": head,
        "ignored": report["ignored"],
        "quirks": report["quirks"],
    }
    print_fields("weights", summary)
    if tensors:
        print_table("tensors", _rows(report["tensors"]))
    tokenizer = report["tokenizer"]
    kept = ("error",) if tokenizer["error"] else ("vocab_size", "special_ids")
    shown = {name: tokenizer[name] for name in kept}
    if tokenizer["error"] in report["refused"]:
        shown["error"] = 'see "refused"'
    if outside := tokenizer["outside_vocabulary"]:
        first = ", ".join(f"{token['id']} {token['text']!r}" for token in outside[:NUM_SHOWN])
        more = f" and {len(outside) - NUM_SHOWN} more" if len(outside) > NUM_SHOWN else ""
        about = "tokens without a row of the embedding: a text with such a token is refused"
        shown["outside_vocabulary"] = f"{first}{more}, {about}"
    print_fields("tokenizer", shown)
    if files := report["files"]:
        print_table("files", [(name, size_text(file["size"]), file["sha256"]) for name, file in files.items()])
    print_fields("refused", {str(i): problem for i, problem in enumerate(report["refused"], 1)} or {"nothing": ""})


def _rows(tensors: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield one row for the tensors of the same name, dtype and shape in several layers."""
    from tinygpt.weights.errors import of_any_layer

    groups: dict[tuple, list[str]] = {}
    for name, tensor in tensors.items():
        kind = of_any_layer(name), tensor["dtype"], tuple(tensor["shape"]), tensor["size"]
        groups.setdefault(kind, []).append(name)
    for (pattern, dtype, shape, size), names in groups.items():
        count = f"{len(names)} x " if len(names) > 1 else ""
        yield (pattern if len(names) > 1 else names[0]), dtype, str(shape), f"{count}{size_text(size)}"
