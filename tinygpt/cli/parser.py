"""argparse, with flags in either spelling, help in two tiers, and advice where it would only refuse."""

import argparse
import math
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from tinygpt.cli.flags.types import ALIASES
from tinygpt.suggestions import ALREADY, argument_meant, is_meant, nearest_choice, nearest_flag, why_without
from tinygpt.weights.config import DTYPES

RESULTS = (".json", ".jsonl", ".csv", ".md")  # how names of files with results end
_NO_VALUE = re.compile(r"argument (?P<flags>\S+): expected (?:one|at least one) argument")
_OF_ARGUMENT = re.compile(r"the following arguments are required|argument [A-Z]+:")
_MALFORMED = re.compile(r"argument (?:-\w/)?(?P<flag>--[\w-]+|[A-Z]+): it is ")


class Parser(argparse.ArgumentParser):
    """A parser of one command, or of all.

    every_day: the arguments that --help shows, by the names they have in the parsed namespace; --help-all shows all.
    None: both show all. rare: what --help says of the others.
    """

    def __init__(self, *arguments, every_day: Collection[str] | None = None, rare: str = "", **options):
        super().__init__(
            *arguments,
            **options,
            add_help=False,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._every_day, self._rare = every_day, rare
        self._words: Sequence[str] = ()
        self.siblings: Callable[[], Mapping[str, Parser]] = dict  # makes the parsers of all commands, by their names
        self.add_argument("-h", "--help", action=Help, help="show this help and exit")

    def parse_known_args(self, args=None, namespace=None):
        """As argparse does; of a command, whose flags and other arguments may stand in any order."""
        if self._subparsers is None:
            self._words = args
            self._refuse_foreign(args)
            args = self._flags_first(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str):
        """End with `message`, put into words where argparse's say little."""
        if _OF_ARGUMENT.match(message) and (unknown := self._unknown_flags()):  # whose value was taken for an argument
            self.refuse_unknown(unknown)
        if found := _NO_VALUE.match(message):
            message = self._without_value(found["flags"].split("/"))
        super().error(_MALFORMED.sub(r"\g<flag> is ", message))

    def refuse_unknown(self, unknown: Sequence[str]) -> None:
        """End with what is nearest in meaning, or else in spelling, to each flag that this command does not have."""
        left, ordered = [word for word in unknown if word != "--"], []
        for word in self._words:  # argparse has put values that it did not expect behind all flags
            if word in left:
                left.remove(word)
                ordered.append(word)
        described = map(self._described, _with_values([*ordered, *left]))
        self.error(f"unrecognized arguments: {', '.join(described)}; {self._where()}")

    def _unknown_flags(self) -> list[str]:
        words = self._words[: _end_of_flags(self._words)]
        return [word for word in words if word.startswith("--") and word.partition("=")[0] not in self.flags()]

    def _check_value(self, action, value):
        """As argparse does, in the words of our own types, and with the choice that is nearest."""
        if action.choices is not None and value not in action.choices:
            nearest = nearest_choice(str(value), action.choices)
            hint = f": did you mean {nearest}?" if nearest else "."
            raise argparse.ArgumentError(
                action, f"it is {value!r} and must be one of {', '.join(action.choices)}{hint}"
            )

    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]

    def fields(self) -> dict[str, str]:
        """The names under which values are parsed -> their flags."""
        return {action.dest: action.option_strings[-1] for action in self._actions if action.option_strings}

    def show_every_day(self) -> None:
        """Leave the flags of rare days out of the help."""
        shown = (*(self._every_day or ()), argparse.SUPPRESS)  # the dest of --help and its like
        rare = [action for action in self._actions if self._every_day and action.dest not in shown]
        for action in rare:
            action.help = argparse.SUPPRESS
        if rare:
            self.epilog = f"--help-all shows {len(rare)} more flags{self._rare}\n{self.epilog or ''}"

    def _flags_first(self, words: Sequence[str]) -> list[str]:
        """The same command line in the order that argparse can read: it takes a PROMPT that is in one place."""
        end = _end_of_flags(words)
        flags, others, num_wanted, given = [], [], 0.0, []
        for word in words[:end]:
            if _is_flag(word):
                num_wanted, given = self._num_values(word), [word]
                flags.append(word)
            elif num_wanted:
                num_wanted -= 1
                given.append(word)
                flags.append(word)
            else:
                if others:
                    self._refuse_second_value(given, word)
                given = []
                others.append(word)
        others += words[end + 1 :]
        return [*flags, "--", *others] if others else flags

    def _refuse_second_value(self, given: Sequence[str], word: str) -> None:
        """`Once --stop a b` would be the prompt `Once b`."""
        if len(given) == 2 and isinstance(self._option_string_actions.get(given[0]), argparse._AppendAction):
            flag, value = given
            self.error(
                f"{word!r} stands behind {flag} {shlex.quote(value)}, which takes one value: did you mean "
                f"{shlex.join([flag, value, flag, word])}? The words of a prompt stand together."
            )

    def _num_values(self, word: str) -> float:
        """How many of the words behind a flag are its own."""
        action = self._option_string_actions.get(word)  # none for an unknown one, nor for --flag=value
        return 0 if action is None or action.nargs == 0 else 1 if action.nargs is None else math.inf

    def _refuse_foreign(self, words: Sequence[str]) -> None:
        """llama.cpp's `-ngl 99` is none of our flags, and would be read as `-n gl`; so `-model` as `-m odel`."""
        words = words[: _end_of_flags(words)]
        for i, word in enumerate(words):
            if i > 0 and self._num_values(words[i - 1]) > 0:  # argparse says how a value is written with a dash
                continue
            if (typed := _with_hyphens(word)) != word and typed.partition("=")[0] in self.flags():
                self.error(f"{word} begins with a dash that is no hyphen: type {typed}, or -- before a text")
            name = word.partition("=")[0]
            is_one_dash_short = f"-{name}".replace("_", "-") in self.flags()
            is_foreign = is_meant(name, self.flags()) or why_without(name)
            if re.fullmatch(r"-[a-z][a-z_-]+", name) and (is_foreign or is_one_dash_short):
                self.refuse_unknown([word, *(value for value in words[i + 1 : i + 2] if not _is_flag(value))])

    def _described(self, words: list[str]) -> str:
        flag, *values = words
        if not flag.startswith("-"):
            return f"{flag}{self._advice_for_a_word(flag)}"
        name = flag.partition("=")[0]
        behind = [word for word in self._words[self._words.index(flag) + 1 :][:1] if not _is_flag(word)]
        if values[:1] != behind:  # what stood behind it was taken for another argument
            words = [flag]
        if why := self._why_not(name):
            return f"{shlex.join(words)} ({why})"
        nearest = nearest_flag(name, self.flags())
        if nearest is None:
            return f"{shlex.join(words)}{self._elsewhere(name)}"
        if self._num_values(nearest):
            values = flag.split("=", 1)[1:] or words[1:] or behind
            given = {word.partition("=")[0] for word in self._words}
            if self._option_string_actions[nearest].metavar == "NAME=PATH":
                values = [value if "=" in value else f"{Path(value).stem}={value}" for value in values]
            if nearest == "--output" and "--input" in {*self.flags()} - given:
                return f"{shlex.join(words)} (did you mean > {shlex.join(values)}? {nearest} needs --input)"
            nearest = shlex.join([nearest, *values])
        return f"{shlex.join(words)} (did you mean {nearest}?)"

    def _why_not(self, flag: str) -> str | None:
        """Why this command has no such flag, where it has none that means the same."""
        if flag in ALREADY and "--no-stream" in self.flags():
            return "that is how it is without a flag: leave it out"
        if is_meant(flag, self.flags()):
            return None
        if argument := argument_meant(flag, [action.metavar for action in self._get_positional_actions()]):
            return f"{argument} has no flag: leave {flag} out"
        commands = [name for name, parser in self.siblings().items() if flag in parser.flags()]
        return why_without(flag) or (f"it is a flag of tinygpt {' and '.join(commands[:2])}" if commands else None)

    def _elsewhere(self, flag: str) -> str:
        """The flag of another command that it is nearest to."""
        found = {name: nearest_flag(flag, parser.flags()) for name, parser in self.siblings().items()}
        nearest = next(filter(None, found.values()), None)
        if nearest is None:
            return ""
        commands = [name for name, its_nearest in found.items() if its_nearest == nearest]
        return f" (did you mean {nearest}? It is a flag of tinygpt {' and '.join(commands[:2])})"

    def _advice_for_a_word(self, word: str) -> str:
        before = self._words[: self._words.index(word)][-2:]
        action = self._option_string_actions.get(before[0]) if len(before) == 2 else None
        if action is not None and action.metavar == "LIST":
            return f" (did you mean {before[0]} {before[1]},{word}?)"
        if "--output" in self.flags() and word.endswith(RESULTS):
            return f" (did you mean --output {shlex.quote(word)}?)"
        if "--dtype" in self.flags() and word.lower() in {*DTYPES, *ALIASES}:
            return f" (did you mean --dtype {word}?)"
        takes_model = "--model" in self.flags() and not self._get_positional_actions()
        return f" (did you mean --model {shlex.quote(word)}?)" if takes_model else ""

    def _where(self) -> str:
        return f"{'--help-all' if self._every_day else '--help'} lists the flags"

    def _without_value(self, flags: list[str]) -> str:
        """What may stand behind a flag that stands alone."""
        action = self._option_string_actions[flags[-1]]
        value = action.metavar or (f"{{{','.join(action.choices)}}}" if action.choices else action.dest.upper())
        about = re.split(r" \(default|; ", action.help or "", maxsplit=1)[0]
        if action.choices:
            about = f"one of {', '.join(action.choices)}"
        return f"{'/'.join(flags)} needs a value, {flags[-1]} {value}: {about}{self._dash_advice(flags)}"

    def _dash_advice(self, flags: list[str]) -> str:
        """What to write where the value begins with a dash, so that argparse has taken it for a flag."""
        for flag, word in zip(self._words, self._words[1:], strict=False):
            if flag in flags and word.startswith("-") and word not in self.flags():
                return f"; a value that begins with a dash is written {flags[-1]}={shlex.quote(word)}"
        return ""


