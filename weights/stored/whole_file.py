"""Files that are written whole or not at all."""

import contextlib
import os
import secrets
from pathlib import Path


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
