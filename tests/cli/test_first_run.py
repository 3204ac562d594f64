"""What `generate` says where kernels compile, where they are kept, and which threads it sets."""

import errno
import gc
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import weakref
from functools import partial

import pytest

from support.commands import Result
from support.processes import until
from support.recorded import needs_transformers
from tinygpt.cli import loading
from tinygpt.cli import main as cli
from tinygpt.cli.output import compile_notice
from tinygpt.cli.output.compile_notice import compiling_shown
from tinygpt.cli.output.messages import SCREEN, elapsed, put, say
from tinygpt.kernels import cpu as kernels
from tinygpt.kernels.compiling import ANNOUNCER, begin_wait, end_wait
from tinygpt.kernels.cpu import jit
from tinygpt.kernels.kernel_files import KernelFiles

pytestmark = pytest.mark.usefixtures("llm")  # its kernels are compiled: stderr is free of the notice of a first run


ONE_KERNEL = re.compile(
    r"tinygpt: compiling kernels for this machine \(some 10 s, once for each dtype and kind of request\)\n.*"
    r"tinygpt: 1 kernel compiled in [\d.]+ s, which no other figure contains\n",
    re.DOTALL,
)


def compile_a_kernel() -> None:
    """One that no file keeps, as it is a closure."""
    number = 1
    jit.jit(lambda x: x + number)(1)


def compiling(function):
    return lambda *arguments: compile_a_kernel() or function(*arguments)


def test_the_next_run_has_what_this_one_keeps(capsys, tmp_path):
    """Of three kernels that compile all, or less, or none as no folder can be written to."""

    def compiled(files: KernelFiles, num_saved: int) -> str:
        with compiling_shown():
            for number in range(3):
                ANNOUNCER.begin("one")
                ANNOUNCER.end()
                if number < num_saved:
                    files.save(f"{number}.kernel", b"code")
        return capsys.readouterr().err.splitlines()[-1]

    (tmp_path / "file").write_text("")
    kept = "contains; the next run has them"
    assert compiled(KernelFiles(tmp_path), 3).endswith(kept)
    assert compiled(KernelFiles(tmp_path / "file", lambda is_made: tmp_path), 3).endswith(kept)  # a spare folder
    for files, num_saved in ((KernelFiles(tmp_path), 2), (KernelFiles(None), 3), (KernelFiles(tmp_path / "file"), 3)):
        assert compiled(files, num_saved).endswith("which no other figure contains")


def test_a_command_without_figures_compares_the_time_with_none(capsys, monkeypatch):
    """There, `convert`; the others are commands that say how fast something was."""
    monkeypatch.setattr(importlib.import_module("tinygpt.cli.commands.convert"), "run", lambda args: compile_a_kernel())
    assert cli.main(["convert", "demo", "new"]) == 0
    assert re.fullmatch(r"tinygpt: 1 kernel compiled in [\d.]+ s", capsys.readouterr().err.splitlines()[-1])


def test_once_is_said_once(capsys):
    """Whatever is written between two kernels, as --debug does."""
    with compiling_shown():
        compile_a_kernel()
        say("something else")
        compile_a_kernel()
    said = capsys.readouterr().err
    assert said.count("compiling kernels for this machine") == 1
    assert "2 kernels compiled" in said


def test_what_takes_long_is_said_now_and_then(monkeypatch):
    """Of kernels that take 15 seconds each, or 45, while a clock goes on between them, which counts for nothing."""
    now, said = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(compile_notice, "say", said.append)
    monkeypatch.setattr(compile_notice, "TICK", 0.001)
    with compiling_shown():
        for seconds, expected in ((15, "("), (15, ": 30.0 s"), (15, ": 30.0 s"), (20, ": 65.0 s"), (45, ": 110.0 s")):
            now[0] += 100
            ANNOUNCER.begin("one")
            now[0] += seconds
            until(lambda expected=expected: expected in said[-1])
            ANNOUNCER.end()
    assert said[:-1] == [
        f"{compile_notice.MESSAGE}{more}"
        for more in (f" ({compile_notice.OUTLOOK})", ": 30.0 s so far", ": 65.0 s so far", ": 110.0 s so far")
    ]
    assert said[-1].startswith("5 kernels compiled in 110.0 s")


