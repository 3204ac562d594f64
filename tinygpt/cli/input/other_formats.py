"""What is given for JSONL and is none: an array, a table, lines of text. Each is refused with what makes it JSONL."""

import csv
import io
import json
import shlex
from codecs import BOM_UTF8
from contextlib import suppress
from itertools import dropwhile
from pathlib import Path

from tinygpt.cli.input.text import STDIN, decoded
from tinygpt.cli.output.wording import Worded
from tinygpt.disk import free_path
from tinygpt.suggestions import field_meant

# For a shell: Python is there wherever this runs.
_TO_JSONL = (
    """python3 -c 'import json, sys; sys.stdin.reconfigure(encoding="utf-8-sig"); """
    """[print(json.dumps({"prompt": line.strip()})) for line in sys.stdin if line.strip()]'"""
)
# A table begins with the names of its columns, perhaps behind blank lines.
_TABLE_TO_JSONL = (
    'import csv, itertools, json, sys; sys.stdin.reconfigure(encoding="utf-8-sig", newline=""); '
    "lines = itertools.dropwhile(str.isspace, sys.stdin); "
    '[print(json.dumps({{"prompt": row[{column}]}})) for row in csv.DictReader(lines, delimiter={delimiter})]'
)
TABLES, DELIMITERS = (".csv", ".tsv"), ",;\t"
MAX_NAME = 200  # characters: what is longer is a text, and no column's name


def check_is_no_array(path: Path, data: bytes) -> None:
    is_array = False
    if data.removeprefix(BOM_UTF8).lstrip().startswith(b"["):
        with suppress(ValueError, RecursionError):
            is_array = isinstance(json.loads(data), list)
    if is_array:
        source = "stdin" if str(path) == STDIN else f"--input {path}"
        raise Worded(f"{source} is a JSON array: give one object a line, as `jq -c '.[]'` makes of it.")


def check_is_no_table(path: Path, data: bytes) -> None:
    """A table is refused as a whole, with what makes JSONL of its column of prompts."""
    begin = data.removeprefix(BOM_UTF8).lstrip()[:1]
    if path.suffix.lower() not in TABLES or begin in (b"", b"{"):
        return
    text = decoded(f"--input {path}", data).removeprefix("\ufeff")
    refusal = f"--input {path} is a table by its name, and must be JSONL (a text that is one prompt is for --file)"
    raise Worded(refusal + _advice_for_table(path, text))


def _advice_for_table(path: Path, text: str) -> str:
    """How a table becomes JSONL; nothing where it does not begin with the names of columns."""
    lines = list(dropwhile(str.isspace, io.StringIO(text, newline="")))
    delimiter = max(DELIMITERS, key="".join(lines[:1]).count)
    columns = []
    with suppress(csv.Error):
        columns = next(csv.reader(lines, delimiter=delimiter), [])
    meant = (name for name in columns if field_meant(name, ["prompt"]))
    column = "prompt" if "prompt" in columns else next(meant, columns[0] if columns else None)
    if column is None or len(column) > MAX_NAME:
        return "."
    column_text, delimiter_text = (json.dumps(text, ensure_ascii=False) for text in (column, delimiter))
    program = shlex.quote(_TABLE_TO_JSONL.format(column=column_text, delimiter=delimiter_text))
    target = free_path(path.with_suffix(".jsonl"))
    row = f"each row's {column_text}"
    return f": to make a prompt of {row}, type python3 -c {program} < {_typed(path)} > {_typed(target)}"


def advice_for_text(path: Path, data: bytes, problems: dict[int, str]) -> str:
    """How lines of text become JSONL, where none of them is JSON, nor was meant to be an object of it."""
    is_json = any(line.lstrip().startswith(b"{") for line in data.split(b"\n"))
    if is_json or not all(problem.startswith("not JSON") for problem in problems.values()):
        return ""
    source = Path("FILE") if str(path) == STDIN else path
    target = free_path(source.with_name(f"{source.name}.jsonl"))
    return f"to make a prompt of each line of text, type {_TO_JSONL} < {_typed(source)} > {_typed(target)}"


def _typed(path: Path) -> str:
    return shlex.quote(str(path))
