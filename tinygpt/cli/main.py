"""`tinygpt`: find the subcommand, run it, turn what went wrong into a sentence and an exit code."""

import argparse
import io
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType

import tinygpt
from tinygpt.cli.loading import note_threads
from tinygpt.cli.output.compile_notice import compiling_shown
from tinygpt.cli.output.messages import SCREEN, line, lines_in, log_shown
from tinygpt.cli.output.wording import Worded, for_shell
from tinygpt.cli.parser import Help, Parser, hyphenated
from tinygpt.cli.ranks import start_ranks
from tinygpt.cli.termination import Terminated
from tinygpt.errors import CheckpointError, RequestError, TinyGPTError
from tinygpt.suggestions import nearest_command, nearest_flag

# Each is a module of tinygpt/cli/commands, imported when it is asked for, or when all of them are listed.
COMMANDS = ("generate", "serve", "convert", "warmup", "bench", "eval", "info", "doctor", "parity")
FIGURELESS = ("convert", "warmup", "info", "doctor")  # which say of no time that is measured
DONE, FAILED, USAGE = 0, 1, 2
MAX_SENTENCE = 8000  # characters: what is wrong with a checkpoint may take some lines
# All control characters but tabs and ends of lines, and what turns the direction of the text behind it.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
INTERRUPTED, BROKEN_PIPE, TERMINATED = 130, 141, 143  # 128 + SIGINT, SIGPIPE, SIGTERM: as a shell reports others

DESCRIPTION = "GPT-2 inference on NumPy and Numba."
EXAMPLES = """tinygpt generate "Once upon a time"     a text, by the demo model
tinygpt generate -m gpt2 "Hello" -n 50  50 tokens, by GPT-2 of the Hugging Face Hub
tinygpt help generate                   what goes with a command"""
EPILOG = """text goes to stdout and everything else to stderr
exit codes: 0 done, 1 failed on the way, 2 nothing has been done, because what was asked for is
impossible, or a file or model that it names is not there or cannot be used"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (None: the process's own) and return its exit code.

    As argparse does, --help, --version and malformed flags raise SystemExit.
    """
    _prepare_streams()
    words = _help_behind(hyphenated(sys.argv[1:] if argv is None else argv))
    try:
        parser = build_parser([name for name in COMMANDS if name in words[:1]] or COMMANDS)
    except KeyboardInterrupt as error:  # while a command's modules are read
        return _report(error, {})
    if not words:
        parser.print_help(sys.stderr)
        return USAGE
    if words[0] not in {*COMMANDS, *parser.flags()}:
        parser.error(_advice_for_no_command(words, parser.flags()))
    args, unknown = parser.parse_known_args(words)
    subparser = parser.subparsers.choices[args.command]
    if unknown:
        subparser.refuse_unknown(unknown)
    with lines_in(getattr(args, "log_format", "text")):
        return _run(args, words, subparser.fields())


def _run(args: argparse.Namespace, words: list[str], flags: Mapping[str, str]) -> int:
    try:
        start_ranks(args, words)
        note_threads(getattr(args, "threads", None))
        with log_shown(args.debug), compiling_shown(args.command not in FIGURELESS):
            _module_of(args.command).run(args)
        return DONE
    except (Exception, KeyboardInterrupt) as error:
        if args.debug:
            raise
        return _report(error, flags)
    finally:
        _give_up_streams()


def build_parser(commands: Sequence[str] = COMMANDS) -> Parser:
    """The parser of every subcommand, or of these; builds without NumPy or Numba, so that --help answers at once."""
    parser = Parser("tinygpt", usage="tinygpt COMMAND [flags]", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("-V", "--version", action="version", version=f"tinygpt {tinygpt.__version__}")
    parser.subparsers = subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", prog="tinygpt")
    for name in commands:
        command = _module_of(name)
        subparser = subparsers.add_parser(
            name,
            help=command.SUMMARY,
            description=getattr(command, "DESCRIPTION", command.SUMMARY),
            epilog=EPILOG,
            usage=getattr(command, "USAGE", f"tinygpt {name} [flags]"),
            every_day=getattr(command, "EVERY_DAY", None),
            rare=getattr(command, "RARE", ""),
        )
        command.add_arguments(subparser)
        subparser.add_argument("--help-all", action=Help, help="show every flag and exit")
        subparser.add_argument(
            "--debug", action="store_true", help="show the log, and the traceback of an error (default: off)"
        )
        subparser.siblings = lambda: build_parser().subparsers.choices
    return parser


def _module_of(command: str) -> ModuleType:
    return import_module(f"tinygpt.cli.commands.{command}")


def _help_behind(words: list[str]) -> list[str]:
    """`tinygpt help generate` and `tinygpt --help generate` as `tinygpt generate --help`."""
    if words[:1] not in (["help"], ["-h"], ["--help"]):
        return words
    topic = [word for word in words[1:2] if word != "help" and not word.startswith("-")]
    return topic if topic and topic[0] not in COMMANDS else [*topic, "--help"]


def _advice_for_no_command(words: list[str], flags: list[str]) -> str:
    """What to type where the first word is no command."""
    first = words[0]
    commands = f"the commands are {', '.join(COMMANDS)}"
    if found := [word for word in words if word in COMMANDS]:  # `tinygpt --model demo generate Once`
        others = [word for word in words if word != found[0]]
        return f"the command comes first: tinygpt {shlex.join([found[0], *others])}"
    if nearest := {flag.lower(): flag for flag in flags}.get(first) or nearest_flag(first.lower(), flags):
        return f"there is no flag {first!r} without a command: did you mean tinygpt {nearest}? ({commands})"
    if first.startswith("-"):
        return f"a command comes first, as in: tinygpt generate {shlex.join(words)}; {commands}"
    if nearest := nearest_command(first, COMMANDS):
        return f"there is no command {first!r}: did you mean tinygpt {nearest}? ({commands})"
    return f"there is no command {first!r}: {commands}; to continue a text, type tinygpt generate {shlex.join(words)}"


def _prepare_streams() -> None:
    """UTF-8 on every system. A message is never lost to a file name, or a prompt, that UTF-8 cannot spell."""
    if sys.stderr is None:  # the descriptor was closed, as by `2>&-`
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, it stays open as stderr does
    for stream, errors in ((sys.stdout, "strict"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)


def _report(error: BaseException, flags: Mapping[str, str]) -> int:
    """Say what went wrong in a sentence on stderr; the exit code that goes with it. `flags`: those of fields."""
    if isinstance(error, BrokenPipeError):  # the reader has seen enough, as in `| head`
        return BROKEN_PIPE
    if isinstance(error, KeyboardInterrupt):
        name, code = ("terminated", TERMINATED) if isinstance(error, Terminated) else ("interrupted", INTERRUPTED)
        below_what_was_typed = "\n" * (SCREEN.log_format == "text")
        _complain(below_what_was_typed + line(f"{name}{': ' * bool(error.args)}{error}"))
        return code
    _complain(line(_printable(_sentence(error, flags)), "error"))
    is_refused = isinstance(error, (RequestError, CheckpointError)) and not error.work_started
    return USAGE if is_refused else FAILED


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


def _sentence(error: BaseException, flags: Mapping[str, str]) -> str:
    if isinstance(error, RequestError) and not isinstance(error, Worded):
        return for_shell(str(error), flags)
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
