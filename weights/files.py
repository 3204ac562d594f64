"""Files of a checkpoint: their names, regular files, JSON, YAML, CRC-32 and atomic writes."""

import codecs
import errno
import io
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from .errors import CheckpointError

# Files that only `convert` writes.
PACKED_FILE = "model.tinygpt.safetensors"
PREPARED_FILE = "tokenizer.tinygpt"
VOCAB_AND_MERGES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
SENTENCEPIECE_FILES = ("spiece.model", "tokenizer.model")
TOKENIZER_FILES = (
    *(
        "tokenizer.json",
        *(name for pair in VOCAB_AND_MERGES for name in pair),
        "vocab.txt",
        *SENTENCEPIECE_FILES,
    ),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)
CONFIG_FILES = ("config.json", "generation_config.json")
TENSOR_NAMES = "tensor_names.json"  # transformers' names by the files' names, if they differ
# PEFT's, in its order; early versions wrote the last.
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
# Of files of weights, and of no Hub id.
SUFFIXES = (".bin", ".ckpt", ".gguf", ".index", ".nemo", ".npz", ".onnx", ".pt", ".pth", ".safetensors")
# Bounds of YAML: PyYAML's time grows with each character and with nesting.
MAX_YAML_CHARACTERS = 100_000
MAX_YAML_DEPTH = 100
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"  # in a file's place in a clone without Git LFS


@dataclass(frozen=True)
class StoredTokenizer:
    """A tokenizer in the file of the weights, which tinygpt/text/files.py puts together as a tokenizer.json.

    cuts: how a text is cut: as GPT-2's or BLOOM's byte-level BPE does, or into characters. vocab: all tokens, and their
    ids. added_tokens: those that are split off before the others, and whether they are special.
    bos_token: put before each text.
    """

    cuts: Literal["gpt-2", "bloom", "characters"]
    vocab: Mapping[str, int]
    merges: Sequence[str] = ()
    added_tokens: Mapping[str, bool] = field(default_factory=dict)
    bos_token: str | None = None
    eos_token: str | None = None


def how_to_replace(path: Path, what: str = "it") -> str:
    folder = path if path.is_dir() else path.parent
    if any((folder / name).exists() for name in (PACKED_FILE, PREPARED_FILE)):
        return "convert the original checkpoint again"
    return f"download {what} again"


def looks_local(name: str) -> bool:
    """Tell a path, there or not, from a Hub name such as owner/name/file.gguf."""
    is_file = Path(Path(name).parts[0]).is_dir() if name.count("/") > 1 else name.lower().endswith(SUFFIXES)
    return name.startswith(("/", "./", "../", "~")) or "\\" in name or is_file


def open_regular(path: Path, is_weights: bool = False) -> BinaryIO:
    """Open a file of a checkpoint's folder.

    Raise OSError for a FIFO or a device, which could block for ever, a Git LFS pointer, and a link out of the folder,
    unless it is of weights, whose content no error quotes.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if path.is_symlink() and not is_weights:
        check_inside(path, path.parent)
    file = path.open("rb")
    if file.peek().startswith(LFS_POINTER):
        file.close()
        pointer = "it is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder"
        raise OSError(errno.EINVAL, pointer, str(path))
    return file


def check_inside(path: Path, folder: Path) -> None:
    """Raise OSError for a path that leads out of the folder. Files of the Hub's cache are links to its blobs."""
    if not _is_inside(path, folder):
        raise OSError(errno.EINVAL, "it is a link out of its folder: copy there what it leads to", str(path))


def _is_inside(path: Path, folder: Path) -> bool:
    folder = folder.absolute()
    target = Path(os.path.realpath(path))
    blobs = [place.parent.resolve() / "blobs" for place in folder.parents if place.name == "snapshots"]
    return any(target.is_relative_to(place) for place in (folder.resolve(), *blobs))


def followed(path: Path) -> Path:
    """Return a file that a user names, whose link may lead anywhere."""
    return path.resolve() if path.is_file() and not _is_inside(path, path.parent) else path


def read_regular(path: Path) -> bytes:
    """Read no more than a file's size, as some of /proc have no end. Raise OSError."""
    with open_regular(path) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def read_regular_text(path: Path) -> str:
    """Return UTF-8, or UTF-16 with a byte order mark, without the mark. Raise OSError or UnicodeDecodeError."""
    content = read_regular(path)
    encoding = "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    return io.TextIOWrapper(io.BytesIO(content), encoding=encoding).read()


def read_json(text: str | bytes) -> Any:
    """Raise ValueError for text that is no JSON, or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Raise CheckpointError if the file is absent, damaged or holds no object."""
    try:
        value = read_json(read_regular_text(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} holds no {path.name}: copy it there from the model.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): {how_to_replace(path)}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__} and must hold an object {{...}}.")
    return value


def read_yaml_object(place: str, text: str) -> dict[str, Any]:
    """Raise CheckpointError for other content than a mapping, for aliases and for deep nesting."""
    import yaml

    depth = 0
    try:
        if len(text) > MAX_YAML_CHARACTERS:
            raise CheckpointError(f"{place} has {len(text)} characters and may have {MAX_YAML_CHARACTERS}.")
        for event in yaml.parse(text, yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_YAML_DEPTH or isinstance(event, yaml.AliasEvent):
                raise CheckpointError(
                    f"{place} has aliases or more than {MAX_YAML_DEPTH} levels: write it without."
                )
        value = yaml.safe_load(text)
    except CheckpointError:
        raise
    except Exception as error:  # constructors of PyYAML raise more than its own errors
        raise CheckpointError(
            f"{place} is not valid YAML ({str(error)[:200]}): download it again."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{place} must hold a mapping of names to values: download it again.")
    return value


def crc32_of(parts: Iterable[bytes | memoryview]) -> str:
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return f"{checksum:08x}"


def in_a_thread(work: Callable[[], Any]) -> Future:
    """Run `work` in a thread: zlib releases the interpreter's lock."""
    reader = ThreadPoolExecutor(1)
    future = reader.submit(work)
    reader.shutdown(wait=False)
    return future


def sync(descriptor: int) -> None:
    """Raise OSError if the disk fails, not if the file system lacks fsync."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows opens no folder
        return
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write and sync, which takes an old one's place after the block. Raise OSError."""
    partial = path.with_name(f"tinygpt-{os.urandom(4).hex()}.partial")  # never longer than a name may be
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file that survives a power cut, in place of an old one. Raise OSError."""
    with replacing(path) as partial, partial.open("xb") as file:
        file.write(data)
        file.flush()
        sync(file.fileno())  # otherwise the name may reach the disk before the data
