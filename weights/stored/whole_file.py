"""Files that are written whole or not at all."""

import os
import secrets
from pathlib import Path

from tinygpt.disk import sync, sync_folder


def replace_whole(path: Path, data: bytes) -> None:
    """Write a file that survives a power cut once this returns. One that is there stays until then. Raises OSError."""
    partial = path.with_name(f"tinygpt-{secrets.token_hex(4)}.partial")  # no longer than a name may be
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            sync(file.fileno())  # or the name might reach the disk before the data
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)
