"""`tinygpt`: find the subcommand, run it, turn what went wrong into a sentence and an exit code."""

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches

import tinygpt
from tinygpt.cli.commands import bench, convert, doctor, generate, info, parity, warmup
from tinygpt.cli.commands import eval as evaluate
from tinygpt.cli.compile_notice import compiling_shown
from tinygpt.cli.messages import log_shown
from tinygpt.errors import RequestError, TinyGPTError

COMMANDS = {
    "generate": generate,
    "convert": convert,
    "warmup": warmup,
    "bench": bench,
    "eval": evaluate,
    "info": info,
    "doctor": doctor,
    "parity": parity,
}
DONE, FAILED, USAGE = 0, 1, 2
MAX_SENTENCE = 8000  # characters: what is wrong with a checkpoint may take some lines
# All control characters but tabs and ends of lines, and what turns the direction of the text behind it.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
INTERRUPTED, BROKEN_PIPE = 130, 141  # 128 + SIGINT, 128 + SIGPIPE: what a shell reports for other programs

EPILOG = """text goes to stdout and everything else to stderr
exit codes: 0 done, 1 failed, 2 asked for something impossible (nothing has been done)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (None: the process's own) and return its exit code.

    As argparse does, --help, --version and malformed flags raise SystemExit.
    """
    _prepare_streams()
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        subparser = parser.subparsers.choices[args.command]
        subparser.error(_describe_unknown(unknown, subparser))
    try:
        with log_shown(args.debug), compiling_shown():
            COMMANDS[args.command].run(args)
        return DONE
    except (Exception, KeyboardInterrupt) as error:
        if args.debug:
            raise
        return _report(error)
    finally:
        _give_up_streams()


def build_parser() -> argparse.ArgumentParser:
    """The parser of every subcommand; builds without NumPy or Numba, so that --help answers at once."""
    parser = argparse.ArgumentParser("tinygpt", description="GPT-2 inference on NumPy and Numba.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"tinygpt {tinygpt.__version__}")
    parser.subparsers = subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=command.SUMMARY,
            description=command.SUMMARY,
            epilog=EPILOG,
            usage=getattr(command, "USAGE", None),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.add_argument(
            "--debug", action="store_true", help="show the log, and the traceback of an error (default: off)"
        )
    return parser


def _describe_unknown(unknown: list[str], parser: argparse.ArgumentParser) -> str:
    flags = [flag for action in parser._actions for flag in action.option_strings]
    hints = {flag: get_close_matches(flag, flags, n=1) for flag in unknown}
    listed = [flag + (f" (did you mean {hint[0]}?)" if hint else "") for flag, hint in hints.items()]
    return f"unrecognized arguments: {', '.join(listed)}; --help lists the flags"


def _prepare_streams() -> None:
    """UTF-8 on every system. A message is never lost to a file name, or a prompt, that UTF-8 cannot spell."""
    if sys.stderr is None:  # the descriptor was closed, as by `2>&-`
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, it stays open as stderr does
    for stream, errors in ((sys.stdout, "strict"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)


def _report(error: BaseException) -> int:
    """Say what went wrong in a sentence on stderr; the exit code that goes with it."""
    if isinstance(error, BrokenPipeError):  # the reader has seen enough, as in `| head`
        return BROKEN_PIPE
    if isinstance(error, KeyboardInterrupt):
        _complain("\ntinygpt: interrupted")
        return INTERRUPTED
    _complain(f"tinygpt: error: {_printable(_sentence(error))}")
    return USAGE if isinstance(error, RequestError) else FAILED


def _give_up_streams() -> None:
    """Python flushes both once more when it exits. If one fails, it would complain, and the exit code be another."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _complain(message: str) -> None:
    with suppress(OSError):  # nobody reads stderr, or nothing can: the exit code says it too
        print(message, file=sys.stderr, flush=True)


def _sentence(error: BaseException) -> str:
    if isinstance(error, TinyGPTError):
        return str(error)
    if isinstance(error, MemoryError):
        return "there is not enough memory: use a smaller --max-num-seqs, --max-model-len or model."
    if isinstance(error, OSError):
        place = f": {str(error.filename)!r}" if error.filename is not None else ""
        return f"{error.strerror or error}{place}."
    return f"unexpected {type(error).__name__}: {error} (run it again with --debug to see where)."


def _printable(sentence: str) -> str:
    """What a file has put into a sentence may neither steer the terminal nor fill it."""
    text = _CONTROL.sub(lambda match: repr(match[0])[1:-1], sentence)
    more = len(text) - MAX_SENTENCE
    return f"{text[:MAX_SENTENCE]} [...] and {more} characters more" if more > 0 else text
