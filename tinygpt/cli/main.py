"""`tinygpt`: find the subcommand, run it, turn an error into a sentence and an exit code."""

import argparse
import importlib.util
import io
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import tinygpt

from ..aliases import HINTS, NOTES, Spelling, as_meant, hint, revalued, translated
from ..errors import INTERRUPTS, CheckpointError, RequestError, TinyGPTError, how_to_install
from ..hardware import launched_rank, local_rank
from ..weights.errors import printable
from .flags import Command, flag_of, has_ranks, set_defaults
from .streams import MessageHandler, emit, log, logging_to_stderr, print_error

if TYPE_CHECKING:
    from ..ranks.mpi import Layout

# Modules are imported when their command runs.
COMMANDS = {
    "generate": "continue a prompt, or every prompt of a file",
    "chat": "talk to a model, line by line",
    "score": "show how probable texts, their words and their tokens are",
    "lens": "show what each layer of a model would say after each token",
    "serve": "answer OpenAI's and vLLM's clients over HTTP",
    "convert": "pack a checkpoint ahead of time, as int8 or in another precision, for faster starts",
    "warmup": "compile kernels ahead of time",
    "bench": "measure prefill and decode next to the limits of the machine",
    "eval": "measure quality: perplexity, LAMBADA, ROUGE",
    "info": "show a checkpoint's config, tensors, tokenizer and hashes, and every reason not to load it",
    "doctor": "report on the machine, the kernels and the packages, for a bug report",
    "parity": "compare logits and greedy tokens with transformers, or with a stored golden file",
    "completion": "print a script that completes commands and flags in a shell",
}
COMMAND_ALIASES = {  # hidden
    **dict.fromkeys(("complete", "run", "prompt"), "generate"),
    **dict.fromkeys(("list", "ls", "models"), "info --cached"),
    "show": "info",
    "collect-env": "doctor",
}
TOP_FLAGS = ("-h", "--help", "-V", "--version")  # any other flag, or a text with spaces, begins `generate`
CONFIGURED = ("generate", "chat", "score", "serve", "bench")  # commands that read --config
# Of commands whose module has another name or place.
MODULES = {"lens": ".score", "warmup": ".convert", "completion": ".main"}
MODULES |= {"bench": "..bench.command"} | dict.fromkeys(("eval", "parity"), "..evaluation.command")
DONE = 0
FAILED = 1
USAGE = 2
LAUNCHED = "TINYGPT_LAUNCHED"  # a variable of the ranks that `_launch` starts
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
    if argv is None:
        _read_words_as_utf8()
    words = [*(sys.argv[1:] if argv is None else argv)]
    if words[:1] in (["help"], ["--help"]):  # `tinygpt help generate` is `tinygpt generate --help`
        words = [*words[1:2], "--help"]
    with _silence(bool(launched_rank())):  # rank 0 reports a malformed command line for all
        args = parse(words)
    with logging_to_stderr(
        args.log_level, getattr(args, "log_format", "text"), getattr(args, "color", "auto")
    ):
        try:
            if args.ignored:
                log(f"nothing here depends on {', '.join(args.ignored)}")
            for note in args.notes:
                log(note)
            if has_ranks(args):
                start_ranks(args, words)
            _command(args.command).run(args)
            return DONE
        except (Exception, KeyboardInterrupt) as error:
            if args.log_level == "debug":
                raise
            with _silence(has_ranks(args) and local_rank() > 0):  # one rank of each host reports it
                return _report(error, args)
        finally:
            _flush_streams()


@contextmanager
def _silence(is_silent: bool) -> Iterator[None]:
    if not is_silent:
        yield
        return
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        yield


