"""What users rely on, described as text: flags, names, signatures, fields of records, exit codes.

test_contract.py compares it with contract.txt. After a deliberate change, run in the checkout

    PYTHONPATH=. python tests/support/contract.py > tests/contract.txt

and let the diff show what users will notice. Sentences of --help and annotations are no part of it.
"""

import argparse
import contextlib
import dataclasses
import errno
import inspect
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import tinygpt
from tinygpt.__main__ import main

COMMANDS = ("generate", "serve", "convert", "warmup", "bench", "eval", "info", "doctor", "parity")
ROOT = Path(tinygpt.__file__).resolve().parent.parent
HARNESS = ("", ".__main__", ".api", ".api.model", ".api.registry", ".models", ".models.utils", ".utils")
# Objects of JSON whose keys are data: names of tensors and files, positions, what a device happens to tell.
DATA = ("tensors", "files", "by_position", "devices")
PROTOCOLS = ("__call__", "__len__", "__enter__", "__exit__", "__aenter__", "__aexit__")


def sections() -> dict[str, Callable[[], Iterator[str]]]:
    """Title -> what yields the section's lines."""
    return {
        **{f"python -m tinygpt {command}": _flags(command) for command in COMMANDS},
        "python -m tinygpt.lm_eval_adapter": _lm_eval_adapter,
        "exit codes": _exit_codes,
        "modules and names": _names,
        "LLM, AsyncLLM, Session, Tokenizer": _classes,
        "SamplingParams and RepetitionDetection": _params,
        "outputs": _outputs,
        "tinygpt.errors": _errors,
        "generate --json": _records("generate Once --max-tokens 1 --json"),
        "generate --input --output": _batch_records,
        "generate --input, a prompt that fails": _failed_record,
        "eval ppl --json": _records("eval ppl {text} --json"),
        "eval lambada --json": _records("eval lambada {rows} --json"),
        "info --json": _records("info demo --json"),
        "doctor --json": _records("doctor --json"),
        "parity --json": _records("parity demo --input {prompts} --max-tokens 1 --json"),
        "bench --format jsonl": _records(
            "bench --random tiny --batch-sizes 1 --prompt-lengths 4 --new-tokens 2 --repetitions 1 --format jsonl"
        ),
    }


def read(text: str) -> dict[str, list[str]]:
    """Title -> lines, of a contract that was written."""
    blocks = (block.splitlines() for block in text.split("# ")[1:])
    return {lines[0]: [line for line in lines[1:] if line] for lines in blocks}


# --- the command line


def _flags(command: str) -> Callable[[], Iterator[str]]:
    def lines() -> Iterator[str]:
        parser = sys.modules[main.__module__].command_parser(command)
        for action in sorted(parser._actions, key=lambda action: action.option_strings):  # arguments stay in order
            yield _flag(action)

    return lines


def _flag(action: argparse.Action) -> str:
    """As `--top-k N = 40`; what occurs or is given several times says so."""
    words = [", ".join(action.option_strings)]
    if action.nargs != 0:
        words.append(action.metavar or (action.dest.upper() if action.choices is None else ""))
    if action.choices is not None:
        words.append(f"of {', '.join(action.choices)}")
    if action.nargs not in (None, 0):
        words.append(f"nargs={action.nargs}")
    if isinstance(action, argparse._AppendAction):
        words.append("several times")
    if action.default not in (None, argparse.SUPPRESS, []):
        words.append(f"= {action.default!r}")
    return " ".join(word for word in words if word)


def _exit_codes() -> Iterator[str]:
    keyboard = mock.Mock(**{"isatty.return_value": False, "buffer.read.side_effect": KeyboardInterrupt})
    with mock.patch("sys.stdin", keyboard):
        yield f"interrupted: {_run('generate')[0]}"
    with mock.patch("tinygpt.cli.batch.read_prompts", side_effect=lambda *_: os.kill(os.getpid(), signal.SIGTERM)):
        yield f"terminated: {_run('generate --input ./nowhere')[0]}"
    yield f"done: {_run('info demo')[0]}"
    yield f"failed: {_run('info demo', FullDisk())[0]}"
    yield f"impossible: {_run('generate Once --n 0')[0]}"
    yield f"malformed: {_run('generate --nonsense')[0]}"
    yield f"a model that is not there: {_run('generate Once --model ./nowhere')[0]}"
    yield f"a file that is not there: {_run('generate --input ./nowhere')[0]}"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tinygpt", "info", "demo"]
    process = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=writer)
    os.close(writer)
    yield f"a closed pipe: {process.returncode}"


