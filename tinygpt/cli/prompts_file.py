"""The file behind --input: one prompt a line, all of them checked before any work."""

import csv
import json
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tinygpt.cli.messages import counted
from tinygpt.cli.records import is_unicode
from tinygpt.cli.sampling_flags import DEFAULTS, with_seed
from tinygpt.cli.text_input import STDIN, read_bytes
from tinygpt.cli.wording import Worded, for_json
from tinygpt.errors import RequestError
from tinygpt.evaluation.texts import check_encoding
from tinygpt.guided_grammar import check_grammar
from tinygpt.request.prompts import PROMPT_FIELDS, checked_salt
from tinygpt.sampling_params import SamplingParams
from tinygpt.suggestions import field_hint, is_already, nearest_field

MAX_LISTED = 20
# For a shell: Python is there wherever this runs.
_TO_JSONL = (
    """python3 -c 'import json, sys; sys.stdin.reconfigure(encoding="utf-8-sig"); """
    """[print(json.dumps({"prompt": line.strip()})) for line in sys.stdin if line.strip()]'"""
)
_TABLE_TO_JSONL = (
    'import csv, json, sys; sys.stdin.reconfigure(encoding="utf-8-sig", newline=""); '
    '[print(json.dumps({{"prompt": row[{column}]}})) for row in csv.DictReader(sys.stdin, delimiter={delimiter})]'
)
TABLES, DELIMITERS, MAX_HEADER = (".csv", ".tsv"), ",;\t", 10_000  # characters
_EXPECTED = f"A line is a JSON object, such as {json.dumps({'prompt': 'Once upon a time'})}."
_FUNCTIONS = "logits_processors"  # which JSON has not
_FIELDS = (
    *PROMPT_FIELDS,
    "id",
    "cache_salt",
    "split_special_tokens",
    *(name for name in DEFAULTS if name != _FUNCTIONS),
)


@dataclass(frozen=True)
class PromptRecord:
    """One line of the file."""

    line: int  # counted from 1
    id: str | int
    prompt: str | list[int]
    split_special_tokens: bool | None  # None: as the command line says
    params: SamplingParams
    cache_salt: str | None


@dataclass(frozen=True)
class PromptsFile:
    """The lines of a file that can be used, and what is wrong with each other, by its number."""

    path: Path
    records: list[PromptRecord]
    problems: dict[int, str]
    advice: str = ""  # on all problems

    def refuse(self, more: dict[int, str]) -> None:
        """RequestError that lists the lines with problems, if there are any; `more` are those that a model has."""
        problems = sorted({**self.problems, **more}.items())
        if not problems:
            return
        listed = [f"  line {number}: {problem}" for number, problem in problems[:MAX_LISTED]]
        if len(problems) > MAX_LISTED:
            listed.append(f"  and {len(problems) - MAX_LISTED} more")
        source = "stdin" if str(self.path) == STDIN else self.path
        headline = f"{counted(len(problems), 'line')} of {source} cannot be used, so nothing was generated:"
        raise Worded("\n".join([headline, *listed, *[self.advice] * bool(self.advice)]))


def read_prompts(path: Path, defaults: SamplingParams) -> list[PromptRecord]:
    """What `read_lines` finds. Raises RequestError that lists the lines which cannot be used, if there are any."""
    file = read_lines(path, defaults)
    file.refuse({})
    return file.records


def read_lines(path: Path, defaults: SamplingParams) -> PromptsFile:
    """Read every line; a line's own sampling fields come before `defaults`, and blank lines hold no prompt.

    Raises RequestError that says why the file cannot be read.
    """
    data = read_bytes("--input", path, "a JSONL file")
    check_encoding(f"--input {path}", data)
    _check_is_no_array(path, data)
    _check_is_no_table(path, data)
    records, problems = {}, {}
    check = lru_cache(check_grammar)  # many lines may have the same one
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = _read_line(number, line, defaults, check)
            if record.id in records:
                raise RequestError(f"id {record.id!r} is already that of line {records[record.id].line}.")
            records[record.id] = record
        except RequestError as error:
            problems[number] = in_json_words(error)
    return PromptsFile(path, list(records.values()), problems, _advice_for_text(path, data, problems))


def _check_is_no_array(path: Path, data: bytes) -> None:
    is_array = False
    if data.lstrip().startswith(b"["):
        with suppress(ValueError, RecursionError):
            is_array = isinstance(json.loads(data), list)
    if is_array:
        source = "stdin" if str(path) == STDIN else f"--input {path}"
        raise Worded(f"{source} is a JSON array: give one object a line, as `jq -c '.[]'` makes of it.")


