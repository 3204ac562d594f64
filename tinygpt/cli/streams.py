"""The commands' streams: results on stdout, messages and progress on stderr, and prompts of files and of stdin."""

import json
import logging
import os
import re
import stat
import sys
import time
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from ..errors import RequestError, TinyGPTError, suggest
from ..fields import own_names, token_id_of
from ..sampling_params import SAMPLING_FIELDS, SamplingParams
from ..weights.errors import printable
from .flags import with_seed

if TYPE_CHECKING:
    from ..outputs import Throughput

INTERVAL = 20.0  # seconds between progress messages
Result = TypeVar("Result")
STDIN = "-"
MAX_LISTED = 20  # lines with problems that an error lists
TOKEN_IDS = re.compile(rb"\s*\d{1,9}(\s*,\s*\d{1,9})+\s*")  # FasterTransformer's start_ids.csv
EXAMPLE = json.dumps({"prompt": "Once upon a time"})
PROMPT_FIELDS = ("prompt", "prompt_token_ids")
_FIELDS = (
    *PROMPT_FIELDS,
    *("id", "split_special_tokens"),
    *(name for name in SAMPLING_FIELDS if name not in ("logits_processors", "capture", "edits")),
)

messages = logging.getLogger("tinygpt.cli")
log, print_error = messages.info, messages.error


def emit(text: str = "", end: str = "\n", file: TextIO | None = None) -> None:
    """Write to stdout or `file`, and flush. Raise BrokenPipeError if the reader left, TinyGPTError for a full disk."""
    if text + end:
        is_open = not (text + end).endswith("\n")
        MessageHandler.is_within_line = is_open and sys.stdout is not None and sys.stdout.isatty()
    try:
        print(text, end=end, flush=True, file=file)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise TinyGPTError(
            f"stdout cannot be written ({error.strerror}): fix that, or send it elsewhere."
        ) from None


def has_color() -> bool:
    """Return whether the environment allows colors: https://no-color.org."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class MessageHandler(logging.Handler):
    """Write log records to the current stderr: as "tinygpt: message", or as one JSON object a line."""

    is_within_line = False  # of any handler: the terminal's current line holds text of stdout without its end

    def __init__(self, log_format: str = "text", color: str = "never"):
        super().__init__()
        self.log_format, self.color = log_format, color

    def emit(self, record: logging.LogRecord) -> None:
        message = self.format(record)
        level = record.levelname.lower()
        if self.log_format == "json":
            line = json.dumps({"time": record.created, "level": level, "message": message})
        else:
            line = printable(f"tinygpt: {'error: ' * (level == 'error')}{message}")
            if self.color == "always" or (self.color != "never" and has_color() and sys.stderr.isatty()):
                line = f"\x1b[{31 if level == 'error' else 2}m{line}\x1b[0m"  # red, or dim
        with suppress(OSError):  # a full disk or a closed pipe does not end the work
            if MessageHandler.is_within_line and sys.stderr.isatty():
                print(file=sys.stderr)
            MessageHandler.is_within_line = False
            bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
            with bars.external_write_mode(sys.stderr) if bars else nullcontext():  # a line above a bar
                print(line, file=sys.stderr, flush=True)


@contextmanager
def logging_to_stderr(
    log_level: str = "info", log_format: str = "text", color: str = "never"
) -> Iterator[None]:
    """Show the package's log on stderr during the block, from a level on. color: of `add_color`."""
    root = logging.getLogger("tinygpt")
    handler = MessageHandler(log_format, color)
    level = root.level
    root.propagate = False  # a package such as rouge-score has given Python's root a handler of its own
    root.addHandler(handler)
    root.setLevel(log_level.upper())
    try:
        yield
    finally:
        root.setLevel(level)
        root.propagate = True
        root.removeHandler(handler)