@pytest.mark.parametrize("name", ["load_params", "forward", "sample", "process_logits"])
def test_what_compiles_is_said_wherever_it_does(run, monkeypatch, name):
    """As weights are packed, or in the middle of a request."""
    arguments = "Once --seed 7 --max-tokens 1 --repetition-penalty 1.1"
    run(arguments)
    warm = run(arguments)
    assert "compil" not in warm.err
    monkeypatch.setattr(kernels, name, compiling(getattr(kernels, name)))
    cold = run(arguments)
    assert ONE_KERNEL.fullmatch(cold.err)
    assert cold.out == warm.out


@pytest.mark.parametrize(
    "command",
    [
        "eval ppl {text} --max-model-len 16",
        pytest.param("parity demo --input {prompts}", marks=needs_transformers),
    ],
)
def test_what_compiles_in_any_command_is_said(monkeypatch, capsys, tmp_path, command):
    files = {"text": tmp_path / "text", "prompts": tmp_path / "prompts"}
    files["text"].write_text("Once upon a time there was a king.")
    files["prompts"].write_text('{"prompt": "Once", "max_tokens": 1}\n')
    monkeypatch.setattr(kernels, "load_params", compiling(kernels.load_params))
    assert cli.main(command.format(**files).split()) == 0
    said = capsys.readouterr().err
    assert "tinygpt: compiling kernels for this machine" in said
    assert re.search(r"tinygpt: \d kernels? compiled in [\d.]+ s", said)


def test_the_figures_leave_out_what_compiles(run, monkeypatch):
    """Where each pass of the model waits 1000 seconds for a kernel."""
    now, forward, perf_counter = [0.0], kernels.forward, time.perf_counter

    def wait(*step):
        begin_wait()
        now[0] += 1000
        end_wait()
        return forward(*step)

    monkeypatch.setattr(time, "perf_counter", lambda: perf_counter() + now[0])
    monkeypatch.setattr(kernels, "forward", wait)
    monkeypatch.setattr(jit, "cache_is_cold", lambda name: True)
    result = run("Once --seed 7 --max-tokens 8")
    rates = [float(rate) for rate in re.findall(r"([\d.]+) (?:tokens/s|s;)", result.err)]
    assert len(rates) == 3
    assert rates[0] > 0.1  # tokens/s: 1000 seconds would leave 0.0
    assert rates[1] > 0.1
    assert rates[2] < 100  # seconds of loading
    record = json.loads(run("Once --seed 7 --max-tokens 8 --json").out)
    assert record["metrics"]["time_to_finish"] < 100


def test_no_notice_where_nothing_compiles(run, monkeypatch):
    monkeypatch.setattr(jit, "cache_is_cold", lambda name: True)
    assert "compil" not in run("Once --max-tokens 2").err
    assert "compil" not in run("Once --max-tokens 2 --device reference").err
    monkeypatch.setattr(kernels, "forward", compiling(kernels.forward))
    assert "compil" not in run("Once --max-tokens 600").err  # refused before


class Processes:
    """The second processes that runs in this one start, as on a machine with two cores that never compiled."""

    def __init__(self, monkeypatch):
        self.started, self.start = [], subprocess.Popen
        monkeypatch.setattr(jit, "is_first_run", lambda: True)
        monkeypatch.setattr(loading, "thread_count", lambda threads=None: 2)
        monkeypatch.setattr(subprocess, "Popen", self.keep)

    def keep(self, *args, **options) -> subprocess.Popen:
        self.started.append(self.start(*args, **options))
        return self.started[-1]


def test_a_first_run_compiles_a_share_in_a_second_process(run, monkeypatch):
    alone = run("Once --seed 7 --max-tokens 8")
    processes = Processes(monkeypatch)
    monkeypatch.setattr(loading, "PATIENCE", 600)
    assert run("Once --seed 7 --max-tokens 8").out == alone.out
    assert run("Once --temperature 0 --max-tokens 2 --dtype int8").code == 0  # draws nothing
    assert [process.returncode for process in processes.started] == [0]
    assert "compile_draw({'temperature': " in processes.started[0].args[-1]


