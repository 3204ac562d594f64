"""Bytes that a prompt, or many, are read from: a file, or stdin, which is `-`."""

import sys
from contextlib import suppress
from pathlib import Path

from tinygpt.cli.output.messages import say
from tinygpt.errors import RequestError
from tinygpt.evaluation.texts import check_encoding

STDIN = "-"


def read_bytes(flag: str, path: str | Path, give: str) -> bytes:
    """All of a file, or of stdin. RequestError, which ends in what to `give` instead, where that cannot be read."""
    if str(path) == STDIN:
        return read_stdin()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise RequestError(f"{flag} {path} cannot be read ({error.strerror}): give {give}.") from None


def read_stdin() -> bytes:
    if sys.stdin is None:  # the descriptor was closed, as by `<&-`
        raise RequestError("no PROMPT was given and stdin is closed: give a PROMPT, or --input.")
    if sys.stdin.isatty():
        say("reading from the terminal; end it with Ctrl-D (on Windows: Ctrl-Z, Enter)")
    return sys.stdin.buffer.read()


def text_of_stdin() -> str:
    """All of it, with a note where there is none."""
    text = decoded("stdin", read_stdin())
    if not text:
        say("stdin is empty: what follows is a text from its beginning")
    return text


def is_file_name(text: str) -> bool:
    """Whether there is a file of this name."""
    with suppress(OSError, ValueError):  # too long for one, or with a null character
        return Path(text).is_file()
    return False


def decoded(name: str, data: bytes) -> str:
    """UTF-8 as text; RequestError says what else it is. `name` begins the sentence."""
    check_encoding(name, data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 text: see its byte {error.start}, or convert it first.") from None