def hyphenated(words: Sequence[str]) -> list[str]:
    """Words of a command line with `--max_tokens` as `--max-tokens`; not behind `--`, where no word is a flag."""
    end = _end_of_flags(words)
    return [_FLAG.sub(lambda flag: flag[0].replace("_", "-"), word) for word in words[:end]] + [*words[end:]]


_FLAG = re.compile(r"^--[A-Za-z][\w-]*")


def _with_hyphens(word: str) -> str:
    """A flag that was copied from where programs make other dashes of its hyphens."""
    found = re.fullmatch(r"-?[\u2010-\u2015\u2212]+-?([A-Za-z][\w-]*(=.*)?)", word, re.DOTALL)
    if found is None:
        return word
    return hyphenated([f"--{found[1]}"])[0] if len(found[1].partition("=")[0]) > 1 else f"-{found[1]}"


def _end_of_flags(words: Sequence[str]) -> int:
    """Where `--` is: no word behind it is a flag."""
    return words.index("--") if "--" in words else len(words)


def _is_flag(word: str) -> bool:
    """As argparse has it: not "-", a negative number, or a text with a space that begins with a dash."""
    return re.fullmatch(r"-(?!\d+$|\d*\.\d+$)[^ =]+(=.*)?", word, re.DOTALL) is not None


def _with_values(unknown: Sequence[str]) -> list[list[str]]:
    """A flag together with the words behind it, which argparse leaves over as well."""
    found: list[list[str]] = []
    for word in unknown:
        if found and found[-1][0].startswith("-") and not word.startswith("-"):
            found[-1].append(word)
        else:
            found.append([word])
    return found


class Help(argparse.Action):
    """Print the help of the tier that is asked for, and exit."""

    def __init__(self, option_strings: Sequence[str], help: str, dest: str = argparse.SUPPRESS):
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: Parser, namespace, values, option_string=None):
        if option_string != "--help-all":
            parser.show_every_day()
        parser.print_help()
        parser.exit()
