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

from support.commands import run_process
from support.paths import ROOT
from support.processes import below

# Without the tokens that clusters share by a file in the home folder, which is nothing of these tests'.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
FLAGS = ["--max-tokens", "5", "--max-num-seqs", "2", "-t", "1"]


@pytest.fixture(scope="module")
def start():
    """Starts a cluster of one host with so many CPUs, in another folder than a command's; gives its address."""
    running = []
    temporary = tempfile.mkdtemp(prefix="tinygpt-ray-")  # a short path: sockets lie there

    def run(num_cpus, *flags, **environment):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        sizes = [f"--num-cpus={num_cpus}", "--object-store-memory=100000000", "--include-dashboard=false"]
        words = ["start", "--head", "--block", f"--port={port}", f"--temp-dir={temporary}", *sizes]
        running.append(
            subprocess.Popen(
                [Path(sys.executable).with_name("ray"), *words, *flags],
                env={**os.environ, **ENVIRONMENT, **environment},
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
    path.write_text('{"prompt": "The fox"}\n' * 9, encoding="utf-8")
    return path


def generate(address, *words, **options):
    env = {**os.environ, **ENVIRONMENT, "RAY_ADDRESS": address}
    return run_process("generate", "--ray", *FLAGS, *words, env=env, text=True, timeout=300, **options)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--workers", "3"], "--workers 3 of --threads 1 need 3 CPUs and {has}, room for 2: give --workers 2."),
        (["-t", "3"], "--workers 1 of --threads 3 need 3 CPUs and {has}, room for 0: give --threads 2 or fewer."),
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
    words = ["-m", "model", "--input", "in.jsonl", "--output", "out.jsonl", "--workers", "2"]
    result = generate(address, *words, cwd=given.parent)
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in (given.parent / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["model"] for record in found] == ["model"] * 9
    first, last = result.stderr.splitlines()
    assert first == "tinygpt: starting Ray"
    assert last.startswith("tinygpt: 9 prompts by 2 workers in ")
    logs = start.temporary / "session_latest" / "logs"
    assert "Starting execution of Dataset" in (logs / "ray-data" / "ray-data.log").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_cluster_that_can_grow_does(start, given, small_demo, tmp_path):
    """Ray's own stand-in for a cloud adds the second host."""
    node = {"node_config": {}, "min_workers": 0}
    head, added = (
        {**node, "resources": {"CPU": 1}, "max_workers": 0},
        {**node, "resources": {"CPU": 4}, "max_workers": 2},
    )
    texts = ("file_mounts", "auth", "docker")
    lists = (
        *("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands", "setup_commands"),
        *("head_setup_commands", "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands"),
    )
    head_id = "f" * 51 + "00000"
    config = {
        "cluster_name": "stand-in",
        "max_workers": 2,
        "provider": {"type": "fake_multinode", "head_node_id": head_id},
        "available_node_types": {"head": head, "added": added},
        "head_node_type": "head",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 5,
        "file_mounts_sync_continuously": False,
        **{name: {} for name in texts},
        **{name: [] for name in lists},
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")  # which YAML contains
    grown = start(
        1,
        f"--autoscaling-config={path}",
        AUTOSCALER_UPDATE_INTERVAL_S="1",
        RAY_FAKE_CLUSTER="1",
        RAY_OVERRIDE_NODE_ID_FOR_TESTING=head_id,
    )
    result = generate(grown, "-m", small_demo, "--input", given, "-t", "2")
    assert result.returncode == 0, result.stderr
    has = f"the Ray cluster at {grown} has 1 on 1 host"
    assert f"1 workers need 2 CPUs and {has}, room for 0: the others wait until it adds hosts" in result.stderr
