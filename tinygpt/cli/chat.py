"""`tinygpt chat`: a conversation, line by line, by the model's chat template."""

import argparse
import contextlib
import json
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import RequestError, invalid, suggest
from ..fields import MAX_SEED
from ..sampling_params import SamplingParams
from .flags import (
    FLAGS,
    Command,
    add_chat_template,
    add_color,
    add_group,
    add_sampling_groups,
    flag_of,
    load_llm,
    params_of,
    shows_surprise,
    warm_up,
    with_seed,
)
from .streams import counted, emit, log, stdin_lines

if TYPE_CHECKING:
    from ..llm import LLM
    from ..text.chat import Template

EVERY_DAY = (
    *("chat_template", "system", "color", "max_tokens", "temperature", "top_k", "top_p", "seed", "stop"),
    *("model", "dtype"),
)
HELP = """each line is a message, which the model answers
Ctrl-C ends an answer and keeps its text
/rewind     take back the last message and its answer
/reset      begin a new conversation
/save FILE  write the conversation as JSON, in OpenAI's form
/quit       end, as Ctrl-D does"""
COMMANDS = ("/rewind", "/reset", "/save", "/help", "/quit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("chat").add_argument
    add_chat_template(add)
    add("--system", metavar="TEXT", help="a first message, of the system (default: none)")
    add_color(add)
    add_sampling_groups(parser, overflow="truncate")  # a long conversation loses its beginning
    add_group(parser)


def run(args: argparse.Namespace) -> None:
    params = with_seed(params_of(args))
    if params.n != 1:
        raise invalid("--n", params.n, "1: a chat has one answer")
    from ..text.chat import PlainTemplate

    llm, _ = load_llm(args, chat_template=args.chat_template)
    _ = llm.tokenizer  # raises if there is none
    template = llm.chat_template
    if template is None:
        template = PlainTemplate()
        log(f"{args.model} has no chat template, so it continues your text (--chat-template plain)")
    conversation = Conversation(llm, template, params, args)
    llm.stream([0], params).close()  # raises if the params are impossible for this model
    warm_up(llm, args)
    log(f"type a message, and /help for more; seed {params.seed}")
    for line in stdin_lines("chat"):
        if line.strip() == "/quit":
            break
        if line.startswith("/"):
            conversation.command(*line.strip().split(maxsplit=1))
        elif line:
            conversation.say(line)


class Conversation:
    def __init__(self, llm: "LLM", template: "Template", params: SamplingParams, args: argparse.Namespace):
        self._llm = llm
        self._template = template
        self._params = params
        self._num_answers = 0
        self._shown = attrgetter("text")
        if shows_surprise(args):
            from ..look.html import ansi

            self._shown = lambda chunk: ansi(chunk.text, chunk.token_id, chunk.logprobs)
        self._first = [] if args.system is None else [{"role": "system", "content": args.system}]
        self._messages = self._first

    def say(self, text: str) -> None:
        """Add a message and print the answer, or log the reason why that is impossible."""
        from ..text.chat import chat_ids

        messages = [*self._messages, {"role": "user", "content": text}]
        params = replace(self._params, seed=(self._params.seed + self._num_answers) % (MAX_SEED + 1))
        try:
            prompt = self._llm.read_prompt(chat_ids(self._template, self._llm.tokenizer, messages))
            if count := self._llm.num_truncated_tokens(prompt, params):
                log(
                    f"the first {count} tokens of the conversation exceed the model's positions and are truncated"
                )
            chunks = self._llm.stream(prompt, params)
        except RequestError as error:
            problem = error.named(flag_of(error.field)) if error.field in FLAGS else error
            log(f"{problem} The conversation is unchanged; /reset begins a new one.")
            return
        answer = []
        with contextlib.closing(chunks), contextlib.suppress(KeyboardInterrupt):
            for chunk in chunks:
                answer.append(chunk.text)
                emit(self._shown(chunk), end="")
        emit()
        self._messages = [*messages, {"role": "assistant", "content": "".join(answer)}]
        self._num_answers += 1

    def command(self, name: str, argument: str = "") -> None:
        if name == "/help":
            log(HELP)
        elif name in ("/reset", "/rewind"):
            self._messages = (
                self._first if name == "/reset" else self._first + self._messages[len(self._first) : -2]
            )
            log(f"the conversation has {counted(len(self._messages), 'message')}")
        elif name == "/save" and argument:
            self._save(Path(argument).expanduser())
        elif name == "/save":
            log("/save needs the name of a file")
        else:
            log(f"unknown command {name}{suggest(name, COMMANDS) or '; /help lists them'}")

    def _save(self, path: Path) -> None:
        try:
            path.write_text(
                json.dumps({"messages": self._messages}, ensure_ascii=False, indent=2) + "\n", "utf-8"
            )
        except OSError as error:
            log(f"{path} cannot be written: {error.strerror}")
        else:
            log(f"{path} has {counted(len(self._messages), 'message')}")


CHAT = Command(add_arguments, run, "[flags] [MODEL]", EVERY_DAY)
