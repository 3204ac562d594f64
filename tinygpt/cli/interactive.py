"""A text that the user and the model write in turns, on a terminal or from a pipe."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from tinygpt.cli import loading
from tinygpt.cli.flags.sampling import FLAG_OF, seed_note
from tinygpt.cli.output.cut_texts import say_cut
from tinygpt.cli.output.messages import put, say
from tinygpt.cli.output.statistics import rates
from tinygpt.cli.output.wording import for_shell
from tinygpt.errors import RequestError, TinyGPTError
from tinygpt.sampling_params import MAX_SEED, SamplingParams

if TYPE_CHECKING:
    from tinygpt.llm import LLM

HELP = """a line is added to the text, which then goes on from there; an empty line adds nothing
each line after the first begins a new line of the text; to begin one with a colon, type a space before it
Ctrl-C ends the sample, and what was written stays
:rewind     take back the last line and what followed it
:reset      begin a new text
:save PATH  keep the text, and what the model has computed for it
:load PATH  go on with what was saved
:quit       end, as Ctrl-D does"""
MEANT = {  # by other programs' names
    **dict.fromkeys((":q", ":q!", ":wq", ":exit", ":bye", ":x"), ":quit"),
    **dict.fromkeys((":undo", ":u", ":back"), ":rewind"),
    **dict.fromkeys((":clear", ":new"), ":reset"),
    **dict.fromkeys((":h", ":?", ":commands"), ":help"),
    **dict.fromkeys((":w", ":write"), ":save"),
    **dict.fromkeys((":open", ":read"), ":load"),
}
FULL = "What has been written stays: use :rewind or :reset, or start with --overflow slide."


def run_interactive(args: argparse.Namespace, params: SamplingParams, first: str | None) -> None:
    """Answer lines until there are no more of them: `first`, if there is one, and those that are typed."""

    def check(llm: "LLM") -> None:
        _ = llm.tokenizer  # raise the error that says why there is none
        session = llm.session()
        session.extend([0])  # of nothing, a model without BOS goes on with nothing
        session.stream(params).close()  # raise what is impossible

    llm, load_seconds = loading.load_llm(args, check)
    turns = Turns(llm, params)
    say(f"type a text, and :help for more; load {load_seconds:.2f} s{seed_note(params, '; ')}")
    if first:
        turns.write(first)
    for line in _lines():
        if line.strip() == ":quit":
            break
        if line.startswith(":"):
            turns.command(*line.strip().split(maxsplit=1))
        else:
            turns.write(line)


class Turns:
    """The session, and where in it each turn began."""

    def __init__(self, llm: "LLM", params: SamplingParams):
        self._llm = llm
        self._params = params
        self._session = llm.session()
        self._starts: list[int] = []
        self._num_turns = 0  # those that were taken back included
        self._num_truncated = 0

    def write(self, line: str) -> None:
        """Add a line and print what follows it, or say why that is not possible."""
        # Another seed for each turn: what is taken back and tried again comes out otherwise.
        params = replace(self._params, seed=(self._params.seed + self._num_turns) % (MAX_SEED + 1))
        start = len(self._session)
        try:
            self._session.extend(f"\n{line}" if start and line else line)
            self._say_truncated(params)
            chunks = self._session.stream(params)
        except RequestError as error:
            self._session.rewind(start)
            say(f"{for_shell(str(error), FLAG_OF)} {FULL if start else ''}".rstrip())
            return
        self._starts.append(start)
        self._num_turns += 1
        before = self._llm.engine.throughput
        texts, finish_reason = [], None
        with contextlib.closing(chunks), contextlib.suppress(KeyboardInterrupt):
            for chunk in chunks:
                put(chunk.text, end="")
                texts.append(chunk.text)
                finish_reason = chunk.finish_reason
        put()
        say_cut(params, [("".join(texts), finish_reason)])
        say(rates(self._llm.engine.throughput - before))

    def command(self, name: str, argument: str = "") -> None:
        """Do what a line that begins with a colon asks for."""
        commands = {":rewind": self._rewind, ":reset": self._reset, ":help": lambda: say(f"commands\n{HELP}")}
        with_path = {":save": self._save, ":load": self._load}
        if name in commands and not argument:
            commands[name]()
        elif name in with_path and argument:
            try:
                with_path[name](argument)
            except OSError as error:
                say(f"{error.strerror or error}: {argument!r}.")
            except TinyGPTError as error:
                say(str(error))
        else:
            meant = MEANT.get(name) or next(iter(get_close_matches(name, [*commands, *with_path, ":quit"], 1)), None)
            hint = f"did you mean {meant}? " if meant not in (None, name) else ""
            say(f"{' '.join((name, argument)).rstrip()!r} is no command: {hint}:help lists them.")

    def _rewind(self) -> None:
        if not self._starts:
            say("there is no line to take back.")
            return
        self._session.rewind(self._starts.pop())
        say(f"the text ends with {self._session.text[-40:]!r}" if len(self._session) else "the text is empty")

    def _reset(self) -> None:
        self._session, self._starts = self._llm.session(), []
        say("the text is empty")

    def _save(self, path: str) -> None:
        self._session.save(path)
        say(f"{len(self._session)} tokens saved")

    def _load(self, path: str) -> None:
        self._session, self._starts = self._llm.load_session(path), []
        say(f"{len(self._session)} tokens loaded: the text ends with {self._session.text[-40:]!r}")

    def _say_truncated(self, params: SamplingParams) -> None:
        count = self._llm.num_truncated_tokens(self._session.token_ids, params)
        if count > self._num_truncated:
            say(f"the first {count} tokens of the text have left the model's positions, and are not seen any more")
        self._num_truncated = count


def _lines() -> Iterator[str]:
    """Lines of stdin without their ends: edited, and with a history, where it is a terminal."""
    if sys.stdin is None:  # the descriptor was closed, as by `<&-`
        raise RequestError("--interactive reads lines from stdin, which is closed.")
    if sys.stdin.isatty():
        yield from _typed_lines()
        return
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise RequestError(f"line {number} of stdin is not UTF-8 text: convert it first.") from None


def _typed_lines() -> Iterator[str]:
    with contextlib.suppress(ImportError):  # Windows has none, and its terminals edit lines themselves
        import readline  # noqa: F401, `input` uses it once it is there
    prompt = "> " if sys.stdout.isatty() else ""
    while True:
        try:
            yield input(prompt)
        except KeyboardInterrupt:  # the line is given up, as in a shell
            put()
        except EOFError:
            put()
            return
