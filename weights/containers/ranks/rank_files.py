"""The files of several ranks as one container.

The tensors of each file stand under the name of its rank, such as "mp_rank_01/model.embedding.weight", and so do the
metadata, by rank. A file alone has no rank.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinygpt.regular_file import open_regular, read_regular_text
from tinygpt.weights.containers.container import Container
from tinygpt.weights.containers.pickles.torch_file import read_training_checkpoint
from tinygpt.weights.errors import CheckpointError

# What folders of ranks are called: tensor parallel, then pipeline parallel where there is any.
RANK = re.compile(r"mp_rank_(\d{2,3})(?:_(\d{3}))?|tp_rank_(\d{2,3})_pp_rank_(\d{3})")
MAX_RANKS, MAX_TEXT = 1024, 2**25  # files, bytes of a text beside them


@dataclass(frozen=True)
class Member:
    """A file that lies in an archive, or in the folder that one was unpacked into (`part` is None)."""

    path: Path
    part: range | None = None

    def text(self) -> str:
        """Raises CheckpointError where it is too long for a text, or none."""
        try:
            if self.part is None:
                return read_regular_text(self.path)
            if len(self.part) > MAX_TEXT:
                raise CheckpointError(f"{self.path} has a text of {len(self.part)} bytes, which is none.")
            with open_regular(self.path) as file:
                file.seek(self.part.start)
                return file.read(len(self.part)).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{self.path} has a text that cannot be read: {error}.") from error


class _ByRank(dict):
    """Metadata by rank. No file can pretend to be of this class."""


def metadata_by_rank(container: Container) -> dict[str, Any]:
    """Of a container of any kind: one that has no ranks is one."""
    ranks = container.metadata.get("ranks")
    return ranks if isinstance(ranks, _ByRank) else {"": container.metadata}


def rank_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*_rank_*") if RANK.fullmatch(path.name) and path.is_dir())


def joined(format: str, files: dict[str, Member], metadata: dict[str, Any]) -> Container:
    """The files by their ranks; "" is a file without."""
    if len(files) > MAX_RANKS:
        raise CheckpointError(f"{len(files)} ranks are more than any model was trained on.")
    tensors, by_rank = {}, {}
    for rank, file in files.items():
        container = read_training_checkpoint(file.path, file.part)
        tensors |= {f"{rank}/{name}" if rank else name: tensor for name, tensor in container.tensors.items()}
        by_rank[rank] = container.metadata
    return Container(
        f"{format}, {len(files)} ranks" if len(files) > 1 else format, tensors, {**metadata, "ranks": _ByRank(by_rank)}
    )
