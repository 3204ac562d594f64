"""One module for each file format, and the table by which a folder's format is found.

Belongs here: which tensors a file holds and how their elements are decoded. A container knows nothing of any model.
May import the errors, `regular_file`, and weights' JSON reader, field checks and tensors.
"""

from collections.abc import Callable
from pathlib import Path

from tinygpt.errors import CheckpointError
from tinygpt.weights.containers.container import Container
from tinygpt.weights.containers.safetensors_file import read_safetensors
from tinygpt.weights.containers.shards import INDEX, read_shards
from tinygpt.weights.containers.torch_file import read_torch

# The file of each format, and its reader, in the order in which transformers looks for them. In shards, the weights
# lie in files of any names, and an index `FILE.index.json` says which tensor is in which.
CONTAINERS: dict[str, Callable[[Path], Container]] = {
    "model.safetensors": read_safetensors,
    "pytorch_model.bin": read_torch,
}


def read_weights(folder: Path) -> Container:
    """The weights in a folder, whole or in shards.

    Raises CheckpointError when there are none, a file is damaged, or an index is not true of its shards.
    """
    for name, read in CONTAINERS.items():
        if (folder / name).exists():
            return read(folder / name)
        if (folder / (name + INDEX)).exists():
            return read_shards(folder / (name + INDEX), read)
    wanted = ", ".join(f"{name}, {name}{INDEX}" for name in CONTAINERS)
    raise CheckpointError(f"{folder} holds no weights ({describe(folder)}): put one of {wanted} there.")


def describe(folder: Path) -> str:
    """What a folder holds, in a few words."""
    names = sorted(path.name + "/" * path.is_dir() for path in folder.glob("*"))
    if not names:
        return "it is empty"
    return "it holds " + ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
