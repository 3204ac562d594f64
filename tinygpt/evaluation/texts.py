"""Texts to measure a model on: plain files, LAMBADA's rows, and articles with summaries."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RequestError

SUMMARIES = ("highlights", "summary")  # the first is CNN/DailyMail's


@dataclass(frozen=True)
class Article:
    text: str
    summary: str


def read_text(name: str, path: str | Path) -> str:
    """Read a UTF-8 file, `name` in errors. Raise RequestError without text."""
    try:
        data = Path(path).read_bytes()
        check_encoding(f"{name} {path}", data)
        text = data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} {path} is not UTF-8 (byte {error.start}): give a file of plain text."
        ) from None
    except OSError as error:
        raise RequestError(f"{name} {path} cannot be read: {error.strerror}.") from None
    if not text.strip():
        raise RequestError(f"{name} {path} is empty: give a file that holds text.")
    return text


def check_encoding(name: str, data: bytes) -> None:
    """Raise RequestError for UTF-16, UTF-32 and binary files."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in data[:8]:
        raise RequestError(
            f"{name} is UTF-16, UTF-32 or binary and must be UTF-8 text: convert it, as by `iconv`."
        )


def read_rows(name: str, path: str | Path) -> list[str]:
    """Read a JSONL file's texts. Raise RequestError for a text of less than two words."""
    rows = []
    for row, place in _rows(name, path):
        text = row.get("text")
        if not isinstance(text, str) or len(text.split()) < 2:
            raise RequestError(
                f'{place} is not a row of LAMBADA: give {{"text": ...}} with at least two words.'
            )
        rows.append(text)
    return rows


def read_articles(name: str, path: str | Path) -> list[Article]:
    """Read a JSONL file. Raise RequestError without an article and its summary."""
    articles = []
    for row, place in _rows(name, path):
        text = row.get("article")
        summary = next((row[field] for field in SUMMARIES if field in row), None)
        if not isinstance(text, str) or not isinstance(summary, str) or not summary.strip():
            raise RequestError(
                f'{place} is no article with a summary: give {{"article": ..., "highlights": ...}}.'
            )
        articles.append(Article(text, summary))
    return articles


def _rows(name: str, path: str | Path) -> list[tuple[dict[str, Any], str]]:
    rows = []
    for number, line in enumerate(read_text(name, path).split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            rows.append((row if isinstance(row, dict) else {}, f"line {number} of {name} {path}"))
    return rows
