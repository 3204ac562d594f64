"""Files: a name that is free, and having what is written on the disk before going on, where the system can."""

import errno
import os
from itertools import chain, count
from pathlib import Path


def free_path(path: Path) -> Path:
    """The path, or one with a number, where there is nothing: what is advised writes over nothing."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(free for free in chain([path], numbered) if not os.path.lexists(free))


def sync(descriptor: int) -> None:
    """Raises OSError where the disk fails, and not where a file system knows no such thing."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def sync_folder(folder: Path) -> None:
    """The names in a folder, as `sync` does their files."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # nobody may open a folder on Windows, and not everybody elsewhere
        return
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)
