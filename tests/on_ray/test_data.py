"""`generate --ray`: the records of one process, by actors; one that is killed costs no prompt. Linux."""

import json
import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="ray, of the extra of that name, is not installed")

from support.paths import ROOT
from support.processes import ray_processes, run_process, until

OF_THE_RUN = ("metrics", "num_cached_tokens")
FLAGS = ["--seed", "5", "--max-num-seqs", "2", "-t", "1"]


@pytest.fixture
def given(tmp_path):
    """40 prompts: ten batches of an actor with two slots."""
    lines = [
        {"id": f"p{i}", "prompt": "The fox said " * (1 + i % 5), "max_tokens": 3 + 7 * i % 11}
        for i in range(40)
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def expected(small_demo, given, tmp_path):
    """What one process writes."""
    path = tmp_path / "alone.jsonl"
    result = run_process("generate", "-m", small_demo, "--input", given, "--output", path, *FLAGS, text=True)
    assert result.returncode == 0, result.stderr
    return records(path)


def records(path):
    """By their ids, in the order of the file, without what depends on which others were there."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    by_id = {record["id"]: {k: v for k, v in record.items() if k not in OF_THE_RUN} for record in found}
    assert len(by_id) == len(found)
    return by_id


def test_actors_write_the_records_of_one_process_in_order_and_go_on(small_demo, given, expected, tmp_path):
    out = tmp_path / "out.jsonl"
    words = ["generate", "-m", small_demo, "--input", given, "--output", out, *FLAGS, "--ray", "2"]
    for answered in (0, 17):
        result = run_process(*words, "--keep-order", text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        assert (f"{answered} of 40 prompts skipped" in result.stderr) == (answered > 0)
        assert records(out) == expected
        assert list(records(out)) == [f"p{i}" for i in range(40)]
        out.write_text("".join(out.read_text(encoding="utf-8").splitlines(True)[:17]), encoding="utf-8")


def test_an_actor_that_is_killed_loses_and_doubles_no_row(small_demo, given, expected, tmp_path):
    out = tmp_path / "out.jsonl"
    words = ["generate", "-m", small_demo, "--input", str(given), "--output", str(out), *FLAGS]
    # Steps as slow as a larger model's, so that there is a middle of the job.
    program = (
        "import os, sys, time; from tinygpt.cli import main; from tinygpt.on_ray import batch; "
        "call = batch.Actor.__call__; "
        "batch.Actor.__call__ = lambda self, rows: (time.sleep(1), call(self, rows))[1]; sys.exit(main.main())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words, "--ray", "2"], env=environment, **pipes
    )
    until(lambda: process.poll() is not None or (out.exists() and b"\n" in out.read_bytes()))
    assert process.poll() is None, process.stderr.read()
    actors = ray_processes(process.pid, "MapWorker(")
    assert len(actors) == 2
    os.kill(actors[0], signal.SIGKILL)
    said, err = process.communicate(timeout=300)
    assert (process.returncode, said) == (0, b""), err  # Ray tells of the actor on stderr alone
    assert records(out) == expected


def test_what_a_cluster_cannot_do_is_one_sentence(small_demo, given):
    environment = {"RAY_ADDRESS": "127.0.0.1:1"}
    words = ["generate", "-m", small_demo, "--input", given, "--ray"]
    result = run_process(*words, env={**os.environ, **environment}, text=True, timeout=300)
    assert result.returncode == 1
    assert "RAY_ADDRESS is '127.0.0.1:1'" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