def test_a_servers_first_run_does_so_too(llm, monkeypatch):
    processes = Processes(monkeypatch)
    monkeypatch.setattr(loading, "PATIENCE", 600)
    with loading.load_llm(cli.build_parser().parse_args(["serve"]), lambda llm: None)[0]:
        assert [process.returncode for process in processes.started] == [0]


def test_a_second_process_that_fails_is_not_missed(monkeypatch, capfd):
    """Nor heard: what it writes would come to this process's stderr."""
    once = partial(Result, capfd, "generate", "Once --seed 7 --max-tokens 8")
    alone = once()
    processes = Processes(monkeypatch)
    monkeypatch.setattr(loading, "COMPILE_SHARE", "import sys; {!r}; {!r}; sys.exit('broken')")
    failed = once()
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    absent = once()
    assert failed.out == absent.out == alone.out
    assert "broken" not in failed.err
    assert [process.returncode for process in processes.started] == [1]


def test_no_second_process_outlives_the_first(run, monkeypatch):
    processes = Processes(monkeypatch)
    monkeypatch.setattr(loading, "COMPILE_SHARE", "import time; {!r}; {!r}; time.sleep(100)")
    assert run("Once --max-tokens 600").code == 2  # refused
    monkeypatch.setattr(loading, "PATIENCE", 0.1)
    assert run("Once --max-tokens 2").code == 0
    assert [process.poll() is None for process in processes.started] == [False, False]


