"""Output of the commands: results on stdout; messages, the log and progress on stderr; reports as text or JSON."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tinygpt.errors import RequestError, TinyGPTError

if TYPE_CHECKING:
    from tinygpt.outputs import Throughput

INTERVAL = 20.0  # seconds between progress messages

messages = logging.getLogger("tinygpt.cli")
log, print_error = messages.info, messages.error


def emit(text: str = "", end: str = "\n", file: TextIO | None = None) -> None:
    """Write to stdout or `file`, and flush. Raise BrokenPipeError if the reader left, TinyGPTError for a full disk."""
    STATUS.text_written(text + end)
    try:
        print(text, end=end, flush=True, file=file)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise TinyGPTError(f"stdout cannot be written ({error.strerror}): fix that, or send it elsewhere.") from None


class StatusLine:
    """The state of the terminal's current line."""

    def __init__(self):
        self.is_open = False  # the line holds text of stdout without its end

    def text_written(self, text: str) -> None:
        if text:
            self.is_open = not text.endswith("\n") and sys.stdout is not None and sys.stdout.isatty()

    def end(self) -> None:
        """Begin a new line if the current one holds text."""
        if self.is_open and sys.stderr.isatty():
            print(file=sys.stderr)
        self.is_open = False


STATUS = StatusLine()


class MessageHandler(logging.Handler):
    """Write log records to the current stderr: as "tinygpt: message", or as one JSON object a line."""

    def __init__(self, log_format: str = "text"):
        super().__init__()
        self.log_format = log_format

    def emit(self, record: logging.LogRecord) -> None:
        message, level = self.format(record), record.levelname.lower()
        if self.log_format == "json":
            line = json.dumps({"time": record.created, "level": level, "message": message})
        else:
            line = f"tinygpt: {'error: ' * (level == 'error')}{message}"
        with suppress(OSError):  # a full disk or a closed pipe does not end the work
            STATUS.end()
            print(line, file=sys.stderr, flush=True)


@contextmanager
def logging_to_stderr(is_debug: bool = False, log_format: str = "text") -> Iterator[None]:
    """Show the package's log on stderr during the block, from level INFO or DEBUG on."""
    root, handler = logging.getLogger("tinygpt"), MessageHandler(log_format)
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG if is_debug else logging.INFO)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)


def progress(noun: str, done: str = "done") -> Callable[..., Iterator[Any]]:
    """Return a function with tqdm's arguments: a bar on a terminal, else a message each INTERVAL."""

    def shown(items: Iterable[Any], total: int, initial: int = 0, **_: Any) -> Iterator[Any]:
        from tqdm import tqdm

        logged = time.perf_counter()
        # disable=None: no bar if stderr is not a terminal.
        bar = tqdm(items, total=total, initial=initial, unit=f" {noun}s", disable=None)
        for number, item in enumerate(bar, initial + 1):
            yield item
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
    emit(json.dumps(report, ensure_ascii=False, indent=2))


def print_fields(title: str, values: Mapping[str, Any]) -> None:
    """Print a section with a line for each value."""
    print_table(title, [(name, _shown(value)) for name, value in values.items()])


def print_table(title: str, rows: Iterable[Sequence[Any]]) -> None:
    """Print a section with aligned rows."""
    cells = [[str(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    emit(title)
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        emit(f"  {line}".rstrip())


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
        f"{size / factor:.1f} {unit}" for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if size >= factor
    )
    return next(units, f"{size} B")


def check_writable(flag: str, path: Path) -> None:
    """Raise RequestError if the file cannot be written, without touching it."""
    if path.is_dir():
        raise RequestError(f"{flag} {path} is a folder: name a file in it.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise RequestError(f"the folder of {flag} {path} does not exist: create it first.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise RequestError(f"{flag} {path} cannot be written: permission denied.")


def write_results(text: str, path: Path | None) -> None:
    """Write results to the file, atomically, or to stdout without one. Raise TinyGPTError if the file fails."""
    if path is None:
        emit(text)
        return
    from tinygpt.weights.files import atomic_write

    data = f"{text}\n".encode("utf-8", "backslashreplace")
    try:
        if path.exists() and not path.is_file():  # a device or a pipe
            path.write_bytes(data)
        else:
            atomic_write(path.resolve(), data)
    except OSError as error:
        emit(text)
        raise TinyGPTError(f"{path} could not be written ({error.strerror}): the results are on stdout.") from None
