"""The texts that a model is measured on: a plain file, or LAMBADA's rows. Read before the model is loaded."""

import codecs
import json
from pathlib import Path

from tinygpt.errors import RequestError

# How iconv calls what a file begins with; UTF-32's mark begins with one of UTF-16's.
MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
# Which bytes are zero without a mark, over and over.
ZEROS = {
    "UTF-16LE": (False, True) * 4,
    "UTF-16BE": (True, False) * 4,
    "UTF-32LE": (False, True, True, True) * 2,
    "UTF-32BE": (True, True, True, False) * 2,
}
POWERSHELL = {
    "UTF-16": "unicode",
    "UTF-16LE": "unicode",
    "UTF-16BE": "bigendianunicode",
    "UTF-32": "utf32",
    "UTF-32LE": "utf32",
    "UTF-32BE": "bigendianutf32",
}


def read_text(name: str, path: str | Path) -> str:
    """The file's text. RequestError, in which `name` says what the file is, where there is none."""
    try:
        data = Path(path).read_bytes()
        check_encoding(f"{name} {path}", data)
        text = data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} {path} is not UTF-8 (byte {error.start}): give a file of plain text.") from None
    except OSError as error:
        raise RequestError(f"{name} {path} cannot be read: {error.strerror}.") from None
    if not text.strip():
        raise RequestError(f"{name} {path} is empty: give a file that holds text.")
    return text


def check_encoding(name: str, data: bytes) -> None:
    """RequestError for UTF-16, which Windows writes, UTF-32 and what is no text: they begin with zeros or a mark."""
    if encoding := _encoding_of(data):
        raise RequestError(
            f"{name} is {encoding[:6]} text and must be UTF-8: convert it, as by `iconv -f {encoding} -t UTF-8`, or in "
            f"PowerShell by `Get-Content -Encoding {POWERSHELL[encoding]} FILE | Set-Content -Encoding utf8 NEW`."
        )
    if b"\0" in data[:8]:
        raise RequestError(f"{name} is a binary file, with a zero as its byte {data.index(0)}: give one of plain text.")


def _encoding_of(data: bytes) -> str | None:
    """By its mark, or else by the places of zeros: plain text begins with characters below U+0100."""
    zeros = tuple(byte == 0 for byte in data[:8])
    marked = (name for mark, name in MARKS.items() if data.startswith(mark))
    placed = (name for name, places in ZEROS.items() if any(zeros) and places[: len(zeros)] == zeros)
    return next(marked, None) or next(placed, None)


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
