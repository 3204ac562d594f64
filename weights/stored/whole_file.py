"""Files that are read whole, and written whole or not at all."""

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path


def read_whole(path: Path) -> bytes:
    """The bytes of a regular file, as many as it had when it was opened. OSError for any other, and if it fails.

    It is opened once: what is looked at is what is read. Nothing is waited for, as a pipe's other end would be.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # Windows has but the latter
    with open(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        return file.read(status.st_size)


def replace_whole(path: Path, data: bytes) -> None:
    """Write a file that survives a power cut once this returns. One that is there stays until then. Raises OSError."""
    partial = path.with_name(f"tinygpt-{secrets.token_hex(4)}.partial")  # no longer than a name may be
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # or the name might reach the disk before the data
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Have the name on the disk too, where the system can: not on Windows, nor on every file system."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
