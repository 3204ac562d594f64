"""The texts that a model is measured on: a plain file, or LAMBADA's rows. Read before the model is loaded."""

import codecs
import json
from pathlib import Path

from tinygpt.errors import RequestError


def read_text(name: str, path: str | Path) -> str:
    """The file's text. RequestError, in which `name` says what the file is, where there is none."""
    try:
        data = Path(path).read_bytes()
        check_is_not_utf_16(f"{name} {path}", data)
        text = data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} {path} is not UTF-8 (byte {error.start}): give a file of plain text.") from None
    except OSError as error:
        raise RequestError(f"{name} {path} cannot be read: {error.strerror}.") from None
    if not text.strip():
        raise RequestError(f"{name} {path} is empty: give a file that holds text.")
    return text


def check_is_not_utf_16(name: str, data: bytes) -> None:
    """RequestError where it is, which Windows writes: every second byte of plain text is then zero."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data[:4]:
        raise RequestError(
            f"{name} is UTF-16 text and must be UTF-8: convert it, as by `iconv -f UTF-16 -t UTF-8`, or in Windows "
            "PowerShell by `Get-Content -Encoding unicode FILE | Set-Content -Encoding utf8 NEW`."
        )


def read_rows(name: str, path: str | Path) -> list[str]:
    """The texts of a JSONL file. RequestError names the first line without a text of at least two words."""
    lines = enumerate(read_text(name, path).split("\n"), 1)
    return [_row_text(line, f"line {number} of {name} {path}") for number, line in lines if line.strip()]


def _row_text(line: str, place: str) -> str:
    try:
        text = json.loads(line)["text"]
        if isinstance(text, str) and len(text.split()) > 1:
            return text
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise RequestError(f'{place} is not a row of LAMBADA: give {{"text": ...}} with a text of at least two words.')
