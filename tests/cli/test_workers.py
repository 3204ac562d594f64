"""`generate --workers`: the records of one process, by several; whoever is killed, each prompt is answered once."""

import collections
import json
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from support import tiny_checkpoint
from support.commands import Result, run_process
from support.moe_models import moe_arrays, write_moe
from support.paths import ROOT
from support.processes import below, is_running, until
from tinygpt.cli.batch import workers as workers_module
from tinygpt.cli.batch.tasks import Answer, Task, check_workers
from tinygpt.cli.batch.workers import answers_of
from tinygpt.errors import RequestError, TinyGPTError
from tinygpt.execution.model_source import ModelSource
from tinygpt.hardware.threads import physical_cores
from tinygpt.request.prompts import Prompt
from tinygpt.sampling_params import SamplingParams

OF_THE_RUN = ("metrics", "num_cached_tokens")
FLAGS = ["--max-tokens", "9", "--seed", "5", "--max-num-seqs", "2", "-t", "1"]


def prompts(folder, count=12):
    path = folder / "prompts.jsonl"
    lengths = [(1 + i % 5, 3 + 7 * i % 11) for i in range(count)]
    lines = [{"id": f"p{i}", "prompt": "The fox said " * n, "max_tokens": new} for i, (n, new) in enumerate(lengths)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def records(path):
    """By their ids, without what depends on which others were there: times, and what a prompt shared with another."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    by_id = {record["id"]: {k: v for k, v in record.items() if k not in OF_THE_RUN} for record in found}
    assert len(by_id) == len(found)
    return by_id


@pytest.mark.parametrize("dtype", ["float32", pytest.param("int8", marks=pytest.mark.slow)])
def test_two_workers_write_the_records_of_one_process(tmp_path, dtype):
    given, alone, together = prompts(tmp_path), tmp_path / "alone.jsonl", tmp_path / "together.jsonl"
    for path, more in ((alone, []), (together, ["--workers", "2"])):
        result = run_process(
            "generate", "--input", given, "--output", path, "--dtype", dtype, *FLAGS, *more, text=True, timeout=600
        )
        assert result.returncode == 0, result.stderr
    assert records(together) == records(alone)
    again = run_process("generate", "--input", given, "--output", together, *FLAGS, "--workers", "2", text=True)
    assert "12 of 12 prompts skipped" in again.stderr


def test_no_more_workers_are_started_than_there_are_prompts(tmp_path, monkeypatch, capsys, small_demo):
    """Rates are of all of them: two texts of 9 tokens, of which the first comes with the prompt."""
    started, start = [], workers_module.Worker.start
    monkeypatch.setattr(workers_module.Worker, "start", lambda setup: started.append(setup) or start(setup))
    given = tmp_path / "in.jsonl"
    given.write_text('{"prompt": [3, 4, 5], "ignore_eos": true}\n{"prompt": [6, 7], "ignore_eos": true}\n')
    result = Result(capsys, "generate", ["-m", small_demo, "--input", str(given), *FLAGS[:-2], "--workers", "40"])
    assert result.code == 0, result.err
    assert [setup.arguments["threads"] for setup in started] == 2 * [max(physical_cores() // 2, 1)]
    rates = "prompt 5 tokens, N tokens/s; generation 16 tokens, N tokens/s"
    last = re.sub(r"\d+\.\d+", "N", result.err.splitlines()[-1])
    assert last == f"tinygpt: 2 prompts by 2 workers in N s: {rates}; seeds in their records"


def test_a_prompt_that_fails_late_has_the_same_record(tmp_path, capsys, small_demo):
    """By one worker, whose others are done."""
    given = prompts(tmp_path)
    fails = {"id": "lost", "prompt": "The", "allowed_token_ids": [11], "no_repeat_ngram_size": 1}
    given.write_text(json.dumps(fails) + "\n" + given.read_text(encoding="utf-8"), encoding="utf-8")
    found = []
    for more in ([], ["--workers", "2"]):
        path = tmp_path / f"{len(more)}.jsonl"
        flags = ["-m", small_demo, "--input", str(given), "--output", str(path), *FLAGS, *more]
        result = Result(capsys, "generate", flags)
        assert result.code == 1
        assert "1 of 13 prompts failed" in result.err
        found.append(records(path))
    assert "leave no token to choose" in found[0]["lost"]["error"]
    assert found[0] == found[1]


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize("flags", [[], ["--workers", "2"]], ids=["alone", "workers"])
def test_sigterm_ends_all_processes_and_keeps_what_is_done(tmp_path, small_demo, flags):
    given, out, temporary = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "tmp"
    temporary.mkdir()
    line = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True}
    given.write_text((json.dumps(line) + "\n") * 5000, encoding="utf-8")
    words = ["generate", "-m", small_demo, "--input", given, "--output", out, "-t", "1", *flags]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tinygpt", *words], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    while not (out.exists() and out.read_bytes().count(b"\n")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    others = below(process.pid)
    assert len(others) >= len(flags)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    said = re.search(rf"tinygpt: terminated: (\d+) of 5000 prompts answered, in {out}; give the same command", err)
    assert 0 <= len(records(out)) - int(said[1]) <= 1  # one may be written, and not yet counted
    until(lambda: not any(map(is_running, others)))
    assert not [*temporary.iterdir()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_share_one_mapped_copy_of_the_weights(tmp_path, monkeypatch, capsys):
    """N x cache + 1 x weights: none has pages of the converted file for itself, nor a copy of it elsewhere."""
    shapes = tiny_checkpoint.shapes_of(n_embd=512, inner_size=16384, n_layer=2, vocab_size=11, n_positions=16)
    plain_folder, converted = tmp_path / "plain", tmp_path / "converted"
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    tiny_checkpoint.write_checkpoint(plain_folder, tensors, n_positions=16, n_embd=512, n_inner=16384, n_layer=2)
    assert Result(capsys, "convert", [str(plain_folder), str(converted), "--dtype", "float32"]).code == 0
    [size] = [path.stat().st_size for path in converted.iterdir() if path.stat().st_size > 2**27]
    given, found, plain = tmp_path / "in.jsonl", [], workers_module.answers_of
    given.write_text('{"prompt": [3, 4, 5], "max_tokens": 5}\n' * 12, encoding="utf-8")

    def looking(workers, tasks, room):
        yield from plain(workers, tasks, room)  # then each has answered some
        found.extend(memory_of(worker.process.pid, converted) for worker in workers)

    monkeypatch.setattr(workers_module, "answers_of", looking)
    result = Result(capsys, "generate", ["-m", str(converted), "--input", str(given), "--workers", "2", *FLAGS])
    assert result.code == 0, result.err
    assert len(found) == 2
    for file, whole in found:
        assert file["Rss"] > 0.9 * size
        assert file["Private_Dirty"] == 0
        assert whole["Anonymous"] < size
    assert sum(file["Pss"] for file, _ in found) <= size


def memory_of(pid, folder):
    """Bytes of a process by their kinds: of the files in the folder that it maps, and of all."""
    file, is_inside = collections.Counter(), False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(":")
        if not line[0].isupper():  # a mapping begins
            is_inside = str(folder) in line
        elif is_inside and rest.endswith(" kB"):
            file[name] += 1024 * int(rest.removesuffix(" kB"))
    rows = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]]
    return file, {name.removesuffix(":"): 1024 * int(count) for name, count, _ in rows}


def test_a_model_that_no_config_json_describes_is_not_shared(tmp_path):
    """It would be taken for a GPT-2."""
    source = ModelSource.open(str(write_moe(tmp_path / "model", moe_arrays())), "float32")
    with pytest.raises(RequestError, match="a Megatron-LM GPT with experts, which --workers cannot share"):
        workers_module.write_shared(source, "model", tmp_path)


class FakeWorker:
    """A worker whose tasks are answered, or that ends, when the test says so."""

    def __init__(self):
        self.tasks, self.given, self.inbox = {}, [], []
        self.connection, self.process = self, self
        self.exitcode = -signal.SIGKILL

    @property
    def cost(self):
        return sum(task.cost for task in self.tasks.values())

    def give(self, task):
        self.tasks[task.index] = task
        self.given.append(task.index)

    def recv(self):
        action = self.inbox.pop(0)
        if action == "end":
            raise EOFError
        return action

    def join(self):
        pass


def tasks_of(*lengths):
    return [Task(i, i, Prompt(None, [1] * length), SamplingParams(max_tokens=1)) for i, length in enumerate(lengths)]


@pytest.fixture
def waiting_on(monkeypatch):
    """Who is ready: those with something in their inbox."""
    monkeypatch.setattr(workers_module, "wait", lambda connections: [c for c in connections if c.inbox])


def test_the_longest_are_begun_first_by_whoever_has_least_to_do(waiting_on):
    one, two = FakeWorker(), FakeWorker()
    answers = answers_of([one, two], tasks_of(5, 50, 20, 21), room=2)
    one.inbox = [Answer(1), Answer(0)]
    two.inbox = [Answer(3), Answer(2)]
    assert sorted(answer.index for answer in answers) == [0, 1, 2, 3]
    assert (one.given, two.given) == ([1, 0], [3, 2])


def test_what_a_killed_worker_had_is_done_by_the_others(waiting_on, capsys):
    one, two = FakeWorker(), FakeWorker()
    answers = answers_of([one, two], tasks_of(5, 50, 20, 21), room=2)
    one.inbox, two.inbox = ["end"], [Answer(3), Answer(2), Answer(1), Answer(0)]
    assert sorted(answer.index for answer in answers) == [0, 1, 2, 3]
    assert sorted(two.given) == [0, 1, 2, 3]
    assert "a worker has ended (exit status -9): 1 other will do its 2 prompts" in capsys.readouterr().err


def test_when_all_are_killed_one_sentence_says_so(waiting_on):
    one = FakeWorker()
    one.inbox = ["end"]
    with pytest.raises(TinyGPTError, match="the last worker has ended"):
        list(answers_of([one], tasks_of(5), room=2))


@pytest.mark.parametrize("flags", [[], ["--keep-order"]])
def test_records_are_in_the_order_of_the_prompts_on_request(tmp_path, capsys, small_demo, flags):
    """The first prompt has the longest text."""
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": [5, 6], "max_tokens": new, "ignore_eos": True} for new in (30, 2, 9, 4)]
    given.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    result = Result(capsys, "generate", ["-m", small_demo, "--input", str(given), "--output", str(out), *flags])
    assert result.code == 0, result.err
    assert list(records(out)) == ([1, 2, 3, 4] if flags else [2, 4, 3, 1])


def test_a_worker_that_is_killed_loses_no_prompt(tmp_path, monkeypatch, capsys):
    """A real one, by SIGKILL, once the first answer has come."""
    output, killed = tmp_path / "out.jsonl", []
    plain = workers_module.answers_of

    def killing(workers, tasks, room):
        for answer in plain(workers, tasks, room):
            if not killed:
                killed.append(workers[0].process.pid)
                os.kill(killed[0], signal.SIGKILL)
            yield answer

    monkeypatch.setattr(workers_module, "answers_of", killing)
    flags = ["--input", str(prompts(tmp_path, 40)), "--output", str(output), "--workers", "2", *FLAGS]
    result = Result(capsys, "generate", flags)
    assert result.code == 0, result.err
    assert killed
    assert len(records(output)) == 40


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--workers", "2", "x"], "--workers is for the prompts of a file: give it with --input"),
        (["--ray", "x"], "--ray is for the prompts of a file: give it with --input"),
        (["--workers", "0", "x"], "--workers is 0 and must be a whole number from 1"),
        (["--workers", "2", "--input", "x", "--device", "reference"], "--workers is for processes of the CPU"),
    ],
)
def test_what_is_impossible_is_refused(capsys, flags, said):
    result = Result(capsys, "generate", flags)
    assert result.code == 2
    assert said in result.err


@pytest.mark.parametrize(("workers", "ray", "flag"), [(2, False, "--workers"), (1, True, "--ray")])
def test_a_model_on_several_ranks_has_no_workers(workers, ray, flag):
    """Asked by themselves: as a command, these flags would start ranks."""
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    with pytest.raises(RequestError, match=f"workers have a model each: omit {flag}, or --tensor-parallel"):
        check_workers(Namespace(workers=workers, ray=ray, input="x", device="cpu", **sizes))


def test_lines_that_cannot_be_used_are_listed_before_any_work(tmp_path, capsys):
    given = tmp_path / "prompts.jsonl"
    given.write_text('{"prompt": "x", "max_tokens": 9999}\n{"prompt": [99999]}\n', encoding="utf-8")
    result = Result(capsys, "generate", ["--input", str(given), "--workers", "2"])
    assert result.code == 2
    assert "2 lines of" in result.err