def progress(noun: str, done: str = "done") -> Callable[..., Iterator[Any]]:
    """Return a function with tqdm's arguments: a bar on a terminal, else a message each INTERVAL."""

    def shown(items: Iterable[Any], total: int, initial: int = 0, **_: Any) -> Iterator[Any]:
        from tqdm import tqdm

        logged = time.perf_counter()
        # disable=None: no bar if stderr is not a terminal.
        disable = None if messages.isEnabledFor(logging.INFO) else True
        bar = tqdm(items, total=total, initial=initial, unit=f" {noun}s", disable=disable)
        for number, value in enumerate(bar, initial + 1):
            yield value
            now = time.perf_counter()
            if bar.disable and now - logged >= INTERVAL and number < total:
                log(f"{number} of {counted(total, noun)} {done}")
                logged = now

    return shown


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def rates(work: "Throughput") -> str:
    """Return `prompt 4 tokens, 900.0 tokens/s; generation 127 tokens, 199.0 tokens/s`."""

    def rate(name: str, tokens: int, seconds: float) -> str:
        speed = f", {tokens / seconds:.1f} tokens/s" if tokens and seconds else ""
        return f"{name} {counted(tokens, 'token')}{speed}"

    prompt = rate("prompt", work.prompt_tokens, work.prompt_seconds)
    return f"{prompt}; {rate('generation', work.new_tokens, work.new_seconds)}"


def print_json(report: Mapping[str, Any]) -> None:
    emit(printable(json.dumps(report, ensure_ascii=False, indent=2), json.dumps))


def print_fields(title: str, values: Mapping[str, Any]) -> None:
    print_table(title, [(name, _shown(value)) for name, value in values.items()])


def print_table(title: str, rows: Iterable[Sequence[Any]]) -> None:
    emit(printable(title))
    for line in in_columns([[printable(str(value)) for value in row] for row in rows]):
        emit(f"  {line}".rstrip())


def in_columns(rows: Sequence[Sequence[str]], to_the_right: Collection[int] = ()) -> list[str]:
    """Return a line for each row, whose cells are filled with spaces. to_the_right: columns that begin with spaces."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{'>' if i in to_the_right else '<'}{width}" for i, width in enumerate(widths)]
    return ["  ".join(map(format, row, forms)).rstrip() for row in rows]


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value)) or "none"
    return str(value)


def table_format() -> str:
    return "text" if sys.stdout.isatty() else "md"


def size_text(size: int | None) -> str:
    """Return a number of bytes as 13.9 MB, or "unknown" for None."""
    if size is None:
        return "unknown"
    units = (
        f"{size / factor:.1f} {unit}"
        for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
        if size >= factor
    )
    return next(units, f"{size} B")


def check_writable(flag: str, path: Path) -> None:
    """Raise RequestError if the file cannot be written, without touching it."""
    place = path
    folder = Path(os.path.realpath(path)).parent  # of a link's target, which is written
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        place, is_folder = folder, False
    except OSError as error:  # a loop of links, or a name that is too long
        raise RequestError(f"{flag} {path} cannot be written: {error.strerror}.") from None
    if is_folder:
        raise RequestError(f"{flag} {path} is a folder: name a file in it.")
    if not folder.is_dir():
        raise RequestError(f"the folder {folder} of {flag} {path} does not exist: create it first.")
    if not os.access(place, os.W_OK):
        raise RequestError(f"{flag} {path} cannot be written: permission denied.")


def write_results(text: str, path: Path | None) -> None:
    """Write results to the file, atomically, or to stdout without one. Raise TinyGPTError if the file fails."""
    if path is None:
        emit(text)
        return
    from ..weights.files import atomic_write

    content = f"{text}\n".encode("utf-8", "backslashreplace")
    try:
        if path.exists() and not path.is_file():  # a device or a pipe
            path.write_bytes(content)
        else:
            atomic_write(path.resolve(), content)
    except OSError as error:
        emit(text)
        raise TinyGPTError(
            f"{path} could not be written ({error.strerror}): the results are on stdout."
        ) from None


def read_bytes(name: str, path: str | Path) -> bytes:
    """Return the bytes of a file, or of stdin for "-". Raise RequestError, which begins with `name`."""
    if str(path) == STDIN:
        if sys.stdin is None:  # the descriptor was closed, as by `<&-`
            raise RequestError("no PROMPT was given and stdin is closed: give a PROMPT, or --input.")
        if sys.stdin.isatty():
            log("reading from the terminal; end it with Ctrl-D (on Windows: Ctrl-Z, Enter)")
        content = sys.stdin.buffer.read()
    else:
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise RequestError(f"{name} cannot be read: {error.strerror}.") from None
    if content[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in content[:8]:
        raise RequestError(
            f"{name} is UTF-16, UTF-32 or binary and must be UTF-8 text: convert it, as by `iconv`."
        )
    return content


def decoded(content: bytes) -> str:
    """Return UTF-8 text without the mark that editors on Windows write first. Raise UnicodeDecodeError."""
    return content.decode("utf-8").removeprefix("\ufeff")


def read_text(name: str, path: str | Path = STDIN) -> str:
    """Return a UTF-8 text as it is. Raise RequestError as `read_bytes`, and for other data."""
    content = read_bytes(name, path)
    try:
        return decoded(content)
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is not UTF-8 text: see its byte {error.start}, or convert it first."
        ) from None


def read_plain_text(flag: str, path: str | Path) -> str:
    """Return a file's text with "\\n" at the ends of lines. Raise RequestError as `read_text`, and without text."""
    text = read_text(f"{flag} {path}", path).replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise RequestError(f"{flag} {path} is empty: give a file that holds text.")
    return text


