"""The tables by which the format of a file or a folder is found, and weights in shards."""

import re
import struct
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from ..errors import NAMED, CheckpointError, describe, listed, shown
from ..files import followed, read_json_object
from ..tensor import FILES, Container, Peek, StoredTensor

MAX_SHARDS, NAME_MAX = 1000, 255  # files, bytes of a name
MAX_HEADER = 100_000_000  # bytes of safetensors' header, the library's bound
ZIP, PICKLE = b"PK\x03\x04", b"\x80\x02"  # the first bytes of both forms of torch.save's files
TF_TABLE = bytes.fromhex("57fb808b247547db")  # the last bytes of TensorFlow's index
INDEX = ".index.json"  # after the name of the whole file: it names the shard of each tensor
# A training run's state, by names of keys and files.
OF_TRAINING = re.compile(r"(?i)\w*(optim|sched|scaler)\w*|(\w*_)?rng(_\w*)?|training_args|random_states_\w+")
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
Reader = Callable[[Path], Container]


def is_safetensors(peek: Peek) -> bool:
    return peek.head[8:9] == b"{" and struct.unpack("<Q", peek.head[:8])[0] <= MAX_HEADER


def is_torch(peek: Peek) -> bool:
    return peek.head.startswith((ZIP, PICKLE))


def is_npz(peek: Peek) -> bool:
    (size,) = struct.unpack_from("<H", peek.head, 26) if peek.head.startswith(ZIP) else (0,)
    return peek.head[30 : 30 + size].endswith(b".npy")


def is_onnx(peek: Peek) -> bool:
    """Return whether a file begins with the format's version, then the producer, graph or operators."""
    return (
        len(peek.head) > 8
        and peek.head[0] == 0x08
        and peek.head[1] < 0x80
        and peek.head[2] in (0x12, 0x1A, 0x22, 0x28, 0x3A)
    )


# Hugging Face's file of each format, a test of its content, and "module.function" of its reader.
CONTAINERS: dict[str, tuple[Callable[[Peek], bool], str]] = {
    FILES[0]: (is_safetensors, "safetensors.read_safetensors"),
    FILES[1]: (is_torch, "torch.read_torch"),
}
# Any other file is known by its content; a folder is searched for PATTERNS.
FORMATS: tuple[tuple[Callable[[Peek], bool], str], ...] = (
    (lambda peek: peek.head.startswith(b"GGUF"), "gguf.read_gguf"),
    (lambda peek: peek.tail.endswith(TF_TABLE), "tf_bundle.read_tf_bundle"),
    (lambda peek: peek.head[257:262] == b"ustar", "ranks.read_nemo"),
    (is_npz, "torch.read_npz"),
    (is_torch, "torch.read_training_checkpoint"),
    (is_safetensors, "safetensors.read_safetensors"),
    (is_onnx, "onnx.read_onnx"),
)
# Programs whose files are not implemented: a place and the bytes there, the end of a name, and how weights get here.
_BY_TRANSFORMERS = "read it with transformers before 5, from_{}=True, and save_pretrained"
FOREIGN: tuple[tuple[str, int, bytes | tuple[bytes, ...], str, str], ...] = (
    ("Keras", 0, b"\x89HDF\r\n\x1a\n", ".h5", _BY_TRANSFORMERS.format("tf")),
    ("Keras", 0, (), ".keras", "save its weights in model.safetensors, with a tensor_names.json"),
    ("Flax", 0, (), ".msgpack", _BY_TRANSFORMERS.format("flax")),
    ("ggml before GGUF", 0, (b"lmgg", b"fmgg", b"tjgg"), ".ggml", "convert the original checkpoint to GGUF"),
    ("llm.c", 0, struct.pack("<i", 20240326), ".llmc", "export it with its dev/eval/export_hf.py"),
    ("CTranslate2", 6, b"TransformerDecoderSpec", ".ct2", "give the model that it was converted from"),
)
# Files that belong together: the function that finds the first, or the folder itself, and the reader.
FOLDERS = (
    ("tf_bundle.find_tf_index", "tf_bundle.read_tf_bundle"),
    ("ranks.find_deepspeed", "ranks.read_deepspeed"),
    ("ranks.find_megatron", "ranks.read_megatron"),
    ("ranks.find_nemo", "ranks.read_unpacked_nemo"),
    ("ranks.find_ft_folder", "ranks.read_ft_folder"),
)
PATTERNS = ("*.onnx", "*.nemo", "*.index", "*.gguf", "*.safetensors", "*.bin", "*.pt", "*.pth")
LAST_PATTERNS = ("*.ckpt", "*.npz")  # names that a folder may also hold next to its weights


def _function(place: str) -> Callable[[Path], Any]:
    """Return a function of a module here, which is imported for its own files alone."""
    module, name = place.split(".")
    return getattr(import_module(f".{module}", __package__), name)


