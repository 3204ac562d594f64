"""A process for each grammar: llguidance compiles and follows it there, within limits of memory and time.

llguidance limits only a part of its work, and aborts its process if memory runs out. A server process, which runs
`main` alone, imports llguidance and reads the vocabulary once; a fork for a grammar takes milliseconds. If a fork
ends, only the requests with its grammar fail.
"""

import itertools
import json
import marshal
import os
import signal
import socket
import subprocess
import sys
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

from . import json_schema

MAX_BYTES = 2**28  # of a process, which begins with 2**26 for 50 257 tokens; 48 KB of schema add 2**23
# CPU time. 48 KB of schema take 0.16 s; a step within llguidance's limits takes 15 ms.
COMPILE_SECONDS, STEP_SECONDS = 1.0, 0.5
# Rules of a grammar, or objects of a schema: two or three times as many, each in the next, overflow a stack of 8 MB.
MAX_PARTS = 1000
# The package would force the tokens of a certain text, and leave nothing if one of them may not come.
OPTIONS = '\n%llguidance {"no_forcing": true}\n'
ROOT = str(Path(__file__).parents[2])
START = f"import sys; sys.path[:] = sys.argv[1:]; from {__name__} import main; main()"


class LimitError(Exception):
    """A grammar's process has ended. `str()` has the grammar as its subject."""


class Grammar:
    def __init__(self, matchers: "Matchers | None" = None, channel: socket.socket | None = None):
        self._matchers = matchers
        self._channel = channel
        self._lock = Lock()
        self.numbers = itertools.count()
        self.dropped = []  # of samples

    def __del__(self):
        if self._channel is not None:
            self._channel.close()

    @property
    def has_ended(self) -> bool:
        return self._channel is not None and self._channel.fileno() < 0

    def ask(self, seconds: float, name: str, *args: Any) -> Any:
        """Return the result of a method of Matchers. Raise LimitError if the process ends."""
        with self._lock:
            dropped = [self.dropped.pop() for _ in range(len(self.dropped))]
            if self._channel is None:
                return self._matchers.answer(dropped, name, args)
            try:
                _send(self._channel, (seconds, dropped, name, args))
                result, bug = _receive(self._channel)
            except BaseException as error:  # Ctrl-C too, of `compile`: the next call would take this reply
                self._channel.close()
                if isinstance(error, OSError | EOFError):
                    raise LimitError(f"takes more than {seconds:g} s or {MAX_BYTES >> 20} MiB") from None
                raise
        if bug:
            raise RuntimeError(bug)
        return result


class GrammarState:
    """A sample's state in a grammar.

    It begins without a question to the process, or as a copy of another.
    """

    def __init__(self, grammar: Grammar, copied: "GrammarState | None" = None):
        self.grammar = grammar
        self._number = next(grammar.numbers)
        if copied is not None:
            self.ask("add", copied._number)

    def __del__(self):
        self.grammar.dropped.append(self._number)  # until the next call: a finalizer must not wait

    def ask(self, name: str, *args: Any) -> Any:
        return self.grammar.ask(STEP_SECONDS, name, self._number, *args)


class GrammarServer:
    """The server process, started with the first grammar, and its forks.

    tokens: the bytes of each token, then b"", the end.
    """

    def __init__(self, tokens: list[bytes], special_token_ids: list[int]):
        self._vocabulary = (tokens, special_token_ids)
        self._lock = Lock()
        self._process = self._control = None
        self.close = lambda: None

    def grammar(self) -> Grammar:
        if not hasattr(socket, "send_fds"):  # Windows has no fork, and so no limits here
            return Grammar(Matchers(*self._vocabulary))
        ours, theirs = socket.socketpair()
        with theirs, self._lock, suppress(OSError):  # an ended server: the Grammar's first call reports it
            if self._process is None or self._process.poll() is not None:
                self._start()
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        return Grammar(channel=ours)

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-S", "-c", START, ROOT, *sys.path]
        nowhere = subprocess.DEVNULL
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=theirs, stdout=nowhere, stderr=nowhere, start_new_session=True
            )
        self.close = weakref.finalize(self, _end, os.getpid(), self._control, self._process)
        _send(self._control, self._vocabulary)


def _end(starter: int, control: socket.socket, process: subprocess.Popen) -> None:
    if os.getpid() == starter:  # a fork has the socket, too
        with suppress(OSError):  # of an ended process
            control.shutdown(socket.SHUT_RDWR)
        control.close()
        process.wait()


@dataclass
class State:
    matcher: Any
    token_ids: list[int]
    is_alone: bool  # whether llguidance counts its limits for this matcher alone


