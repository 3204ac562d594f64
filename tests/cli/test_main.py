"""The command line as a whole: commands, help, exit codes, errors, streams, and the modules that it imports."""

import argparse
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

from support import tiny_checkpoint
from support.paths import ROOT
from support.processes import STATS, run_process
from tinygpt.cli import generate
from tinygpt.cli import main as cli
from tinygpt.errors import CheckpointError, LostFileError, RequestError, TinyGPTError

POSIX = pytest.mark.skipif(os.name == "nt", reason="needs a POSIX system")
FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


def test_version(call):
    assert re.fullmatch(r"tinygpt \d+\.\d+\.\d+\n", call("--version").out)


@pytest.mark.parametrize("words", [["--help"], ["help"]])
def test_help_lists_the_commands(call, words):
    result = call(*words)
    assert result.code == 0
    listed = re.findall(r"^    (\w+) ", result.out, re.MULTILINE)
    assert tuple(listed) == tuple(cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_of_a_command(call, command):
    result = call(command, "--help")
    assert result.code == 0
    assert result.out == call("help", command).out
    assert result.out.startswith("usage: tinygpt " + command)


def test_without_a_command_the_help_is_on_stderr(call):
    result = call()
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("usage: tinygpt COMMAND [flags]")


@pytest.mark.parametrize("command", ["generate", "serve", "info"])
def test_a_command_imports_no_other(command):
    code = "import sys; from tinygpt.cli.main import main\n"
    code += f"try: main(['{command}', '-h'])\nfinally: print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    others = {f"tinygpt.cli.{name}" for name in cli.COMMANDS if name != command}
    assert not others & set(result.stdout.split())


def test_half_a_character_is_refused(call):
    result = call("generate", "half a character: \ud83d")
    assert (result.code, result.out) == (cli.USAGE, "")
    assert "lone surrogate" in result.err


def test_without_a_tokenizer_a_record_has_no_text(call, tmp_path):
    folder = str(tiny_checkpoint.write_checkpoint(tmp_path / "tiny"))
    assert '"text": null' in call("generate", "", "--model", folder, "--max-tokens", "2", "--json").out


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (RequestError("is 3 and must be 4.", "top_k"), 2, "error: --top-k is 3 and must be 4.\n"),
        (
            RequestError("is 3 and must be 1.", "tensor_parallel_size"),
            2,
            "error: --tensor-parallel-size is 3 and",
        ),
        (RequestError("is bad.", "no_flag"), 2, "error: no_flag is bad.\n"),
        (MemoryError(), 1, "not enough memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device", "out.jsonl"), 1, "No space left on device: 'out.jsonl'"),
        (ZeroDivisionError("division by zero"), 1, "unexpected ZeroDivisionError: division by zero"),
        (CheckpointError("a \x1b[2J\x07\x9b\nb"), 2, "a \\x1b[2J\\x07\\x9b\nb\n"),
        (CheckpointError("a \u202eb\u2066"), 2, "a \\u202eb\\u2066\n"),
        (LostFileError("model.safetensors was cut short"), 1, "error: model.safetensors was cut short\n"),
        (TinyGPTError("no parity"), 1, "error: no parity\n"),
        (CheckpointError("a" * 10_000), 2, f"{'a' * 8000} [...]\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_error_is_a_sentence_and_an_exit_code(call, monkeypatch, error, code, says):
    def fail(args: argparse.Namespace):
        raise error

    monkeypatch.setattr(generate, "GENERATE", replace(generate.GENERATE, run=fail))
    result = call("generate", "Once")
    assert result.code == code
    assert says in result.err
    assert "Traceback" not in result.err
    with pytest.raises(type(error)):
        call("generate", "Once", "--debug")


@pytest.mark.usefixtures("llm")  # its kernels are compiled
def test_a_process_separates_stdout_and_stderr(small_demo):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    arguments = ["generate", "--model", small_demo, "--echo", "--seed", "7", "--max-tokens", "8"]
    result = run_process(*arguments, env=environment, input="Été 🦊".encode())
    assert result.returncode == 0
    assert result.stdout.decode().startswith("Été 🦊")
    assert STATS.fullmatch(result.stderr.decode().replace(os.linesep, "\n"))


@pytest.mark.parametrize("command", [("generate", "Once"), ("convert", "demo", "new")])
def test_numba_without_its_compiler_is_refused(command, tmp_path):
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    result = run_process(*command, env=environment, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, b"")
    assert b"NUMBA_DISABLE_JIT is 1, and may be 0 or unset" in result.stderr
    assert b"Traceback" not in result.stderr
    assert [*tmp_path.iterdir()] == []


@POSIX
def test_a_closed_stdin_is_refused():
    command = shlex.join([sys.executable, "-m", "tinygpt", "generate", "--max-tokens", "1"])
    result = subprocess.run(f"{command} <&-", shell=True, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert "no PROMPT was given and stdin is closed" in result.stderr


@POSIX
def test_a_name_that_is_not_text_is_still_reported():
    result = run_process("generate", "Once", "--model", b"./caf\xe9")
    assert (result.returncode, result.stdout) == (2, b"")
    assert rb"caf\udce9" in result.stderr


@POSIX
def test_a_closed_pipe_ends_the_run_quietly(small_demo):
    reader, writer = os.pipe()
    os.close(reader)
    result = run_process("generate", "Once", "--max-tokens", "8", "--model", small_demo, stdout=writer)
    os.close(writer)
    assert (result.returncode, result.stderr) == (cli.BROKEN_PIPE, b"")


@FULL
@pytest.mark.parametrize("arguments", [["generate", "Once", "-n", "2"], ["info"]], ids=lambda words: words[0])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_stdout_is_one_sentence(arguments, unbuffered, small_demo):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full:
        result = run_process(*arguments, "--model", small_demo, stdout=full, env=environment)
    assert result.returncode == cli.FAILED
    assert "tinygpt: error: stdout cannot be written (No space left on device)" in result.stderr.decode()


@FULL
@pytest.mark.parametrize(("max_tokens", "code"), [("2", cli.DONE), ("9999", cli.USAGE)])
def test_a_full_stderr_changes_nothing(max_tokens, code, small_demo):
    command = ["generate", "Once", "--seed", "1", "--model", small_demo, "--max-tokens", max_tokens]
    with open("/dev/full", "wb") as full:
        result = run_process(*command, stderr=full)
    assert (result.returncode, bool(result.stdout.strip())) == (code, code == cli.DONE)


@pytest.mark.skipif(os.name != "posix", reason="needs a shell of POSIX")
@pytest.mark.parametrize(
    ("closed", "code", "told"),
    [("2>&-", 0, ""), (">&-", 1, "stdout cannot be written"), (">&- 2>&-", 1, ""), ("<&- 2>&-", 0, "")],
)
def test_a_closed_stream(closed, code, told):
    """A text that is written is a success, and a lost one is none."""
    command = f'"{sys.executable}" -m tinygpt generate Once -n 3 --seed 5 {closed}'
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert bool(done.stdout.strip()) == (code == 0)
    assert "tinygpt" not in done.stdout  # no message goes there
    assert told in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs a locale of ASCII")
def test_words_are_utf8_in_any_locale():
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for word, code, text in (("é", 0, "é"), (os.fsdecode(b"\xe9"), 2, "")):
        command = [sys.executable, "-m", "tinygpt", "generate", word, "-n", "1", "--echo"]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **ascii_alone}, capture_output=True, check=False
        )
        assert (done.returncode, done.stdout.decode()[:1]) == (code, text)
