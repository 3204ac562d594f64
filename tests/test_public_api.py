"""The public names, signatures, flags, record fields and exit codes equal those written in public_api.txt.

After a deliberate change, `python tests/record.py` writes it again; the diff shows what users notice.
"""

import contextlib
import dataclasses
import inspect
import io
import json
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tinygpt
from support.paths import HOW_TO_RECORD
from tinygpt import aliases, errors, outputs, sampling_params
from tinygpt.__main__ import main
from tinygpt.cli.main import COMMANDS

RECORD = Path(__file__).with_name("public_api.txt")
TEXT = "Once upon a time there was a king."
RECORDS = {
    "generate --json": "generate Once --max-tokens 1 --json --device reference",
    "generate --input": "generate --input {prompts} --max-tokens 1 --device reference",
    "score --json": "score Once --json --device reference",
    "lens --json": "lens Once --json --device reference",
    "eval ppl --json": "eval ppl {text} --json",
    "eval lambada --json": "eval lambada {rows} --json",
    "info --json": "info demo --json",
    "doctor --json": "doctor --json",
    "bench --format jsonl": "bench --random tiny --batch-sizes 1 --prompt-lengths 4 --new-tokens 2 --repetitions 1 "
    "--format jsonl",
}
# Objects of JSON whose keys are data: names of tensors, files and packages, positions, devices.
DATA = ("tensors", "files", "by_position", "devices", "versions")
PROTOCOLS = ("__call__", "__len__", "__enter__", "__exit__", "__aenter__", "__aexit__")


def sections() -> Iterator[tuple[str, Iterator[str]]]:
    """Yield (title, words of the section)."""
    for command in COMMANDS:
        yield f"tinygpt {command}", _flags(command)
    others = {ours: names.replace(" ", "/") for ours, names in aliases.NAMES.items()}
    yield "names in other programs", (f"{ours}={names}" for ours, names in others.items())
    yield "flags with values of other programs", iter(aliases.REWRITTEN)
    yield "ignored flags", iter(sorted({*aliases.WITH_VALUE, *aliases.WITHOUT_VALUE}))
    yield "tinygpt", iter(tinygpt.__all__)
    yield "warmup", iter([_signature(tinygpt.warmup)])
    with tinygpt.LLM("demo", device="reference") as llm:
        for instance in (llm, tinygpt.AsyncLLM(llm), llm.session(), llm.tokenizer):
            yield type(instance).__name__, _members(type(instance), instance)
    yield "RemoteLLM", _members(tinygpt.RemoteLLM)
    for cls in (sampling_params.SamplingParams, sampling_params.RepetitionDetection):
        yield cls.__name__, _fields(cls)
    records = (
        "RequestOutput CompletionOutput RequestMetrics StreamChunk ContinuationScore Classification Word"
    )
    for name in records.split():
        yield name, _fields(getattr(outputs, name))
    yield (
        "errors",
        (n for n, e in sorted(vars(errors).items()) if isinstance(e, type) and issubclass(e, Exception)),
    )
    for title, arguments in RECORDS.items():
        yield title, _keys_of(arguments)
    yield "exit codes", _exit_codes()


def _flags(command: str) -> Iterator[str]:
    from tinygpt.cli.main import command_parser

    for action in sorted(command_parser(command)._actions, key=lambda action: action.option_strings):
        default = "" if action.default in (None, False, [], "==SUPPRESS==") else f"={action.default}"
        yield "/".join(action.option_strings or [action.dest.upper()]) + default


def _members(cls: type, instance: Any = None) -> Iterator[str]:
    yield _signature(cls)
    for name in sorted({*dir(cls), *vars(instance or cls), *getattr(cls, "__annotations__", ())}):
        if name in PROTOCOLS or not name.startswith("_"):
            member = getattr(cls, name, None)
            is_method = callable(member) and not isinstance(member, property) and name not in PROTOCOLS
            yield name + (
                _signature(member).replace("(self, ", "(").replace("(self)", "()") if is_method else ""
            )


def _signature(function: Callable) -> str:
    """Return the signature without annotations, which may become clearer."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def _fields(cls: type) -> Iterator[str]:
    """Yield fields in their order, which records share, then properties."""
    if issubclass(cls, tuple):
        yield from (f"{name}={cls._field_defaults.get(name, '')}" for name in cls._fields)
        return
    for field in dataclasses.fields(cls):
        yield field.name + ("" if field.default is dataclasses.MISSING else f"={field.default!r}")
    yield from (
        name for name, m in sorted(vars(cls).items()) if isinstance(m, property) and not name.startswith("_")
    )


def _run(arguments: str) -> tuple[int, str]:
    """Return the exit code and stdout of a command line."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        try:
            return main(arguments.split()), out.getvalue()
        except SystemExit as exit_:  # argparse
            return exit_.code, out.getvalue()


def _exit_codes() -> Iterator[str]:
    cases = {
        "done": "info demo",
        "impossible": "generate Once --n 0",
        "malformed": "generate --nonsense",
        "no-model": "generate Once --model ./nowhere",
        "no-file": "generate --input ./nowhere",
    }
    yield from (f"{title}={_run(arguments)[0]}" for title, arguments in cases.items())
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder, "in.jsonl")
        given.write_text('{"prompt": "Once", "allowed_token_ids": [11], "no_repeat_ngram_size": 1}\n')
        yield f"failed-on-the-way={_run(f'generate --input {given} --device reference')[0]}"
    command = f"{sys.executable} -m tinygpt generate Once --device reference > /dev/full"
    if Path("/dev/full").exists():
        root = Path(tinygpt.__file__).parents[1]
        yield f"full-disk={subprocess.run(command, cwd=root, shell=True, stderr=subprocess.DEVNULL).returncode}"


def _keys_of(arguments: str) -> Iterator[str]:
    """Yield the paths of keys, such as `outputs[].text`, of the JSON that a command prints."""
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder, name) for name in ("text", "rows", "prompts")}
        files["text"].write_text(TEXT)
        files["rows"].write_text(json.dumps({"text": TEXT}) + "\n")
        files["prompts"].write_text(
            '{"prompt": "Once", "logprobs": 0}\n{"id": "b", "prompt_token_ids": [1]}\n'
        )
        code, out = _run(arguments.format(**files))
    assert code == 0, arguments
    decoder, found = json.JSONDecoder(), {}
    while out:
        value, end = decoder.raw_decode(out)
        found |= dict.fromkeys(_keys(value))
        out = out[end:].lstrip()
    yield from found


def _keys(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, list):
        for inner in value:
            yield from _keys(inner, f"{path}[]")
    elif isinstance(value, dict) and not path.endswith("logprobs[]"):  # keyed by token ids
        for key, inner in value.items():
            here = f"{path}.{key}".lstrip(".")
            yield here
            if key not in DATA:
                yield from _keys(inner, here)


def describe() -> str:
    return "".join(
        textwrap.fill(f"{title}: {'  '.join(words)}", 120, subsequent_indent="    ", break_on_hyphens=False)
        + "\n"
        for title, words in sections()
    )


def test_the_public_api_is_the_one_on_record():
    assert describe().splitlines() == RECORD.read_text(encoding="utf-8").splitlines(), HOW_TO_RECORD


if __name__ == "__main__":
    RECORD.write_text(describe(), encoding="utf-8")
elif not sys.platform.startswith("linux"):
    pytest.skip("/dev/full and messages are those of Linux", allow_module_level=True)