def stdin_lines(reader: str) -> Iterator[str]:
    """Yield lines of stdin without their ends; on a terminal with editing and a history. reader: for errors."""
    if sys.stdin is None:
        raise RequestError(f"{reader} reads lines from stdin, which is closed.")
    if sys.stdin.isatty():
        yield from _typed_lines()
        return
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield decoded(line).rstrip("\r\n")
        except UnicodeDecodeError:
            raise RequestError(f"line {number} of stdin is not UTF-8 text: convert it first.") from None


def _typed_lines() -> Iterator[str]:
    with suppress(ImportError):  # Windows has none, and its terminals edit lines themselves
        import readline  # noqa: F401, `input` uses it once it is imported
    prompt = "> " if sys.stdout.isatty() else ""
    while True:
        try:
            yield input(prompt)
        except KeyboardInterrupt:  # the line is given up, as in a shell
            emit()
        except EOFError:
            emit()
            return


@dataclass(frozen=True)
class PromptRecord:
    line: int  # counted from 1
    id: str | int
    prompt: str | list[int]
    split_special_tokens: bool | None  # None: as on the command line
    params: SamplingParams


def read_prompts(
    path: Path,
    defaults: SamplingParams,
    content: bytes,
    check: "Callable[[PromptRecord], Any]" = lambda record: None,
) -> list[PromptRecord]:
    """Return the prompts of a JSONL file; blank lines hold none. Raise RequestError that lists every invalid line.

    content: the file's. check: raises errors of other kinds.
    """
    line_of: dict[str | int, int] = {}

    def read(number: int, line: bytes) -> PromptRecord:
        record = _read_line(number, line, defaults, check)
        if record.id in line_of:
            raise RequestError(f"id {record.id!r} is already that of line {line_of[record.id]}.")
        line_of[record.id] = number
        return record

    return read_lines(path, line_readers(content, read))


def read_text_lines(path: Path, defaults: SamplingParams, content: bytes) -> list[PromptRecord]:
    """Return a prompt for each line with text. Raise RequestError that lists every line which is not UTF-8."""

    def read(number: int, line: bytes) -> PromptRecord:
        try:
            text = decoded(line).rstrip("\r")
        except UnicodeDecodeError as error:
            raise RequestError(f"not UTF-8 text: see its byte {error.start}.") from None
        return PromptRecord(number, number, text, None, with_seed(defaults))

    return read_lines(path, line_readers(content, read))


def line_readers(content: bytes, read: Callable[[int, bytes], Result]) -> dict[int, Callable[[], Result]]:
    """Return what reads each line that is not blank, by its number."""
    lines = enumerate(content.split(b"\n"), 1)
    return {
        number: partial(read, number, line) for number, line in lines if line.removeprefix(BOM_UTF8).strip()
    }