def _check_is_no_table(path: Path, data: bytes) -> None:
    """A table is refused as a whole, with what makes JSONL of its column of prompts."""
    if path.suffix.lower() not in TABLES or data.lstrip()[:1] in (b"", b"{"):
        return
    first_line = data.decode("utf-8-sig", "replace").partition("\n")[0][:MAX_HEADER]
    delimiter = max(DELIMITERS, key=first_line.count)
    columns = next(csv.reader([first_line], delimiter=delimiter))
    column = "prompt" if "prompt" in columns else columns[0]
    column_text, delimiter_text = (json.dumps(text, ensure_ascii=False) for text in (column, delimiter))
    program = shlex.quote(_TABLE_TO_JSONL.format(column=column_text, delimiter=delimiter_text))
    source, target = shlex.quote(str(path)), shlex.quote(str(path.with_suffix(".jsonl")))
    raise Worded(
        f"--input {path} is a table by its name, and must be JSONL (a text that is one prompt is for --file): to make "
        f"a prompt of each row's {column}, type python3 -c {program} < {source} > {target}"
    )


def _advice_for_text(path: Path, data: bytes, problems: dict[int, str]) -> str:
    """How lines of text become JSONL, where none of them is JSON, nor was meant to be an object of it."""
    is_json = any(line.lstrip().startswith(b"{") for line in data.split(b"\n"))
    if is_json or not all(problem.startswith("not JSON") for problem in problems.values()):
        return ""
    file = "FILE" if str(path) == STDIN else shlex.quote(str(path))
    return f"to make a prompt of each line of text, type {_TO_JSONL} < {file} > {file}.jsonl"


def in_json_words(error: RequestError) -> str:
    """What is wrong with a line, as one who writes JSON would have it."""
    return for_json(str(error), DEFAULTS)


def _read_line(
    number: int, line: bytes, defaults: SamplingParams, check_guidance: Callable[[str, Any], None]
) -> PromptRecord:
    fields = _read_object(line)
    _check_names(fields)
    record_id = _checked_id(fields.pop("id", number))
    prompt, split_special_tokens = _pop_prompt(fields), _pop_switch(fields)
    cache_salt = checked_salt(fields.pop("cache_salt", None))
    if isinstance(fields.get("logit_bias"), dict):  # JSON's keys are texts
        fields["logit_bias"] = {_token_id(key): bias for key, bias in fields["logit_bias"].items()}
    params = with_seed(replace(defaults, **fields))
    if params.guidance is not None:
        check_guidance(*params.guidance)
    return PromptRecord(number, record_id, prompt, split_special_tokens, params, cache_salt)


def _read_object(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line, object_pairs_hook=_fields_of)
    except RequestError:
        raise
    except json.JSONDecodeError as error:
        raise RequestError(f"not JSON at character {error.colno}: {error.msg}. {_EXPECTED}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"not JSON, as it is not UTF-8 text: see its byte {error.start}.") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON that can be read: {error}.") from None
    if not isinstance(fields, dict):
        raise RequestError(f"not an object. {_EXPECTED}")
    return fields


def _check_names(fields: dict[str, Any]) -> None:
    """RequestError for fields that do not exist, with those that may have been meant."""
    unknown = [name for name in fields if name not in _FIELDS]
    if not unknown:
        return
    hints = {name: _hint(name) for name in unknown}
    listed = [json.dumps(name) + (f" ({hint})" if hint else "") for name, hint in hints.items()]
    rest = "" if all(hints.values()) else "; fields are named as the flags that `tinygpt generate --help-all` lists"
    raise RequestError(f"unknown field {', '.join(listed)}{rest}.")


def _hint(unknown: str) -> str | None:
    if is_already(unknown):
        return "that is how it is: leave it out"
    if nearest_field(unknown, (*_FIELDS, _FUNCTIONS)) == _FUNCTIONS:
        return "functions are for the library"
    return field_hint(unknown, _FIELDS, json.dumps)


def _fields_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = {}
    for name, value in pairs:
        if name in fields:
            raise RequestError(f"{json.dumps(name)} is there more than once: keep one.")
        fields[name] = value
    return fields


def _token_id(key: str) -> str | int:
    """A key as a number, if it can be a token id: Python reads no number of thousands of digits."""
    return int(key) if key.isdecimal() and len(key) <= 20 else key


def _pop_prompt(fields: dict[str, Any]) -> str | list[int]:
    given = [fields.pop(name) for name in PROMPT_FIELDS if name in fields]
    if len(given) != 1:
        raise RequestError("one field prompt, a text or a list of token ids, is needed (or prompt_token_ids).")
    if not isinstance(given[0], (str, list)):
        raise RequestError(f"prompt is {json.dumps(given[0])} and must be a text or a list of token ids.")
    return given[0]


def _pop_switch(fields: dict[str, Any]) -> bool | None:
    given = fields.pop("split_special_tokens", None)
    if given is not None and not isinstance(given, bool):
        raise RequestError(f"split_special_tokens is {json.dumps(given)} and must be true or false.")
    return given


def _checked_id(record_id: Any) -> str | int:
    if isinstance(record_id, int) and not isinstance(record_id, bool):
        return record_id
    if isinstance(record_id, str) and is_unicode(record_id):
        return record_id
    raise RequestError(f"id is {json.dumps(record_id)} and must be a text or a whole number.")
