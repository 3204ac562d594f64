"""NeMo's archives, which are tar files of ranks and settings, and the folders that they are unpacked into."""

import os
import tarfile
from pathlib import Path
from typing import BinaryIO

from tinygpt.regular_file import open_regular
from tinygpt.weights.containers.container import Container
from tinygpt.weights.containers.peek import Peek
from tinygpt.weights.containers.ranks.rank_files import Member, joined, rank_folders
from tinygpt.weights.errors import CheckpointError

NEMO_CONFIG, NEMO_WEIGHTS = "model_config.yaml", "model_weights.ckpt"
OLD_TORCH = {"sys_info", "pickle", "tensors", "storages"}  # members of such an archive
MAX_MEMBERS = 10_000


class _Bounded:
    """A file for tarfile, which reads as many bytes as a header claims: never more than there are."""

    def __init__(self, file: BinaryIO):
        self._file, self._size = file, os.fstat(file.fileno()).st_size
        self.seek, self.tell = file.seek, file.tell

    def read(self, count: int) -> bytes:
        return self._file.read(min(count, self._size))


class _Members(dict):
    """What else lies in an archive, by name."""


def members_of(container: Container) -> dict[str, Member]:
    """Of NeMo's archives, what else lies in them."""
    members = container.metadata.get("members")
    return members if isinstance(members, _Members) else {}


def is_tar(peek: Peek) -> bool:
    return peek.head[257:262] == b"ustar"


def is_gzip(peek: Peek) -> bool:
    return peek.head.startswith(b"\x1f\x8b")


def read_gzip(path: Path) -> Container:
    raise CheckpointError(f"{path} is compressed: unpack it with `tar -xzf`, and give the folder.")


def read_nemo(path: Path) -> Container:
    """A .nemo archive, whose members are read where they lie. CheckpointError when it is damaged or another archive."""
    members = {}
    try:
        with open_regular(path) as file, tarfile.open(fileobj=_Bounded(file), mode="r:") as archive:
            for count, info in enumerate(archive):
                name = info.name.removeprefix("./")
                if count >= MAX_MEMBERS or name in members or not (info.isreg() or info.isdir()):
                    raise CheckpointError(
                        f"{path} has a member {info.name!r} that is a link, or a second one: refused."
                    )
                if info.isreg() and not info.issparse():
                    members[name] = Member(path, range(info.offset_data, info.offset_data + info.size))
    except CheckpointError:
        raise
    except (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path} is a damaged archive ({error}): download it again.") from error
    return _nemo(path, members)


def find_nemo(folder: Path) -> Path | None:
    """A folder that a .nemo archive was unpacked into."""
    is_there = (folder / NEMO_CONFIG).is_file() and _unpacked(folder).keys() - {NEMO_CONFIG}
    return folder if is_there else None


def read_unpacked_nemo(folder: Path) -> Container:
    return _nemo(folder, _unpacked(folder))


def _unpacked(folder: Path) -> dict[str, Member]:
    ranks = [path / NEMO_WEIGHTS for path in rank_folders(folder) if (path / NEMO_WEIGHTS).is_file()]
    files = [path for path in folder.glob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): Member(path) for path in (*files, *ranks)}


def _nemo(path: Path, members: dict[str, Member]) -> Container:
    if members.keys() >= OLD_TORCH:
        raise CheckpointError(
            f"{path} is in the form that PyTorch wrote before 0.1.10, which is not implemented: load it with torch, "
            "and save it again."
        )
    if NEMO_CONFIG not in members:
        raise CheckpointError(f"{path} is an archive without {NEMO_CONFIG}: it is not NeMo's. Give another file.")
    if any(name.startswith("model_weights/") for name in members):
        raise CheckpointError(f"{path} is in NeMo's distributed format, which is not implemented: save it in one file.")
    weights = {name.rpartition("/")[0]: member for name, member in members.items() if name.endswith(NEMO_WEIGHTS)}
    others = {name: member for name, member in members.items() if not name.endswith(NEMO_WEIGHTS)}
    if not weights:
        raise CheckpointError(f"{path} holds no {NEMO_WEIGHTS}: download it again.")
    return joined("NeMo", weights, {"members": _Members(others)})
