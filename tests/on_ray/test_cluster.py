"""`generate --ray` on a cluster that others have started: its room, its folders, its logs. Linux."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray, of the extra of that name, is not installed")

from support.paths import ROOT
from support.processes import below, run_process

# Without the tokens that clusters share by a file in the home folder, which is nothing of these tests'.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
FLAGS = ["--max-tokens", "5", "--max-num-seqs", "2", "-t", "1"]


@pytest.fixture(scope="module")
def start():
    """Starts a cluster of one host with so many CPUs, in another folder than a command's; gives its address."""
    running = []
    temporary = tempfile.mkdtemp(prefix="tinygpt-ray-")  # a short path: sockets lie there

    def run(num_cpus):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        sizes = [f"--num-cpus={num_cpus}", "--object-store-memory=100000000", "--include-dashboard=false"]
        command = [
            Path(sys.executable).with_name("ray"),
            "start",
            "--head",
            "--block",
            f"--port={port}",
            *sizes,
        ]
        options = {"env": {**os.environ, **ENVIRONMENT}, "cwd": "/", "stdout": subprocess.PIPE, "text": True}
        running.append(subprocess.Popen([*command, f"--temp-dir={temporary}"], **options))
        for line in running[-1].stdout:
            if found := re.search(r"--address='([\w.]+:\d+)'", line):
                return found[1]
        raise AssertionError("Ray has not started")

    run.temporary = Path(temporary)
    yield run
    for process in running:
        for pid in (process.pid, *below(process.pid)):  # SIGTERM would wait until its jobs are forgotten
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    shutil.rmtree(temporary, ignore_errors=True)


@pytest.fixture(scope="module")
def address(start):
    """A cluster of two CPUs."""
    return start(2)


@pytest.fixture
def given(tmp_path):
    path = tmp_path / "in.jsonl"
    fails = {"id": "lost", "prompt": "The", "allowed_token_ids": [11], "no_repeat_ngram_size": 1}
    path.write_text('{"prompt": "The fox"}\n' * 9 + json.dumps(fails) + "\n", encoding="utf-8")
    return path


def generate(address, *words, **options):
    env = {**os.environ, **ENVIRONMENT, "RAY_ADDRESS": address}
    return run_process("generate", "--ray", *FLAGS, *words, env=env, text=True, timeout=300, **options)


def test_actors_without_room_are_refused(address, given):
    result = generate(address, "--input", given, "-t", "3")
    has = f"the Ray cluster at {address} has 2 CPUs on 1 host, room for 0 actors"
    assert result.returncode == 2
    said = [
        line for line in result.stderr.splitlines() if line.startswith("tinygpt") and "slower" not in line
    ]
    assert said == ["tinygpt: starting Ray", f"tinygpt: error: --threads is 3 and {has}: give fewer threads."]


def test_actors_that_just_fit_find_files_that_are_named_from_the_commands_folder(
    start, address, given, small_demo
):
    shutil.copytree(small_demo, given.parent / "model")
    words = ["-m", "model", "--input", "in.jsonl", "--output", "out.jsonl", "--ray", "2"]
    result = generate(address, *words, cwd=given.parent)
    assert result.returncode == 1, result.stderr
    found = [
        json.loads(line) for line in (given.parent / "out.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [record["model"] for record in found] == ["model"] * 10
    assert [record["id"] for record in found if "error" in record] == ["lost"]
    first, done, failed = (line for line in result.stderr.splitlines() if line.startswith("tinygpt"))
    assert first == "tinygpt: starting Ray"
    assert done.startswith("tinygpt: 10 prompts by 2 actors in ")
    assert failed.startswith("tinygpt: error: 1 of 10 prompts failed")
    logs = start.temporary / "session_latest" / "logs"
    assert "Starting execution of Dataset" in (logs / "ray-data" / "ray-data.log").read_text(encoding="utf-8")
