"""Two hosts, played by network namespaces of this machine (Linux, as root): between their ranks there is TCP alone.

mpiexec starts the rank of the other host as it would by ssh; in its place a script enters the host's namespace.
"""

import os
import subprocess
import sys

import pytest

from support.golden_models import write_model
from support.paths import ROOT
from tinygpt.ranks.launch import find_mpiexec

pytest.importorskip("mpi4py", reason="ranks are processes of mpi4py, which the extra mpi brings")
MPIEXEC = find_mpiexec()
pytestmark = pytest.mark.slow

FIVE_HEADS = {"n_embd": 320, "n_head": 5, "n_layer": 4, "vocab_size": 101, "n_positions": 90}
NAMES = [f"tinygpt{os.getpid()}n{i}" for i in (1, 2)]
ADDRESSES = ["10.213.77.1", "10.213.77.2"]
ENTER = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec %s${host##*.} /bin/sh -c "$*"
"""
HASH = """
import hashlib, sys
from tinygpt import LLM
with LLM(sys.argv[1], threads=1, tensor_parallel_size=int(sys.argv[2]), pipeline_parallel_size=int(sys.argv[3])) as llm:
    print(hashlib.sha256(llm.logits([i * 7 % 101 for i in range(60)]).tobytes()).hexdigest())
"""


@pytest.fixture(scope="module")
def hosts():
    """Two namespaces with a cable between them; bytes that have come through it to the first."""
    ends = [f"tgv{os.getpid() % 10000}n{i}" for i in (1, 2)]
    commands = [["netns", "add", name] for name in NAMES]
    commands.append(["link", "add", ends[0], "type", "veth", "peer", "name", ends[1]])
    for name, end, address in zip(NAMES, ends, ADDRESSES, strict=True):
        commands.append(["link", "set", end, "netns", name])
        commands.append(["-n", name, "addr", "add", f"{address}/24", "dev", end])
        commands += [["-n", name, "link", "set", device, "up"] for device in (end, "lo")]
    try:
        for command in commands:
            subprocess.run(["ip", *command], check=True, capture_output=True)
        yield lambda: received(NAMES[0], ends[0])
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"there can be no network namespaces here: {error}")
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def received(name: str, device: str) -> int:
    listed = subprocess.check_output(["ip", "netns", "exec", name, "cat", "/proc/net/dev"], text=True)
    line = next(line for line in listed.splitlines() if device in line)
    return int(line.partition(":")[2].split()[0])


@pytest.mark.skipif(MPIEXEC is None, reason="there is no mpiexec, which the extra mpi brings")
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_two_hosts_give_the_bits_of_one_process(tmp_path, hosts, tensor, pipeline):
    model = str(write_model(tmp_path, **FIVE_HEADS))
    enter = tmp_path / "enter"
    enter.write_text(ENTER % NAMES[0][:-1], encoding="utf-8")
    enter.chmod(0o755)
    launcher = ["-launcher", "ssh", "-launcher-exec", str(enter), "-hosts", ",".join(ADDRESSES), "-ppn", "1"]
    front = ["ip", "netns", "exec", NAMES[0], MPIEXEC, *launcher, "-n", "2"]
    before = hosts()
    there = run([*front, sys.executable, "-c", HASH, model, str(tensor), str(pipeline)])
    assert there == run([sys.executable, "-c", HASH, model, "1", "1"])
    # The other rank's part of the sums, or of the logits: 60 tokens.
    floats = 2 * 4 * 60 * 320 + 60 * 50 if tensor == 2 else 60 * 101
    assert hosts() - before >= 4 * floats


def run(command: list[str]) -> str:
    # The hosts are one machine, whose shared memory MPI would find.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "UCX_TLS": "tcp,self"}
    found = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    return found.stdout
