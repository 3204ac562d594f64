"""`tinygpt`: find the subcommand, run it, turn an error into a sentence and an exit code."""

import argparse
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from typing import NoReturn

import tinygpt
from tinygpt.cli.flags import Command, flag_of
from tinygpt.cli.loading import has_ranks, start_ranks
from tinygpt.cli.streams import MessageHandler, log, logging_to_stderr, print_error
from tinygpt.errors import INTERRUPTS, CheckpointError, RequestError, TinyGPTError, suggest
from tinygpt.parallel.launch import is_first_of_host, launched_rank

# Modules are imported when their command runs, or when all commands are listed.
COMMANDS = ("generate", "chat", "score", "serve", "convert", "warmup", "bench", "eval", "info", "doctor", "parity")
MODULES = {"warmup": "convert", "doctor": "info", "parity": "eval"}  # of commands that share one; any other has its own
DONE, FAILED, USAGE = 0, 1, 2
BROKEN_PIPE = 141  # 128 + SIGPIPE, as a shell reports it
MAX_SENTENCE = 8000  # characters; an error about a checkpoint may have several lines

DESCRIPTION = "GPT-2 inference on NumPy and Numba."
EXAMPLES = """tinygpt generate "Once upon a time"     a text, by the demo model
tinygpt generate -m gpt2 "Hello" -n 50  50 tokens, by GPT-2 of the Hugging Face Hub
tinygpt help generate                   the flags of a command"""
EPILOG = """text goes to stdout and everything else to stderr
exit codes: 0 done, 1 failed on the way, 2 nothing has been done: the request is impossible, or a
file or model is missing or cannot be used"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (None: the process's) and return its exit code. Raise SystemExit as argparse does."""
    _prepare_streams()
    words = [*(sys.argv[1:] if argv is None else argv)]
    if words[:1] in (["help"], ["--help"]):  # `tinygpt help generate` is `tinygpt generate --help`
        words = [*words[1:2], "--help"]
    with _silence(bool(launched_rank())):  # rank 0 reports a malformed command line for all
        args = parse(words)
    with logging_to_stderr(args.debug, getattr(args, "log_format", "text")):
        try:
            start_ranks(args, words)
            _command(args.command).run(args)
            return DONE
        except (Exception, KeyboardInterrupt) as error:
            if args.debug:
                raise
            with _silence(has_ranks(args) and not is_first_of_host()):  # one rank of each host reports it
                return _report(error, args)
        finally:
            _flush_streams()


@contextmanager
def _silence(is_silent: bool) -> Iterator[None]:
    if not is_silent:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. Raise SystemExit for --help, --version and a malformed line."""
    if not words or words[0] not in COMMANDS:
        _explain_commands(words)
    parser = command_parser(words[0], "--help-all" in words)
    flags = [flag for action in parser._actions for flag in action.option_strings]
    end = words.index("--") if "--" in words else len(words)  # words after -- are text
    rest = [_with_hyphens(word, flags) for word in words[1:end]] + [*words[end:]]
    # Intermixed: flags may stand between the words of a PROMPT; but it reads words after -- as flags.
    read = parser.parse_known_args if "--" in words else parser.parse_known_intermixed_args
    args, unknown = read(rest)
    if unknown:
        flag = next((word for word in unknown if word.startswith("-")), None)
        if flag is None:
            parser.error(f"unexpected argument {unknown[0]!r}")
        name = flag.partition("=")[0]
        parser.error(f"unknown flag {name}{suggest(name, flags)}")
    args.command = words[0]
    return args


def _explain_commands(words: Sequence[str]) -> NoReturn:
    """Print the help, the version or the error of a command line without a known command, and exit."""
    parser = _parser("tinygpt", "COMMAND [flags]", DESCRIPTION, EXAMPLES)
    parser.add_argument("-V", "--version", action="version", version=f"tinygpt {tinygpt.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND")
    for name in COMMANDS:
        subparsers.add_parser(name, help=_command(name).summary)
    if not words:
        parser.print_help(sys.stderr)
    elif words[0] in ("-h", "--help", "-V", "--version"):
        parser.parse_args(words[:1])
    else:
        nearest = suggest(words[0], COMMANDS) or f"; give one of {', '.join(COMMANDS)}"
        parser.error(f"unknown command {words[0]}{nearest}")
    sys.exit(USAGE)


def command_parser(name: str, is_all: bool = True) -> argparse.ArgumentParser:
    """Return the parser of a command; is_all: show rare flags in --help too."""
    command = _command(name)
    parser = _parser(f"tinygpt {name}", command.arguments, command.summary, EPILOG)
    command.add_arguments(parser)
    parser.add_argument("--help-all", action="help", help="show every flag and exit")
    about = "show the log, and the traceback of an error (default: off)"
    parser.add_argument("--debug", action="store_true", help=about)
    parser.add_argument("--verbose", dest="debug", action="store_true", help=argparse.SUPPRESS)
    if command.everyday and not is_all:
        shown = (*command.everyday, "help", "help_all")
        rare = [a for a in parser._actions if a.dest not in shown and a.help != argparse.SUPPRESS]
        for action in rare:
            action.help = argparse.SUPPRESS
        parser.epilog = f"--help-all shows {len(rare)} more flags{command.rare}\n{EPILOG}"
    return parser


def _parser(prog: str, arguments: str, about: str, epilog: str) -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog, f"{prog} {arguments}", about, epilog, formatter_class=form, allow_abbrev=False)


def _with_hyphens(word: str, flags: Sequence[str]) -> str:
    """Return --max_tokens, as other programs spell it, as --max-tokens; a prompt stays as it is."""
    name, equals, value = word.partition("=")
    flag = name.replace("_", "-")
    return flag + equals + value if flag in flags else word


def _command(name: str) -> Command:
    return getattr(import_module(f"tinygpt.cli.{MODULES.get(name, name)}"), name.upper())


def _prepare_streams() -> None:
    """Write UTF-8 on every system, and escape text that UTF-8 cannot encode, such as file names, as JSON does."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _flush_streams() -> None:
    """Flush both streams; Python would flush a broken one at its exit, with another exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _report(error: BaseException, args: argparse.Namespace) -> int:
    if isinstance(error, BrokenPipeError):  # the reader has seen enough, as in `| head`
        return BROKEN_PIPE
    if isinstance(error, KeyboardInterrupt):
        name, code = INTERRUPTS[type(error)]
        MessageHandler.is_within_line = True  # the terminal shows ^C
        log(f"{name}{': ' * bool(error.args)}{error}")
        return code
    sentence = _sentence(error, args)
    print_error(sentence[:MAX_SENTENCE] + " [...]" * (len(sentence) > MAX_SENTENCE))
    return USAGE if isinstance(error, (RequestError, CheckpointError)) and not error.work_started else FAILED


def _sentence(error: BaseException, args: argparse.Namespace) -> str:
    if isinstance(error, RequestError) and error.field in vars(args):
        return str(error.named(flag_of(error.field)))
    if isinstance(error, TinyGPTError):
        return str(error)
    if isinstance(error, MemoryError):
        return "there is not enough memory: use a smaller --max-num-seqs, --max-model-len or model."
    if isinstance(error, OSError):
        place = f": {str(error.filename)!r}" if error.filename is not None else ""
        return f"{error.strerror or error}{place}."
    return f"unexpected {type(error).__name__}: {error} (run it again with --debug to see where)."