class Matchers:
    def __init__(self, tokens: list[bytes], special_token_ids: list[int]):
        import llguidance

        self._package = llguidance
        self._vocab_size = len(tokens) - 1
        vocabulary = SimpleNamespace(
            tokens=tokens,
            special_token_ids=special_token_ids,
            bos_token_id=None,
            eos_token_id=self._vocab_size,
            is_tokenizer_wrapper=True,
        )
        self._tokenizer = llguidance.LLTokenizer(vocabulary)
        self._grammar = ""  # in the package's syntax
        self._samples: dict[int | None, State] = {}  # None: the beginning

    def answer(self, dropped: list[int], name: str, args: tuple) -> Any:
        for sample in dropped:
            self._samples.pop(sample, None)
        return getattr(self, name)(*args)

    def read(self, field: str, value: Any, has_open_schemas: bool = False) -> str:
        """Take the value of a guided field. Return the reason why it is no grammar, if there is one."""
        try:
            grammar = self._to_lark(field, value, has_open_schemas)
        except (ValueError, RecursionError) as error:
            return str(error)
        num_parts = grammar.count("{") + (grammar.count(":") if field == "guided_grammar" else 0)
        if field in ("guided_json", "guided_grammar") and num_parts > MAX_PARTS:
            return f"it has more than {MAX_PARTS} rules and objects"
        self._grammar = grammar + OPTIONS
        if field == "guided_choice":
            return ""
        return json_schema.in_our_words(self._package.LLMatcher.validate_grammar(self._grammar))

    def _to_lark(self, field: str, value: Any, has_open_schemas: bool) -> str:
        match field:
            case "guided_choice":  # one terminal: of rules, the package follows 2000 at most
                return f"start: TEXT\nTEXT: {' | '.join(map(json.dumps, value))}"
            case "guided_regex":
                return f"start: /{self._package.regex_to_lark(value)}/"
            case "guided_json":
                return f"start: %json {json.dumps(json_schema.prepared(value, has_open_schemas))}"
        json_schema.check_embedded(value)
        return self._package.grammar_from("grammar", value)  # Lark's or GBNF

    def compile(self) -> str:
        """Return the reason why no text follows the grammar, if there is one."""
        first = self._new()
        if error := first.get_error():
            return error
        self._samples[None] = State(first, [], False)
        matcher = first.deep_copy()
        packed = matcher.compute_bitmask()  # sets the error, too
        is_at_end = matcher.is_accepting() and not matcher.is_error()
        if is_at_end and int.from_bytes(packed, "little") == 1 << self._vocab_size:
            return "it allows no text but the empty one"  # its end would never be noticed
        return ""

    def add(self, sample: int | None, copied: int | None) -> None:
        of = self._state(copied)
        self._samples[sample] = State(of.matcher.deep_copy(), [*of.token_ids], of.is_alone)

    def take(self, sample: int, token_id: int) -> bool:
        """Append a token. Return whether the text can only end."""
        state = self._state(sample)
        state.token_ids.append(token_id)
        if not state.matcher.consume_token(token_id):
            self._begin_alone(state)
        return state.matcher.is_stopped() and not state.matcher.is_error()

    def mask(self, sample: int) -> tuple[bytes, str]:
        """Return a bit for each token that may come next and for the end, and an error or ""."""
        state = self._state(sample)
        packed = state.matcher.compute_bitmask()  # sets the error, too
        if state.matcher.is_error():
            self._begin_alone(state)
            packed = state.matcher.compute_bitmask()
        return packed, state.matcher.get_error()

    def _state(self, sample: int | None) -> State:
        if sample not in self._samples:
            self.add(sample, None)
        return self._samples[sample]

    def _new(self) -> Any:
        return self._package.LLMatcher(self._tokenizer, self._grammar, log_level=0)

    def _begin_alone(self, state: State) -> None:
        if not state.is_alone:
            state.matcher, state.is_alone = self._new(), True
            state.matcher.consume_tokens(state.token_ids)


def _send(channel: socket.socket, message: Any) -> None:
    data = marshal.dumps(message)
    channel.sendall(len(data).to_bytes(8, "little") + data)


def _receive(channel: socket.socket) -> Any:
    return marshal.loads(_read(channel, int.from_bytes(_read(channel, 8), "little")))


def _read(channel: socket.socket, size: int) -> bytes:
    data = channel.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise EOFError
    return data


def _serve(channel: socket.socket, matchers: Matchers) -> None:
    while True:
        seconds, *message = _receive(channel)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # then a signal ends the process
        try:
            reply = matchers.answer(*message), ""
        except MemoryError:
            return
        except Exception as error:
            reply = None, repr(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(channel, reply)


def main() -> None:
    import resource

    control = socket.socket(fileno=0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leaves no zombies
    matchers = Matchers(*_receive(control))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(ValueError):  # the hard limit is lower
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    while True:
        taken, take = os.pipe()
        if os.fork() == 0:  # ahead of its grammar
            try:
                [descriptor] = socket.recv_fds(control, 1, 1)[1]
                os.write(take, b"+")
                os.close(take)
                control.close()
                _serve(socket.socket(fileno=descriptor), matchers)
            finally:
                os._exit(0)  # with no traceback
        os.close(take)
        if not os.read(taken, 1):
            return
        os.close(taken)
