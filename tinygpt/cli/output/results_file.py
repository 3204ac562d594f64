"""Where results go: stdout, or a file that is known to be writable before anything is measured."""

import os
from pathlib import Path

from tinygpt.cli.output.messages import put
from tinygpt.errors import RequestError, TinyGPTError


def check_writable(flag: str, path: Path) -> None:
    """RequestError, before any work, if `path` cannot be written. An existing file stays as it is."""
    if path.is_dir():
        raise RequestError(f"{flag} {path} is a folder: name a file in it.")
    if not path.absolute().parent.is_dir():
        raise RequestError(f"the folder of {flag} {path} does not exist: create it first.")
    was_there = os.path.lexists(path)
    if was_there and not path.is_file():  # a device, or a pipe, which might wait for its reader
        return
    try:
        path.open("ab").close()
        if not was_there:
            path.unlink()
    except OSError as error:
        raise RequestError(
            f"{flag} {path} cannot be written ({error.strerror}): name a file in a folder where you may write."
        ) from None


def write(text: str, path: Path | None) -> None:
    """To the file, or to stdout without one. If the file fails after all, to stdout, with TinyGPTError.

    A file that is there stays until the new one is whole.
    """
    if path is None:
        put(text)
        return
    try:
        _write_file(path.resolve(), f"{text}\n".encode())
    except OSError as error:
        put(text)
        raise TinyGPTError(f"{path} could not be written ({error.strerror}): the results are on stdout.") from None


def _write_file(path: Path, data: bytes) -> None:
    from tinygpt.weights.stored.whole_file import replace_whole

    if path.exists() and not path.is_file():  # a device or a pipe
        path.write_bytes(data)
        return
    try:
        replace_whole(path, data)
    except PermissionError:  # a folder that takes no new file, with one in it that may be written to
        path.write_bytes(data)