def read_weights(path: Path) -> Container:
    """Return the weights in a file, or in a folder, whole or in shards, that a user names. Raise CheckpointError."""
    if path.is_file():
        path = followed(path)
        return reader_of(path)(path)
    file_and_reader = find_weights(path)
    if file_and_reader is None:
        for file in sorted(path.glob("*")):
            if file.is_file() and (known := _foreign(file, b"")):
                raise CheckpointError(
                    f"{path} holds no weights that are implemented, and {file.name}, {known}."
                )
        wanted = ", ".join(f"{name}, {name}{INDEX}" for name in FILES)
        raise CheckpointError(
            f"{path} holds no weights ({describe(path)}): put one of {wanted} there, or name the file."
        )
    file, read = file_and_reader
    return read(file)


def find_weights(folder: Path) -> tuple[Path, Reader] | None:
    """Return the file of a folder's weights, and its reader. Raise CheckpointError for several."""
    for name, (is_as_named, read) in CONTAINERS.items():
        file = folder / name
        index = folder / (name + INDEX)
        if file.exists():
            peek = Peek.into(file)
            others = (other for is_format, other in FORMATS if is_format(peek))
            return file, _function(read if is_as_named(peek) else next(others, read))
        if index.exists():
            return index, partial(read_shards, read=_function(read))
    for find, read in FOLDERS:
        if first := _function(find)(folder):
            return first, _function(read)
    files = sorted({file for pattern in PATTERNS for file in folder.glob(pattern) if file.is_file()})
    for pattern in LAST_PATTERNS:
        files = files or sorted(folder.glob(pattern))
    files = [file for file in files if not OF_TRAINING.fullmatch(file.stem)] or files[:1]
    if len({_PART.sub("", file.name) for file in files}) == 1:
        files = files[:1]  # the reader says what is to be done with parts
    if len(files) > 1:
        names = listed([file.name for file in files], NAMED)
        raise CheckpointError(
            f"{folder} holds several files that may be weights: {names}. Name the one to load."
        )
    return (files[0], reader_of(files[0])) if files else None


def reader_of(file: Path) -> Reader:
    peek = Peek.into(file)
    for is_format, read in FORMATS:
        if is_format(peek):
            return _function(read)
    if known := _foreign(file, peek.head):
        raise CheckpointError(f"{file} is {known}.")
    is_of_weights = any(file.match(pattern) for pattern in (*PATTERNS, *LAST_PATTERNS))  # a damaged one
    is_beside_them = any((file.parent / name).is_file() for name in ("config.json", *FILES))
    if is_beside_them and not is_of_weights:
        raise CheckpointError(
            f"{file} is a file of a checkpoint, and not its weights: give the folder, {file.parent}."
        )
    quoted = "as its link leads" if file.is_symlink() else f"it begins with {peek.head[:8]!r}"
    beginning = quoted if peek.head else "it is empty"
    raise CheckpointError(
        f"{file} is in no format of weights that is implemented ({beginning}): give a file of safetensors, PyTorch, "
        "GGUF, ONNX, TensorFlow or NeMo, or a folder with config.json and its weights."
    )


def _foreign(file: Path, head: bytes) -> str | None:
    """Return the program of a file that is not implemented, and advice."""
    for program, place, first, suffix, advice in FOREIGN:
        if head[place:].startswith(first) or file.suffix == suffix:
            return f"a file of {program}, which is not implemented: {advice}"
    return None


def read_shards(index: Path, read: Reader) -> Container:
    weight_map = shard_of_each_tensor(index)
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if not (index.parent / shard).exists()]
    if absent:
        raise CheckpointError(f"{index} names shards that are not there: {listed(absent)}. Download them.")
    names_in: dict[str, list[str]] = {shard: [] for shard in shards}
    for name, shard in weight_map.items():
        names_in[shard].append(name)
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        container = read(index.parent / shard)
        in_shard = container.tensors
        lost = [name for name in names_in[shard] if name not in in_shard]
        twice = [name for name in in_shard if name in tensors]
        if lost or twice:
            problems = [f"does not hold {listed(lost)}"] * bool(lost)
            problems += [f"holds {listed(twice)}, as another shard does"] * bool(twice)
            raise CheckpointError(
                f"{index} does not describe its shards: {shard} {' and '.join(problems)}. Download them all again."
            )
        tensors |= in_shard
    return Container(f"{container.format} in {len(shards)} shards", tensors)


def shard_of_each_tensor(index: Path) -> dict[str, str]:
    """Return an index's `weight_map`. Raise CheckpointError unless each tensor has a plain file name."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no 'weight_map' of tensor names to shards: download it again.")
    strange = [
        shard for shard in weight_map.values() if not isinstance(shard, str) or not _is_plain_name(shard)
    ]
    if strange:
        raise CheckpointError(
            f"{index} names the shard {shown(strange[0])}, which is no file name in its own folder: download the "
            "index again."
        )
    if (count := len(set(weight_map.values()))) > MAX_SHARDS:
        raise CheckpointError(f"{index} names {count} shards and at most {MAX_SHARDS} are believed.")
    return weight_map


def _is_plain_name(shard: str) -> bool:
    """Return whether a name is one file's: no folder, and no pattern to the Hub or a shell."""
    return (
        shard not in (".", "..")
        and shard.isprintable()
        and not set(shard) & set("*?[]")
        and PurePosixPath(shard).name == PureWindowsPath(shard).name == shard
        and 0 < len(shard.encode()) <= NAME_MAX
    )
