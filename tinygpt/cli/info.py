"""`tinygpt info` reports on a checkpoint: config, tensors, tokenizer, hashes, and every reason not to load it."""

import argparse
import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, NoTokenizerError
from ..weights.files import PACKED_FILE, PREPARED_FILE, followed
from .flags import Command, add_checkpoint
from .names import add_layout, write_names
from .streams import print_fields, print_json, print_table, size_text

NUM_SHOWN = 5  # tokens without a row of the embedding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument(
        "--cached",
        action="store_true",
        help="list the models of the Hub that are in the cache, and read none (default: off)",
    )
    add_layout(parser)


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
        write_names(path, args.write_names)
    report = Report(path).to_json()
    print_json(report) if args.json else _print_text(report)
    check_report(report)


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


class Report:
    """The content of a checkpoint, with None for unknown parts. An error in one part hides none in another.

    refused: why the checkpoint, or its tokenizer, cannot be loaded.
    """

    def __init__(self, path: Path):
        from ..weights.containers.formats import read_weights
        from ..weights.containers.safetensors import read_safetensors
        from ..weights.families.family import Source
        from ..weights.matching import by_own_names, family_of, match
        from ..weights.tensor import Container

        self.path = path
        self.refused: list[str] = []
        self.family = self.config = self.checkpoint = self.tied = self.dtype = container = None
        unread: list[str] = []
        is_packed = (path / PACKED_FILE).exists()
        self.weights = path / PACKED_FILE if is_packed else path
        with self.part(unread):
            container = (read_safetensors if is_packed else read_weights)(self.weights)
        self.format = container and container.format
        self.source = Source(path, container or Container("unreadable weights", {}))
        with self.part():
            self.source = by_own_names(self.source)
        with self.part():
            self.family = family_of(self.source)
        if self.family:
            with self.part():
                self.config = self.family.config(self.source)
        # Unreadable files are of no family either.
        self.refused = [*self.refused, *unread] if self.family or container else unread
        if self.config and container:
            with self.part():
                if is_packed:
                    self._load_packed()
                else:
                    self.checkpoint = match(self.source, self.family, self.config)
                    self.tied = self.checkpoint.tied

    @contextmanager
    def part(self, problems: list[str] | None = None) -> Iterator[None]:
        """Keep an error of the checkpoint among the problems (None: `refused`)."""
        try:
            yield
        except CheckpointError as error:
            (self.refused if problems is None else problems).append(str(error))

    def _load_packed(self) -> None:
        """Load a converted checkpoint, which checks it."""
        from ..engine.model_runner import ModelSource
        from ..llm_args import LLMArgs

        source = ModelSource.open(LLMArgs(self.path))
        source.load_params(threads=1)
        self.dtype = source.dtype
        self.tied = source.checkpoint.tied

    def to_json(self) -> dict[str, Any]:
        """Return the report. size: bytes in the file, 0 for unknown formats."""
        tokenizer = self._tokenizer()
        files = self._files()
        # As sha256sum prints them.
        digests = "".join(f"{file['sha256']}  {name}\n" for name, file in sorted(files.items()))
        return {
            "path": str(self.path),
            "container": self.format,
            "family": self.family and self.family.name,
            "config": self.config and asdict(self.config),
            "tied": self.tied,
            "converted_to": self.dtype,
            "tensors": {
                name: {
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "size": tensor.nbytes,
                    "file": tensor.path.name,
                }
                for name, tensor in self.source.container.tensors.items()
            },
            "ignored": self.checkpoint and list(self.checkpoint.ignored),
            "quirks": self.checkpoint and list(self.checkpoint.quirks),
            "tokenizer": tokenizer,
            "files": files,
            "content_hash": hashlib.sha256(digests.encode()).hexdigest(),
            "refused": self.refused,
        }

    def _tokenizer(self) -> dict[str, Any]:
        """Describe the tokenizer. `outside_vocabulary` lists its tokens without a row of the embedding."""
        from ..engine.model_runner import load_tokenizer
        from ..text.tokenizer import Tokenizer

        try:
            if self.checkpoint:
                tokenizer = load_tokenizer(self.checkpoint)
            else:
                tokenizer = Tokenizer.from_folder(self.source.folder)
        except CheckpointError as error:
            if not isinstance(error, NoTokenizerError):  # without one, token ids are taken
                self.refused.append(str(error))
            return {"vocab_size": None, "special_ids": None, "outside_vocabulary": None, "error": str(error)}
        outside = tokenizer.ids_from(self.config.vocab_size) if self.config else None
        return {
            "vocab_size": tokenizer.vocab_size,
            "special_ids": sorted(tokenizer.special_ids),
            "outside_vocabulary": outside and [{"id": i, "text": tokenizer.decode([i])} for i in outside],
            "error": None,
        }

    def _files(self) -> dict[str, dict[str, Any]]:
        """Return the files that the checkpoint is read from, damaged or not, with their sizes and SHA-256.

        Special files and links out of the folder are left out.
        """
        from ..weights.containers.formats import find_weights
        from ..weights.files import CONFIG_FILES, TOKENIZER_FILES, open_regular

        weights = sorted({tensor.path for tensor in self.source.container.tensors.values()})
        if not weights and self.weights.is_file():
            weights = [self.weights]
        elif not weights:
            with suppress(CheckpointError):
                weights = find_weights(self.weights)[:1]
        folder = self.source.folder
        configs = [folder / name for name in CONFIG_FILES]
        tokenizers = [folder / name for name in (*TOKENIZER_FILES, PREPARED_FILE)]
        files = {}
        for path in filter(Path.is_file, [*configs, *weights, *tokenizers]):
            with suppress(OSError), open_regular(path, path in weights) as file:
                digest = hashlib.sha256()
                while block := file.read(1 << 20):
                    digest.update(block)
                name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name
                files[name] = {"size": path.stat().st_size, "sha256": digest.hexdigest()}
        return files


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
        shown = {"error": once(tokenizer["error"], refused)}
    else:
        shown = {name: tokenizer[name] for name in ("vocab_size", "special_ids")}
    if outside := tokenizer["outside_vocabulary"]:
        first = ", ".join(f"{token['id']} {token['text']!r}" for token in outside[:NUM_SHOWN])
        more = f" and {len(outside) - NUM_SHOWN} more" if len(outside) > NUM_SHOWN else ""
        meaning = "tokens without a row of the embedding: a text with such a token is refused"
        shown["outside_vocabulary"] = f"{first}{more}, {meaning}"
    print_fields("tokenizer", shown)
    if files := report["files"]:
        print_table(
            "files", [(name, size_text(file["size"]), file["sha256"]) for name, file in files.items()]
        )
    print_fields("refused", {str(i): problem for i, problem in enumerate(refused, 1)} or {"nothing": ""})


def once(error: str | None, refused: list[str]) -> str | None:
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


INFO = Command(
    add_arguments,
    run,
    "[flags] [MODEL]",
)
