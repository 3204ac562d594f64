"""The tables by which the format of a file or a folder is found, and its reader."""

from collections.abc import Callable
from pathlib import Path

from tinygpt.weights.containers.container import FILES, Container
from tinygpt.weights.containers.ft_folder import find_ft_folder, read_ft_folder
from tinygpt.weights.containers.gguf.gguf_file import is_gguf, read_gguf
from tinygpt.weights.containers.npz_file import is_npz, read_npz
from tinygpt.weights.containers.onnx.onnx_file import is_onnx, read_onnx
from tinygpt.weights.containers.peek import Peek
from tinygpt.weights.containers.pickles.torch_file import is_torch, read_torch, read_training_checkpoint
from tinygpt.weights.containers.ranks.deepspeed_folder import find_deepspeed, read_deepspeed
from tinygpt.weights.containers.ranks.megatron_folder import (
    find_distributed,
    find_megatron,
    read_distributed,
    read_megatron,
)
from tinygpt.weights.containers.ranks.nemo_archive import (
    find_nemo,
    is_gzip,
    is_tar,
    read_gzip,
    read_nemo,
    read_unpacked_nemo,
)
from tinygpt.weights.containers.safetensors.safetensors_file import is_safetensors, read_safetensors
from tinygpt.weights.containers.shards import INDEX, read_shards
from tinygpt.weights.containers.tensorflow.tf_bundle import find_tf_index, is_tf_index, read_tf_bundle
from tinygpt.weights.errors import CheckpointError
from tinygpt.weights.messages import NAMED, describe, listed

Reader = Callable[[Path], Container]
# Hugging Face's file of each format, and its reader. In shards, the weights lie in files of any names, and an index
# `FILE.index.json` says which tensor is in which.
CONTAINERS: dict[str, Reader] = dict(zip(FILES, (read_safetensors, read_torch), strict=True))
# Whether a file of such a name is what the name says.
IS_AS_NAMED = {read_safetensors: is_safetensors, read_torch: is_torch}
# Any other file is known by its content; PATTERNS are the names under which a folder is searched for one.
FORMATS: tuple[tuple[Callable[[Peek], bool], Reader], ...] = (
    (is_gguf, read_gguf),
    (is_tf_index, read_tf_bundle),
    (is_tar, read_nemo),
    (is_gzip, read_gzip),
    (is_npz, read_npz),
    (is_torch, read_training_checkpoint),
    (is_safetensors, read_safetensors),
    (is_onnx, read_onnx),
)
# Files that belong together, by what finds in a folder the one to begin with, or the folder itself.
FOLDERS: tuple[tuple[Callable[[Path], Path | None], Reader], ...] = (
    (find_tf_index, read_tf_bundle),
    (find_deepspeed, read_deepspeed),
    (find_megatron, read_megatron),
    (find_distributed, read_distributed),
    (find_nemo, read_unpacked_nemo),
    (find_ft_folder, read_ft_folder),
)
PATTERNS = ("*.onnx", "*.nemo", "*.index", "*.gguf", "*.safetensors", "*.bin", "*.pt", "*.pth")
# What a folder may hold beside its weights: training's own files, and NumPy's, which are refused by what they are.
LAST_PATTERNS = ("*.ckpt", "*.npz")


def read_weights(path: Path) -> Container:
    """The weights in a file, or in a folder, whole or in shards.

    Raises CheckpointError when there are none, a file is damaged, or an index is not true of its shards.
    """
    if path.is_file():
        return reader_of(path)(path)
    found = find_weights(path)
    if found is None:
        wanted = ", ".join(f"{name}, {name}{INDEX}" for name in CONTAINERS)
        raise CheckpointError(
            f"{path} holds no weights ({describe(path)}): put one of {wanted} there, or name the file."
        )
    file, read = found
    return read(file)


def find_weights(folder: Path) -> tuple[Path, Reader] | None:
    """The file that a folder's weights are read from, and its reader. CheckpointError where several could be meant."""
    for name, read in CONTAINERS.items():
        if (folder / name).exists():
            return folder / name, _reader_of_named(folder / name, read)
        if (folder / (name + INDEX)).exists():
            return folder / (name + INDEX), lambda index, read=read: read_shards(index, read)
    for find, read in FOLDERS:
        if found := find(folder):
            return found, read
    files = sorted({file for pattern in PATTERNS for file in folder.glob(pattern) if file.is_file()})
    for pattern in LAST_PATTERNS:
        files = files or sorted(folder.glob(pattern))
    if len(files) > 1:
        names = listed([file.name for file in files], NAMED)
        raise CheckpointError(f"{folder} holds several files that may be weights: {names}. Name the one to load.")
    return (files[0], reader_of(files[0])) if files else None


def _reader_of_named(file: Path, read: Reader) -> Reader:
    """`read`, which the file's name promises, unless it is in another format that is known."""
    peek = Peek.into(file)
    if IS_AS_NAMED[read](peek):
        return read
    return next((other for is_format, other in FORMATS if is_format(peek)), read)


def reader_of(file: Path) -> Reader:
    """The reader of a file's format. CheckpointError where that is none that is known."""
    peek = Peek.into(file)
    for is_format, read in FORMATS:
        if is_format(peek):
            return read
    is_of_weights = any(file.match(pattern) for pattern in (*PATTERNS, *LAST_PATTERNS))  # one that is damaged
    is_beside_them = (file.parent / "config.json").is_file() or any((file.parent / n).is_file() for n in CONTAINERS)
    if is_beside_them and not is_of_weights:
        raise CheckpointError(f"{file} is a file of a checkpoint, and not its weights: give the folder, {file.parent}.")
    found = f"it begins with {peek.head[:8]!r}" if peek.size else "it is empty"
    raise CheckpointError(
        f"{file} is in no format of weights that is implemented ({found}): give a file of safetensors, PyTorch, GGUF, "
        "ONNX, TensorFlow or NeMo, or a folder with config.json and its weights."
    )