def read_lines(path: str | Path, readers: Mapping[int, Callable[[], Result]]) -> list[Result]:
    """Raise RequestError that lists every line with an error."""
    results, problems, num_wrong = [], [], 0
    for number, read in readers.items():
        try:
            results.append(read())
        except TinyGPTError as error:
            problems += [f"  line {number}: {fault}" for fault in str(error).split("\n")]
            num_wrong += 1
    if problems:
        source = "stdin" if str(path) == STDIN else path
        headline = f"{counted(num_wrong, 'line')} of {source} cannot be used, so nothing was generated:"
        more = [f"  and {len(problems) - MAX_LISTED} more"] if len(problems) > MAX_LISTED else []
        raise RequestError("\n".join([headline, *problems[:MAX_LISTED], *more]))
    return results


def _read_line(
    number: int, line: bytes, defaults: SamplingParams, check: Callable[[PromptRecord], Any]
) -> PromptRecord:
    ids = TOKEN_IDS.fullmatch(line.removeprefix(BOM_UTF8))
    fields = {"prompt": [*map(int, ids[0].split(b","))]} if ids else read_object(line)
    unknown = {name: fields.pop(name) for name in [*fields] if name not in _FIELDS}
    faults = [
        f"unknown field {json.dumps(name)}{suggest(name, _FIELDS) or '.'}"
        for name, value in unknown.items()
        if value is not None
    ]
    record_id = fields.pop("id", None)
    record_id = number if record_id is None else record_id
    if type(record_id) not in (int, str):
        faults.append(f"id is {json.dumps(record_id)} and must be a text or a whole number.")
    prompts = [prompt for name in PROMPT_FIELDS if (prompt := fields.pop(name, None)) is not None]
    prompt, *others = prompts or [None]
    if others or not isinstance(prompt, (str, list)):
        prompt = [0]  # any: the other fields are judged, too
        faults.append("one field prompt, a text or a list of token ids, is needed (or prompt_token_ids).")
    split_special_tokens = fields.pop("split_special_tokens", None)
    if split_special_tokens is not None and not isinstance(split_special_tokens, bool):
        faults.append(
            f"split_special_tokens is {json.dumps(split_special_tokens)} and must be true or false."
        )
        split_special_tokens = None
    biases = fields.get("logit_bias")
    if isinstance(biases, dict):
        fields["logit_bias"] = {token_id_of(key): bias for key, bias in biases.items()}
    if fields.get("num_beams", 1) != 1:
        fields.setdefault("temperature", 0.0)  # a search draws nothing
    while True:
        try:
            params = with_seed(replace(defaults, **fields))
            record = PromptRecord(number, record_id, prompt, split_special_tokens, params)
            check(record)
            if not faults:
                return record
            break
        except TinyGPTError as error:
            faults.append(str(error))
            field = getattr(error, "field", None)
            if field not in fields:
                break
            del fields[field]  # the others are judged next to each other, as they stand
    raise RequestError("\n".join(faults))


def read_object(line: bytes, names: Collection[str] = _FIELDS) -> dict[str, Any]:
    """Return the fields of a line, those of other programs under our `names`. Raise RequestError."""
    try:
        fields = json.loads(decoded(line), object_pairs_hook=_without_duplicates)
    except RequestError:
        raise
    except json.JSONDecodeError as error:
        raise RequestError(
            f"not JSON at character {error.colno}: {error.msg}; a line is as {EXAMPLE}."
        ) from None
    except UnicodeDecodeError as error:
        raise RequestError(f"not UTF-8 text: see its byte {error.start}.") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or deep nesting
        raise RequestError(f"not JSON that can be read: {error}.") from None
    if not isinstance(fields, dict):
        raise RequestError(f"not a JSON object; a line is as {EXAMPLE}.")
    return own_names(fields, names)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        duplicate = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise RequestError(f"{json.dumps(duplicate)} is there more than once: keep one.")
    return fields
