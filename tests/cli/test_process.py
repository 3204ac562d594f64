"""`python -m tinygpt` as a process: streams, exit codes, pipes, and how little is imported."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from support.commands import STATS, run_process
from support.paths import ROOT
from tinygpt.cli import main as cli

pytestmark = pytest.mark.usefixtures("llm")  # its kernels are compiled: stderr is free of the notice of a first run


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert re.fullmatch(r"tinygpt \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_help_of_a_command_imports_nothing_heavy():
    code = (
        "import sys; from tinygpt.cli.main import main\ntry: main(['generate', '--help'])\nfinally: print(*sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "tinygpt.cli.commands.generate" in result.stdout
    assert not {"numpy", "numba", "tiktoken", "tqdm", "safetensors"} & set(result.stdout.split())


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_command_imports_no_other(command):
    """Nor what only others need: bench's tables and the server's modules are a tenth of a start."""
    code = (
        f"import sys; from tinygpt.cli.main import main\ntry: main(['{command}', '-h'])\nfinally: print(*sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    found = {name for name in result.stdout.split() if name.startswith("tinygpt.cli.commands.")}
    assert found == {f"tinygpt.cli.commands.{command}"}


def test_a_process_separates_stdout_and_stderr(small_demo):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    threads = str((os.cpu_count() or 1) + 3)
    arguments = ["generate", "--model", small_demo, "--echo", "--seed", "7", "--max-tokens", "8"]
    options = {"env": environment, "input": "Été 🦊".encode()}
    result = run_process(*arguments, "--threads", threads, **options)
    assert result.returncode == 0
    assert result.stdout.decode().startswith("Été 🦊")
    note, _, statistics = result.stderr.decode().replace(os.linesep, "\n").partition("\n")
    assert note.startswith(f"tinygpt: --threads is {threads} and there are ")
    assert STATS.fullmatch(statistics)
    assert run_process(*arguments, "--threads", "1", **options).stdout == result.stdout


def test_a_process_ends_with_the_exit_code():
    result = run_process("generate", "Once", "--n", "0")
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.startswith(b"tinygpt: error: ")


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell closes the descriptors")
@pytest.mark.parametrize(
    ("arguments", "closed", "code", "out", "says"),
    [
        (["--max-tokens", "1"], "<&-", 2, "", "no PROMPT was given and stdin is closed"),
        (["Once", "--allowed-token-ids", "11", "--max-tokens", "1"], "2>&-", 0, ",\n", ""),
        (["Once", "--n", "0"], "2>&-", 2, "", ""),
        (["--nonsense"], "2>&-", 2, "", ""),
    ],
)
def test_a_closed_stream(arguments, closed, code, out, says):
    command = shlex.join([sys.executable, "-m", "tinygpt", "generate", *arguments])
    result = subprocess.run(f"{command} {closed}", shell=True, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (code, out)
    assert says in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows has no names that are no text")
def test_a_name_that_is_no_text_is_still_reported():
    result = run_process("generate", "Once", "--model", b"./caf\xe9")
    assert (result.returncode, result.stdout) == (2, b"")
    assert rb"caf\udce9" in result.stderr
    assert b"Traceback" not in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows gives text")
def test_text_is_utf_8_in_any_locale(small_demo):
    """Python reads the command line by the locale, and keeps bytes that this has no characters for."""
    environment = {**os.environ, "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "LC_ALL": "C"}
    given = ["generate", "-m", small_demo, "-n", "1", "-s", "7", "--echo"]
    for words in (["Été 🦊"], ["-p", "Été 🦊"], ["Été", "🦊", "--stop", "é", "--bad-words", "ö"]):
        result = run_process(*given, *words, env=environment)
        assert (result.returncode, result.stdout.decode()[:5]) == (0, "Été 🦊")
    for words in ([b"caf\xe9"], ["-p", b"caf\xe9"], ["Once", "--stop", b"caf\xe9"]):
        result = run_process(*given, *words, env=environment)
        assert (result.returncode, result.stdout) == (2, b"")
        assert rb"'caf\udce9', whose byte 0xe9 is no UTF-8: set the terminal to UTF-8" in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGPIPE")
def test_a_closed_pipe_ends_the_run_quietly(small_demo):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tinygpt", "generate", "Once", "--max-tokens", "8", "--model", small_demo]
    result = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (result.returncode, result.stderr) == (cli.BROKEN_PIPE, b"")


INTERRUPTED_IMPORT = """
import runpy, sys

class CtrlC:
    def find_spec(name, path=None, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC)
runpy.run_module("tinygpt", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["tinygpt.cli.parser", "tinygpt.cli.commands.generate"])
def test_ctrl_c_while_modules_are_imported(module):
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (cli.INTERRUPTED, "", "\ntinygpt: interrupted\n")


FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


COMMANDS_THAT_WRITE = (
    ["generate", "Once", "--max-tokens", "2"],
    ["generate", "Once", "--max-tokens", "2", "--json"],
    ["info"],
)


@FULL
@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [
        pytest.param(
            *(arguments, unbuffered),
            id=f"{' '.join(arguments)}-{unbuffered}",
            # Every day each command once, and both ways to write.
            marks=[] if unbuffered == ("" if i % 2 else "1") else pytest.mark.slow,
        )
        for i, arguments in enumerate(COMMANDS_THAT_WRITE)
        for unbuffered in ("", "1")
    ],
)
def test_a_full_stdout_is_one_sentence(arguments, unbuffered, small_demo):
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "tinygpt", *arguments, "--model", small_demo]
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        result = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, env=environment)
    assert result.returncode == cli.FAILED
    assert result.stderr.decode() == (
        "tinygpt: error: stdout cannot be written (No space left on device): fix that, or send it elsewhere.\n"
    )


@FULL
@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_a_full_stderr_changes_nothing(unbuffered, small_demo):
    results = []
    for max_tokens in ("2", "9999"):
        with open("/dev/full", "wb") as full:
            command = [sys.executable, "-m", "tinygpt", "generate", "Once", "--seed", "1", "--model", small_demo]
            command += ["--max-tokens", max_tokens]
            environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
            results.append(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=full, env=environment))
    assert [result.returncode for result in results] == [cli.DONE, cli.USAGE]
    assert results[0].stdout.strip()