def start_ranks(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Become mpiexec if it has not started this process. Return in rank 0; other ranks follow it, and exit."""
    from ..ranks.mpi import Layout, process_world, world_of

    layout = Layout(args.tensor_parallel_size, args.pipeline_parallel_size)
    if launched_rank() is None and LAUNCHED not in os.environ:
        _launch(layout, words)
    from ..ranks.lead import driver_of, join

    world = process_world()
    if world.rank == 0:
        with suppress(OSError):  # not inherited
            os.dup2(int(os.environ.get(LAUNCHED, 1)), 1)
        world_of(layout)
        driver_of(world)  # now: a command line may be refused before any model is opened
        signal.signal(signal.SIGTERM, lambda number, _: world.abort(128 + number))
        return
    if world.size != layout.size:  # rank 0 reports it
        sys.exit(USAGE)
    join(layout, world)


def _launch(layout: "Layout", words: Sequence[str]) -> None:
    from ..ranks.mpi import find_mpiexec

    mpiexec = find_mpiexec()
    if mpiexec is None or importlib.util.find_spec("mpi4py") is None:
        missing = "mpi4py" if mpiexec else "mpiexec"
        raise RequestError(
            f"--tensor-parallel-size is {layout.tensor_size} and --pipeline-parallel-size is {layout.pipeline_size}, "
            f"which needs {missing}: it comes with {how_to_install('mpi')}."
        )
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    command = [mpiexec, "-n", str(layout.size), sys.executable, "-m", "tinygpt", *words]
    stdout = 1
    program = Path(mpiexec).resolve()
    if program.stem == "mpiexec" and program.with_name("mpiexec.hydra").is_file():  # MPICH
        stdout = os.dup(1)  # rank 0's; what MPICH itself says is no text
        os.set_inheritable(stdout, True)
        os.dup2(2, 1)
    os.execve(mpiexec, command, {**os.environ, LAUNCHED: str(stdout)})


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line. Raise SystemExit for --help, --version and a malformed line."""
    name, *words = _spelled(words) or _explain_commands(words)
    parser = command_parser(name, "--help-all" in words)
    line = OwnWords.of(words, parser)
    if "config" in line.given or (
        name != "convert" and any(variable.startswith("TINYGPT_") for variable in os.environ)
    ):
        config = parser.parse_known_args(line.words)[0].config if "config" in line.given else None
        set_defaults(parser, lambda flag: OwnWords.of([flag], parser).words, line.given, config)
    args = _read(parser, line.words)
    args.command = name
    args.given = line.given
    args.ignored = line.ignored
    args.notes = [note for pattern, note in NOTES.items() if re.search(pattern, " ".join([name, *words]))]
    _set_model(args, parser)
    return args


def _spelled(words: Sequence[str]) -> list[str]:
    """Return the words of a line with our name of the command first; none without a known one."""
    match [*words]:
        case ["run", model, *rest] if not model.startswith("-"):  # as in ollama
            words = ["run", "--model", model, *rest]
        case ["generate", *rest] if "--interactive" in rest:  # the name before there was `chat`
            words = ["chat", *(word for word in rest if word != "--interactive")]
        case ["bench", "latency" | "throughput", *rest]:  # vLLM's
            words = ["bench", *rest]
        case ["bench", "serve", *_]:
            _explain_commands(["bench serve"])
        case [text, *_] if " " in text or (text.startswith("-") and text not in TOP_FLAGS):
            words = ["generate", *words]
    words = [*COMMAND_ALIASES.get(words[0], words[0]).split(), *words[1:]] if words else []
    return words if words[:1] and words[0] in COMMANDS else []


def _read(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    # Intermixed: flags may stand between the words of a PROMPT; but it reads words after -- as flags.
    read = parser.parse_known_args if "--" in words else parser.parse_known_intermixed_args
    args, unknown = read(words)
    if unknown:
        flag = next((word for word in unknown if word.startswith("-")), None)
        if flag is None:
            parser.error(f"unexpected argument {unknown[0]!r}")
        name = flag.partition("=")[0]
        parser.error(f"unknown flag {name}{hint(_hyphened(name), parser._option_string_actions)}")
    return args


def _set_model(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if getattr(args, "checkpoint", None) is not None:
        if "model" in args.given:
            parser.error(f"{args.checkpoint} and --model name one thing: give one of them")
        args.model = args.checkpoint
        args.given.add("model")
    if getattr(args, "hf_file", None):
        args.model = f"{args.model}/{args.hf_file}"


def _hyphened(name: str) -> str:
    return name.replace("_", "-") if name.startswith("--") else name


@dataclass(frozen=True)
class OwnWords:
    """A line's words with our flags, the destinations of these, and the flags on which nothing depends."""

    words: list[str]
    given: set[str]
    ignored: list[str]

    @classmethod
    def of(cls, words: Sequence[str], parser: argparse.ArgumentParser) -> "OwnWords":
        """Exit if two spellings of one flag are given: `-n 1 --max-tokens 100` may mean samples by the first."""
        flags = parser._option_string_actions
        left = as_meant(words)
        own: list[str] = []
        ignored: list[str] = []
        typed: dict[argparse.Action, str] = {}
        while left:
            word, *left = left
            if word == "--":  # words after it are text
                own += [word, *left]
                break
            name = word.partition("=")[0]
            spelling = _spelling_of(word, left, parser)
            left = left[spelling.num_taken :]
            if not spelling.words:
                ignored.append(name)
            own += spelling.words
            for action in filter(None, (flags.get(ours.partition("=")[0]) for ours in spelling.words)):
                is_once = action.nargs != 0 and not isinstance(action, argparse._AppendAction)
                if typed.setdefault(action, name) != name and is_once:
                    parser.error(f"{typed[action]} and {name} name one thing: give one of them")
        return cls(own, {action.dest for action in typed}, ignored)


def _spelling_of(word: str, rest: Sequence[str], parser: argparse.ArgumentParser) -> Spelling:
    flags = parser._option_string_actions
    name = word.partition("=")[0]
    flag = _hyphened(name)
    spelling = Spelling([flag + word[len(name) :]] if flag in flags else [word])
    if word.startswith("-") and flag not in flags:
        try:
            ours = translated(flag + word[len(name) :], rest, flags)
        except OSError as error:
            parser.error(f"{name}: {error.filename} cannot be read: {error.strerror}")
        if ours is None and flag in HINTS:  # before argparse: its value may be no argument
            parser.error(f"unknown flag {name}{hint(flag, flags)}")
        spelling = ours or spelling
    if spelling.words and spelling.words[-1].partition("=")[0] in flags:
        *before, last = spelling.words
        valued = revalued(last, rest[spelling.num_taken :], flags)
        return Spelling([*before, *valued.words], spelling.num_taken + valued.num_taken)
    return spelling


def _explain_commands(words: Sequence[str]) -> NoReturn:
    """Print help, version or error of a line without a known command, and exit."""
    parser = _parser("tinygpt", "COMMAND [flags]", DESCRIPTION, EXAMPLES)
    parser.add_argument("-V", "--version", action="version", version=f"tinygpt {tinygpt.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND")
    for name, summary in COMMANDS.items():
        subparsers.add_parser(name, help=summary)
    if not words:
        parser.print_help(sys.stderr)
    elif words[0] in TOP_FLAGS:
        parser.parse_args(words[:1])
    else:
        nearest = hint(words[0], COMMANDS) or f"; give one of {', '.join(COMMANDS)}"
        parser.error(f"unknown command {words[0]}{nearest}")
    sys.exit(USAGE)


def command_parser(name: str, is_all: bool = True) -> argparse.ArgumentParser:
    """is_all: show rare flags in --help too."""
    command = _command(name)
    parser = _parser(f"tinygpt {name}", command.arguments, COMMANDS[name], EPILOG)
    command.add_arguments(parser)
    add = parser.add_argument
    if "[MODEL]" in command.arguments:
        add("checkpoint", nargs="?", metavar="MODEL", help="the same as --model (default: its value)")
    add("--help-all", action="help", help="show every flag and exit")
    if name in CONFIGURED:
        add(
            "--config",
            metavar="FILE",
            help="YAML with values of flags, which flags and TINYGPT_ variables replace (default: none)",
        )
    if any(action.dest == "model" for action in parser._actions):
        add("--hf-file", help=argparse.SUPPRESS)  # of the repository that --model names
    add(
        "--log-level",
        type=str.lower,
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least level of messages on stderr: debug, info, warning or error (default: info)",
    )
    level = partial(add, action="store_const", dest="log_level", default=argparse.SUPPRESS)
    level("-q", "--quiet", const="error", help="errors alone (default: off)")
    level(
        "-v",
        "--verbose",
        "--debug",
        const="debug",
        help="all messages, and the traceback of an error (default: off)",
    )
    if command.everyday and not is_all:
        shown = (*command.everyday, "help", "help_all")
        rare = [a for a in parser._actions if a.dest not in shown and a.help != argparse.SUPPRESS]
        for action in rare:
            action.help = argparse.SUPPRESS
        parser.epilog = f"--help-all shows {len(rare)} more flags{command.rare}\n{EPILOG}"
    return parser


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose errors do not steer a terminal by words and files that they quote."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _parser(prog: str, arguments: str, summary: str, epilog: str) -> Parser:
    form = argparse.RawDescriptionHelpFormatter
    return Parser(prog, f"{prog} {arguments}", summary, epilog, formatter_class=form, allow_abbrev=False)


def _command(name: str) -> Command:
    return getattr(import_module(MODULES.get(name, f".{name}"), __package__), name.upper())


def _prepare_streams() -> None:
    """Write UTF-8 on every system, and escape text that UTF-8 cannot encode, such as file names, as JSON does.

    A closed stream (`2>&-`) is opened again, or a file would get its number; writes to stdout then fail.
    """
    for name, mode in (("stdout", os.O_RDONLY), ("stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, mode), "w", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _read_words_as_utf8() -> None:
    """Begin again in Python's UTF-8 mode, if words are UTF-8 that a locale of ASCII or Latin-1 has read otherwise."""
    words = [word for word in sys.argv if not word.isascii()]
    if sys.getfilesystemencoding() == "utf-8" or not words:
        return
    with suppress(UnicodeDecodeError):
        _ = [os.fsencode(word).decode() for word in words]
        command = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
        os.execv(sys.executable, command)


def _flush_streams() -> None:
    """Flush both: Python would flush a broken one at its exit, with another exit code."""
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


def _complete(args: argparse.Namespace) -> None:
    try:
        import shtab
    except ImportError:
        raise RequestError(
            f"completion needs shtab, which comes with: {how_to_install('completion')}."
        ) from None
    parser = argparse.ArgumentParser("tinygpt")
    commands = parser.add_subparsers()
    for name in COMMANDS:
        commands.add_parser(name, parents=[command_parser(name)], add_help=False, help=COMMANDS[name])
    emit(shtab.complete(parser, args.shell))


COMPLETION = Command(
    lambda parser: parser.add_argument(
        "shell", choices=("bash", "zsh", "tcsh"), help='as in eval "$(... bash)"'
    ),
    _complete,
    "{bash,zsh,tcsh}",
)
