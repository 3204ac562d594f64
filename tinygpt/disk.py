"""Having what is written on the disk before going on, where the system can."""

import errno
import os
from pathlib import Path


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
