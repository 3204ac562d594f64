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
from argparse import Namespace
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray, of the extra of that name, is not installed")

from ray.autoscaler.v2 import utils as autoscaler
from ray.experimental import internal_kv

from support.commands import run_process
from support.paths import ROOT
from support.processes import below
from tinygpt.cli.batch import Earlier, RecordFile
from tinygpt.errors import RequestError
from tinygpt.on_ray import ray_actors, ray_cluster
from tinygpt.on_ray.ray_actors import Setup

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
        words = ["start", "--head", "--block", f"--port={port}", f"--temp-dir={temporary}", *sizes]
        running.append(
            subprocess.Popen(
                [Path(sys.executable).with_name("ray"), *words],
                env={**os.environ, **ENVIRONMENT},
                cwd="/",
                stdout=subprocess.PIPE,
                text=True,
            )
        )
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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ray", "3"], "--ray 3 of --threads 1 need 3 CPUs and {has}, room for 2: give --ray 2."),
        (["-t", "3"], "--ray 1 of --threads 3 need 3 CPUs and {has}, room for 0: give --threads 2 or fewer."),
    ],
)
def test_actors_without_room_are_refused(address, given, flags, said):
    result = generate(address, "--input", given, *flags)
    has = f"the Ray cluster at {address} has 2 on 1 host"
    assert result.returncode == 2
    first, last = [line for line in result.stderr.splitlines() if "more threads than cores" not in line]
    assert first == "tinygpt: starting Ray"
    assert last == f"tinygpt: error: {said.format(has=has)}"


def test_actors_that_just_fit_find_files_that_are_named_from_the_commands_folder(start, address, given, small_demo):
    """And nothing of Ray's is on stderr, but in its logs."""
    shutil.copytree(small_demo, given.parent / "model")
    words = ["-m", "model", "--input", "in.jsonl", "--output", "out.jsonl", "--ray", "2"]
    result = generate(address, *words, cwd=given.parent)
    assert result.returncode == 1, result.stderr
    found = [json.loads(line) for line in (given.parent / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["model"] for record in found] == ["model"] * 10
    assert [record["id"] for record in found if "error" in record] == ["lost"]
    first, done, failed = result.stderr.splitlines()
    assert first == "tinygpt: starting Ray"
    assert done.startswith("tinygpt: 10 prompts by 2 actors in ")
    assert failed.startswith("tinygpt: error: 1 of 10 prompts failed")
    logs = start.temporary / "session_latest" / "logs"
    assert "Starting execution of Dataset" in (logs / "ray-data" / "ray-data.log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("types", "is_v2", "is_refused"),
    [(["node_5f"], False, True), ([], False, True), (["head", "cpu_node"], False, False), ([], True, False)],
    ids=["watched", "no monitor", "autoscaler", "autoscaler v2"],
)
def test_a_cluster_that_may_grow_is_waited_for(monkeypatch, capsys, types, is_v2, is_refused):
    """Said by what Ray's monitor keeps, as clusters with and without an autoscaler have shown it."""
    status = {"autoscaler_report": {"node_type_mapping": {str(i): name for i, name in enumerate(types)}}}
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda key: json.dumps(status).encode() if types else None)
    monkeypatch.setattr(autoscaler, "is_autoscaler_v2", lambda fetch_from_server: is_v2)
    hosts = [{"Alive": alive, "Resources": {"CPU": cpus}} for alive, cpus in ((True, 5.0), (True, 1.0), (False, 64.0))]
    cluster = Namespace(nodes=lambda: [*hosts, {"Alive": True, "Resources": {}}])
    with pytest.raises(RequestError) if is_refused else nullcontext() as refused:
        ray_cluster._check_room(cluster, "here:1", 3, 2)
    has = "the Ray cluster at here:1 has 6 on 3 hosts, room for 2"
    if is_refused:
        assert str(refused.value) == f"--ray 3 of --threads 2 need 6 CPUs and {has}: give --ray 2."
    else:
        assert f"3 actors need 6 CPUs and {has}: the others wait until it adds hosts" in capsys.readouterr().err


def test_cpus_that_others_have_are_waited_for(capsys):
    cluster = Namespace(
        nodes=lambda: [{"Alive": True, "Resources": {"CPU": 8.0}}], available_resources=lambda: {"CPU": 3.0}
    )
    ray_cluster._check_room(cluster, "here:1", 2, 2)
    said = "2 actors need 4 CPUs and the Ray cluster at here:1 has 8 on 1 host, 3 of them free: some wait until others"
    assert said in capsys.readouterr().err


def test_the_cluster_is_there_before_anything_is_asked_of_it(monkeypatch):
    """A progress bar keeps the stderr that it finds, and within `joined` that is another one."""
    entered = []

    @contextmanager
    def joined(*_):
        entered.append(True)
        yield
        entered.append(False)

    monkeypatch.setattr(ray_actors, "joined", joined)
    setup = Setup({"threads": 1, "max_num_seqs": 2}, "demo")
    with ray_actors.answers_on_ray(1, setup, []):
        assert entered == [True]
    assert entered == [True, False]


def test_what_ray_prints_is_not_among_the_records(tmp_path, capsys):
    """The choice of where records go comes before `joined`."""
    with RecordFile(None, Earlier()) as file, ray_cluster._said_in(tmp_path / "log"):
        print("(raylet) Task failed")
        file.write("{}")
    assert capsys.readouterr().out == "{}\n"
    assert (tmp_path / "log").read_text() == "(raylet) Task failed\n"
