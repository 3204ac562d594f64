"""A text that the user and the model write in turns, on a terminal or from a pipe."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace

from tinygpt.cli.loading import load_llm, warm_up
from tinygpt.cli.output import emit, log, rates
from tinygpt.errors import RequestError, suggest
from tinygpt.sampling_params import MAX_SEED, SamplingParams

HELP = """commands
a line is added to the text, which then goes on from there; an empty line adds nothing
each line after the first begins a new line of the text; to begin one with a colon, type a space before it
Ctrl-C ends the sample and keeps its text
:rewind     take back the last line and what followed it
:reset      begin a new text
:quit       end, as Ctrl-D does"""
COMMANDS = (":rewind", ":reset", ":help", ":quit")
FULL = "The text is unchanged: use :rewind or :reset, or start with --overflow slide."


def run_interactive(args: argparse.Namespace, params: SamplingParams, first: str | None) -> None:
    """Answer `first`, if there is one, and the lines of stdin."""
    llm, load_seconds = load_llm(args)
    _ = llm.tokenizer  # raises if there is none
    session = llm.session()
    session.extend([0])  # an empty session without BOS has nothing to go on from
    session.stream(params).close()  # raises if the params are impossible for this model
    warm_up(llm, args)
    turns = Turns(llm, params)
    seed = f"; seed {params.seed}" if params.temperature else ""
    log(f"type a text, and :help for more; load {load_seconds:.2f} s{seed}")
    if first:
        turns.write(first)
    for line in _lines():
        if line.strip() == ":quit":
            break
        if line.startswith(":"):
            turns.command(line.strip())
        else:
            turns.write(line)


class Turns:
    """The session, and the position at which each turn begins."""

    def __init__(self, llm, params: SamplingParams):
        self._llm, self._params, self._session = llm, params, llm.session()
        self._starts: list[int] = []
        self._num_turns = 0  # turns that were taken back included
        self._num_truncated = 0

    def write(self, line: str) -> None:
        """Add a line and print what follows it, or the reason why that is not possible."""
        # Another seed for each turn: a turn that is taken back and tried again comes out otherwise.
        params = replace(self._params, seed=(self._params.seed + self._num_turns) % (MAX_SEED + 1))
        start = len(self._session)
        try:
            self._session.extend(f"\n{line}" if start and line else line)
            self._log_truncated(params)
            chunks = self._session.stream(params)
        except RequestError as error:
            self._session.rewind(start)
            log(f"{error} {FULL if start else ''}".rstrip())
            return
        self._starts.append(start)
        self._num_turns += 1
        before = self._llm.engine.throughput
        with contextlib.closing(chunks), contextlib.suppress(KeyboardInterrupt):
            for chunk in chunks:
                emit(chunk.text, end="")
        emit()
        log(rates(self._llm.engine.throughput - before))

    def command(self, name: str) -> None:
        """Run a line that begins with a colon."""
        if name == ":help":
            log(HELP)
        elif name == ":reset":
            self._session, self._starts = self._llm.session(), []
            log("the text is empty")
        elif name == ":rewind" and not self._starts:
            log("there is no line to take back.")
        elif name == ":rewind":
            self._session.rewind(self._starts.pop())
            log(f"the text ends with {self._session.text[-40:]!r}" if len(self._session) else "the text is empty")
        else:
            log(f"unknown command {name}{suggest(name, COMMANDS) or '; :help lists them'}")

    def _log_truncated(self, params: SamplingParams) -> None:
        count = self._llm.num_truncated_tokens(self._session.token_ids, params)
        if count > self._num_truncated:
            log(f"the first {count} tokens of the text exceed the model's positions and are truncated")
        self._num_truncated = count


def _lines() -> Iterator[str]:
    """Yield lines of stdin without their ends: edited, and with a history, on a terminal."""
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
