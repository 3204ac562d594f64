"""NumPy's archives of arrays, which `convert --to npz` writes: known so that they are refused by what they are."""

from pathlib import Path

from tinygpt.weights.containers.container import Container
from tinygpt.weights.containers.peek import Peek
from tinygpt.weights.errors import CheckpointError

# Of a zip archive's first entry: what it begins with, where it says how long its name is, and where that begins.
ZIP, NAME_LENGTH, NAME = b"PK\x03\x04", slice(26, 28), 30


def is_npz(peek: Peek) -> bool:
    length = int.from_bytes(peek.head[NAME_LENGTH], "little")
    return peek.head.startswith(ZIP) and peek.head[NAME : NAME + length].endswith(b".npy")


def read_npz(path: Path) -> Container:
    raise CheckpointError(
        f"{path} is NumPy's archive of arrays, which `convert --to npz` writes for other programs and nothing here "
        "reads: give the checkpoint that it was made from."
    )