class FullDisk(io.StringIO):
    """As stdout is when it goes to a file that cannot grow."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _run(arguments: str, stdout: io.StringIO | None = None) -> tuple[int, str]:
    """The exit code and stdout of a command line."""
    with contextlib.redirect_stdout(stdout or io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        try:
            return main(arguments.split()), out.getvalue()
        except SystemExit as exit_:  # argparse
            return exit_.code, out.getvalue()


def _lm_eval_adapter() -> Iterator[str]:
    """Run as a program, with a stand-in for the harness, which is an extra."""
    registered, started = {}, []
    harness = ModuleType("lm_eval")
    harness.register_model = lambda name: lambda model: registered.setdefault(name, model)
    harness.cli_evaluate = lambda: started.append(True)
    harness.TemplateLM = object
    harness.normalize_gen_kwargs = harness.get_rolling_token_windows = harness.make_disjoint_window = None
    names = [f"lm_eval{name}" for name in HARNESS]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.modules.update(dict.fromkeys(names, harness))
    try:
        runpy.run_module("tinygpt.lm_eval_adapter", run_name="__main__")
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)
    assert started
    for name, model in registered.items():
        yield f"--model {name}: {_signature(model)}"


# --- the library


def _names() -> Iterator[str]:
    yield f"tinygpt: {', '.join(sorted(tinygpt.__all__))}"
    for module, names in {
        "tinygpt.llm": "LLM",
        "tinygpt.async_llm": "AsyncLLM",
        "tinygpt.remote.remote_llm": "RemoteLLM",
        "tinygpt.session": "Session",
        "tinygpt.sampling_params": "SamplingParams RepetitionDetection",
        "tinygpt.outputs": "RequestOutput CompletionOutput RequestMetrics StreamChunk ContinuationScore",
    }.items():
        found = __import__(module, fromlist=["_"])
        yield f"{module}: {', '.join(name for name in names.split() if hasattr(found, name))}"
    yield f"tinygpt.warmup{_signature(tinygpt.warmup)}"
    yield f"tinygpt.LLM is tinygpt.llm.LLM: {tinygpt.LLM is sys.modules['tinygpt.llm'].LLM}"


def _classes() -> Iterator[str]:
    for cls in (tinygpt.LLM, tinygpt.AsyncLLM, tinygpt.RemoteLLM):  # an LLM makes the others
        yield f"{cls.__name__}{_signature(cls)}"
    with tinygpt.LLM("demo", device="reference") as llm:
        for instance in (llm, tinygpt.AsyncLLM(llm), llm.session(), llm.tokenizer):
            yield from _members(instance)
    card = {"id": "demo", "max_model_len": 512}
    with mock.patch("tinygpt.remote.remote_llm._card_of", return_value=card), tinygpt.RemoteLLM() as remote:
        yield from _members(remote)


def _members(instance: Any) -> Iterator[str]:
    """Whether a value is an attribute or a property is no concern of a caller."""
    name = type(instance).__name__
    for member in sorted(dir(instance)):
        function = getattr(instance, member) if callable(getattr(type(instance), member, None)) else None
        is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        if member in PROTOCOLS or not member.startswith("_"):
            called = "" if function is None or member in PROTOCOLS else _signature(function)
            yield f"{'async ' * is_async}{name}.{member}{called}"


def _params() -> Iterator[str]:
    from tinygpt.sampling_params import RepetitionDetection, SamplingParams

    for cls in (SamplingParams, RepetitionDetection):
        yield from _fields(cls)


def _outputs() -> Iterator[str]:
    from tinygpt import outputs

    for name in ("RequestOutput", "CompletionOutput", "RequestMetrics", "StreamChunk", "ContinuationScore"):
        yield from _fields(getattr(outputs, name))


def _fields(cls: type) -> Iterator[str]:
    """A dataclass's fields in their order, which that of records is too, and its properties; or a named tuple's."""
    if issubclass(cls, tuple):
        yield f"{cls.__name__} (a tuple)"
        for name in cls._fields:
            default = f" = {cls._field_defaults[name]!r}" if name in cls._field_defaults else ""
            yield f"{cls.__name__}.{name}{default}"
        return
    yield f"{cls.__name__}{' (frozen)' * cls.__dataclass_params__.frozen}"
    for field in dataclasses.fields(cls):
        default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
        yield f"{cls.__name__}.{field.name}{default}"
    for name, member in sorted(vars(cls).items()):
        if isinstance(member, property) and not name.startswith("_"):
            yield f"{cls.__name__}.{name} (property)"


def _errors() -> Iterator[str]:
    from tinygpt import errors

    for name, member in sorted(vars(errors).items()):
        if isinstance(member, type) and issubclass(member, Exception):
            yield f"{name}({', '.join(base.__name__ for base in member.__bases__)})"


def _signature(function: Callable) -> str:
    """Without annotations, which may become clearer."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


# --- JSON


def _records(arguments: str) -> Callable[[], Iterator[str]]:
    """The keys of what a command prints, be it one object or one a line."""

    def lines() -> Iterator[str]:
        with tempfile.TemporaryDirectory() as folder:
            files = {name: Path(folder, name) for name in ("text", "rows", "prompts")}
            files["text"].write_text("Once upon a time there was a king.")
            files["rows"].write_text('{"text": "Once upon a time there was a king"}\n')
            files["prompts"].write_text('{"prompt": "Once"}\n')
            code, out = _run(arguments.format(**files))
        assert code == 0
        yield from _keys_of(out)

    return lines


def _batch_records() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        given.write_text('{"prompt": "Once", "max_tokens": 1, "logprobs": 0}\n{"id": "b", "prompt_token_ids": [1]}\n')
        code, out = _run(f"generate --input {given} --output {made} --max-tokens 1")
        assert (code, out) == (0, "")
        yield from _keys_of(made.read_text())


def _failed_record() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder, "in.jsonl")
        given.write_text('{"prompt": "Once", "allowed_token_ids": [11], "no_repeat_ngram_size": 1}\n')
        code, out = _run(f"generate --input {given}")
        assert code == 1
        yield from _keys_of(out)


def _keys_of(out: str) -> Iterator[str]:
    decoder, found = json.JSONDecoder(), {}
    while out:
        value, end = decoder.raw_decode(out)
        found |= dict.fromkeys(_keys(value))  # in the order of their first coming
        out = out[end:].lstrip()
    yield from found


def _keys(value: Any, path: str = "") -> Iterator[str]:
    """Paths such as `outputs[].text`."""
    if isinstance(value, list):
        for inner in value:
            yield from _keys(inner, f"{path}[]")
    elif isinstance(value, dict) and not path.endswith("logprobs[]"):  # there, keys are token ids
        for key, inner in value.items():
            here = f"{path}.{key}".lstrip(".")
            yield here
            if key not in DATA:
                yield from _keys(inner, here)


def describe() -> str:
    parts = ("\n".join([f"# {title}", "", *lines()]) for title, lines in sections().items())
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(describe())
