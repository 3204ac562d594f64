"""A look at both ends of a file, by which its format is found: names and extensions may say anything."""

import os
from dataclasses import dataclass
from pathlib import Path

from tinygpt.regular_file import open_regular
from tinygpt.weights.errors import CheckpointError

HEAD, TAIL = 512, 48  # bytes


@dataclass(frozen=True)
class Peek:
    """The first and the last bytes of a file, and its size."""

    head: bytes
    tail: bytes
    size: int

    @classmethod
    def into(cls, path: Path) -> "Peek":
        """Raises CheckpointError where the file cannot be opened or is not regular."""
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                head = file.read(HEAD)
                file.seek(max(size - TAIL, 0))
                return cls(head, file.read(TAIL), size)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