def test_a_mark_that_cannot_be_kept_is_no_error(run, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(jit, "kernel_files", lambda: KernelFiles(tmp_path / "file"))
    assert run("Once --max-tokens 1").code == 0


def test_a_disk_that_takes_no_kernel_is_said_once_and_ends_no_run(run, monkeypatch, tmp_path):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def load_kernels():
        for number in range(3):
            files.save(f"{number}.kernel", b"code")
            assert files.load("damaged.kernel") is None

    pack, files = kernels.load_params, KernelFiles(tmp_path)
    files.save("damaged.kernel", b"code")
    monkeypatch.setattr(tempfile, "mkstemp", full)
    monkeypatch.setattr(kernels, "load_params", lambda *weights: load_kernels() or pack(*weights))
    said = f"tinygpt: compiled kernels cannot be kept in {tmp_path} (No space left on device); this run goes on\n"
    for flags, damage in (("", 0), (" --debug", 1)):
        files.is_keeping = True
        (tmp_path / "damaged.kernel").write_bytes(b"")
        result = run("Once --max-tokens 1" + flags)
        assert result.code == 0
        assert result.err.count(said) == 1
        assert result.err.count(f"tinygpt: {tmp_path / 'damaged.kernel'} is damaged") == damage


def open_terminal(monkeypatch) -> io.StringIO:
    """stdout and stderr, on one terminal."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    return terminal


def lines_of(terminal: io.StringIO) -> list[str]:
    """What is to be seen in the end: what a carriage return goes back to is written over."""
    lines = []
    for line in terminal.getvalue().split("\n"):
        seen = ""
        for part in line.split("\r"):
            seen = part + seen[len(part) :]
        lines.append(seen.rstrip())
    return lines


def test_a_terminal_shows_the_seconds(monkeypatch):
    terminal = open_terminal(monkeypatch)
    with elapsed("waiting"):
        pass
    assert re.fullmatch(r"(\rtinygpt: waiting: [\d.]+ s +)+\n", terminal.getvalue())


def test_a_terminal_shows_the_seconds_until_the_last_kernel_is_done(monkeypatch):
    """In one line, which text takes the place of. The count comes once, when it is known."""
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(compile_notice, "TICK", 0.001)

    def wait_for_seconds() -> None:
        shown = len(terminal.getvalue())
        until(lambda: re.search(r"compiling kernels for this machine: [\d.]+ s", terminal.getvalue()[shown:]))

    with compiling_shown():
        for name in ("one", "two"):
            ANNOUNCER.begin(name)
        wait_for_seconds()
        ANNOUNCER.end()
        wait_for_seconds()
        ANNOUNCER.end()
        put("Once upon", end="")
        put(" a time", end="")
        ANNOUNCER.begin("three")
        wait_for_seconds()
        wait_for_seconds()
        ANNOUNCER.end()
        put(", there was")
    notice, text, more, said, end = lines_of(terminal)
    assert notice == f"tinygpt: compiling kernels for this machine ({compile_notice.OUTLOOK})"
    assert (text, more, end) == ("Once upon a time", ", there was", "")
    assert said.startswith("tinygpt: 3 kernels compiled in ")
    assert re.findall(r"\d+ kernel", terminal.getvalue()) == ["3 kernel"]
    assert max(map(len, re.split("[\r\n]", terminal.getvalue().partition("\n")[2].partition("tinygpt: 3")[0]))) < 80


def test_a_notice_in_the_middle_of_a_text_has_a_line_of_its_own(monkeypatch):
    terminal = open_terminal(monkeypatch)
    with compiling_shown():
        put("Once upon", end="")
        ANNOUNCER.begin("one")
        ANNOUNCER.end()
        put(" a time")
    text, notice, more, *_ = lines_of(terminal)
    assert (text, more) == ("Once upon", " a time")
    assert notice.startswith("tinygpt: compiling kernels")


def test_a_status_gives_way_to_the_kernels_that_compile_meanwhile(monkeypatch):
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(compile_notice, "TICK", 0.001)
    with compiling_shown():
        ANNOUNCER.begin("one")
        SCREEN.show("waiting")
        assert "waiting" not in terminal.getvalue()
        ANNOUNCER.end()
        SCREEN.show("waiting")
    assert "waiting" in terminal.getvalue()


def test_threads_own_every_pool(monkeypatch):
    monkeypatch.delitem(sys.modules, "numba")
    for name in loading.THREAD_POOLS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    loading.set_thread_pools(None)
    pools = {name: os.environ[name] for name in loading.THREAD_POOLS}
    assert pools.pop("OMP_NUM_THREADS") == "3"
    assert set(pools.values()) == {str(loading.thread_count())}
    loading.set_thread_pools(7)
    assert {os.environ[name] for name in loading.THREAD_POOLS} == {"7"}


@pytest.mark.parametrize("given", [None, "26"])
def test_threads_of_openblas_are_quiet_unless_told_otherwise(monkeypatch, given):
    """They would look for work on cores that a start needs."""
    monkeypatch.delitem(sys.modules, "numba")
    monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", "")
    monkeypatch.delenv("OPENBLAS_THREAD_TIMEOUT")
    if given is not None:
        monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", given)
    loading.set_thread_pools(None)
    assert os.environ["OPENBLAS_THREAD_TIMEOUT"] == (given or "4")


def test_a_start_looks_for_no_garbage():
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    kept = [[] for _ in range(1000)]
    with loading.uncollected():
        assert gc.get_threshold()[0] == loading.COLLECT_AFTER > before[0]
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() >= frozen + len(kept)


class Silent:
    def begin(self, name: str) -> None: ...

    def end(self) -> None: ...


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.mark.parametrize("has_compiled", [True, False])
def test_what_compiling_leaves_is_thrown_away_before_all_is_frozen(has_compiled):
    """Once, and by no start that compiles nothing."""
    with ANNOUNCER.told(Silent()), loading.uncollected():
        garbage = weakref.ref(Cycle())
        if has_compiled:
            ANNOUNCER.begin("a kernel")
            ANNOUNCER.end()
        assert garbage() is not None
    assert (garbage() is None) == has_compiled


def test_a_start_that_fails_leaves_the_looking_for_garbage_as_it_was(monkeypatch):
    monkeypatch.setattr(gc, "freeze", lambda: pytest.fail("what is left of it would stay"))
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="no model"), loading.uncollected():
        raise ValueError("no model")
    assert gc.get_threshold() == before
