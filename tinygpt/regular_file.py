"""Opening a file of which only the name is known: a regular one, or an OSError that says what else it is.

A folder from elsewhere may hold a FIFO, which blocks whoever opens it until somebody writes, or a device, which may
have no end. Checks are made on the open file, so that what was checked is what is read.
"""

import errno
import io
import os
import stat
from pathlib import Path
from typing import BinaryIO

# Opening a FIFO must not wait for its writer, nor a terminal become this process's own. Windows has neither.
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading bytes. OSError, whose `strerror` says why, if it is not regular or cannot be opened."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | _FLAGS))  # noqa: SIM115, the caller's
    kind = stat.S_IFMT(os.fstat(file.fileno()).st_mode)
    if kind != stat.S_IFREG:
        file.close()
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'no file')}, and must be a regular file", str(path))
    return file


def read_regular_text(path: Path) -> str:
    """The UTF-8 text in a file, line ends as one newline each. OSError as above, and UnicodeDecodeError."""
    with io.TextIOWrapper(open_regular(path), encoding="utf-8") as file:
        return file.read()


def name_of_open_file(file: BinaryIO) -> str:
    """A name by which a library opens this very file again, whatever its path names by then; Windows has none."""
    again = f"/dev/fd/{file.fileno()}"
    return again if os.path.exists(again) else file.name
