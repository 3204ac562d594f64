"""Models on several memory nodes: the same bits, with weights that lie with the threads that read them."""

import os
import threading
import time

import numpy as np
import pytest

from support.golden_models import write_model
from support.kernel_tools import same_bits
from support.memory_nodes import tell_cpus
from tinygpt.cli import main as cli
from tinygpt.execution.model_source import ModelSource
from tinygpt.kernels import cpu
from tinygpt.kernels.batch import Batch
from tinygpt.kernels.cpu.packed import arrays_of
from tinygpt.kernels.cpu.packing import packers
from tinygpt.kernels.cpu.params import part_of
from tinygpt.kernels.cpu.rank import load_part
from tinygpt.kernels.cpu.runtime import nodes, team_threads
from tinygpt.kernels.cpu.runtime.nodes import place
from tinygpt.kernels.cpu.runtime.team_threads import TeamThreads
from tinygpt.weights.config import ModelConfig
from tinygpt.weights.random_checkpoint import random_checkpoint

CONFIG = ModelConfig(vocab_size=333, n_positions=96, n_embd=256, n_layer=2, n_head=4)
THREADS = 5
needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no threads can be bound here")


@pytest.fixture
def placed(monkeypatch) -> list[np.ndarray]:
    """What `place` is called with."""
    found = []

    def note(array, homes):
        found.append(array)
        place(array, homes)

    monkeypatch.setattr(packers, "place", note)
    return found


def is_placed(array: np.ndarray, placed: list[np.ndarray]) -> bool:
    return any(array.ctypes.data == other.ctypes.data and array.nbytes == other.nbytes for other in placed)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_many_threads_on_nodes_pack_what_one_packs(machine, bound, placed, dtype):
    checkpoint = random_checkpoint("two layers", CONFIG)
    expected = arrays_of(cpu.load_params(checkpoint, dtype, 1))
    assert not placed
    machine(range(4), range(4, 8))
    found = arrays_of(cpu.load_params(checkpoint, dtype, THREADS))
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_array_equal(array, expected[name], name)
        assert is_placed(array, placed) == ("." in name), name


def test_what_a_rank_cuts_out_is_placed(machine, bound, placed):
    checkpoint = random_checkpoint("two layers", CONFIG)
    part = part_of(CONFIG, "int8", range(2), 1, 4)
    expected = load_part(checkpoint, "int8", 1, part)
    machine(range(4), range(4, 8))
    params = load_part(checkpoint, "int8", THREADS, part)
    for name in ("c_attn", "attn_proj", "c_fc", "mlp_proj", "lm_head"):
        mine, theirs = getattr(params, name).weight, getattr(expected, name).weight
        for array, other in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(array, other)
            assert is_placed(array, placed), name


def test_a_converted_model_is_placed(machine, bound, placed, tmp_path, capsys):
    model = write_model(tmp_path, n_embd=64, n_head=1)
    assert cli.main(["convert", str(model), str(tmp_path / "int8"), "--dtype", "int8"]) == 0
    source = ModelSource.open(str(tmp_path / "int8"))
    expected = arrays_of(source.load_params(1))
    assert not placed
    machine(range(4), range(4, 8))
    for name, array in arrays_of(source.load_params(THREADS)).items():
        np.testing.assert_array_equal(array, expected[name])
        assert is_placed(array, placed) == ("." in name), name


def test_followers_stay_on_their_nodes_and_the_caller_on_none(machine, bound, monkeypatch):
    machine(range(4), range(4, 8))
    done = threading.Barrier(THREADS)
    stay_on = team_threads.stay_on
    monkeypatch.setattr(team_threads, "stay_on", lambda home: (stay_on(home), done.wait(60)))
    team = TeamThreads(THREADS, np.zeros((THREADS, 16), np.float32))
    done.wait(60)
    team.close()
    assert [min(cpus) for _, cpus in sorted(bound, key=lambda each: min(each[1]))] == [0, 0, 4, 4]
    assert threading.get_ident() not in dict(bound)


def test_where_binding_is_not_allowed_all_goes_on(machine, monkeypatch):
    machine(range(4), range(4, 8))

    def refuse(thread, cpus):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    checkpoint = random_checkpoint("two layers", CONFIG)
    same_bits(logits_of(checkpoint, 2), logits_of(checkpoint, 1))


@needs_affinity
def test_a_step_of_bound_threads_gives_the_same_bits(monkeypatch, tmp_path):
    """Two CPUs of this machine as nodes: threads are truly bound."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) == 1:
        pytest.skip("this process may use one CPU")
    for node, number in enumerate(cpus[:2]):
        tell_cpus(tmp_path, node, [number])
    checkpoint = random_checkpoint("two layers", CONFIG)
    expected = logits_of(checkpoint, THREADS)
    monkeypatch.setattr(nodes, "ROOT", tmp_path)
    same_bits(logits_of(checkpoint, THREADS, [[cpus[0]]] * 2 + [[cpus[1]]] * 2), expected)
    assert sorted(os.sched_getaffinity(0)) == cpus


def logits_of(checkpoint, threads: int, places: list[list[int]] | None = None) -> np.ndarray:
    """Of a prompt and a token behind it. places: the CPUs of each follower, in order."""
    params, cache = cpu.load_params(checkpoint, "int8", threads), cpu.new_kv_cache(CONFIG, 1, 96, "bfloat16")
    before = {*threading.enumerate()}
    workspace = cpu.new_workspace(CONFIG, 50, 1, threads, "int8")
    followers = {*threading.enumerate()} - before
    cpu.forward(params, Batch.of([list(range(50))], [0], [0]), cache, workspace)
    logits = cpu.forward(params, Batch.of([[7]], [50], [0]), cache, workspace).copy()
    if places is not None:
        wait_until(lambda: sorted(map(cpus_of, followers)) == places)
    workspace.team.close()
    return logits


def cpus_of(thread: threading.Thread) -> list[int]:
    return sorted(os.sched_getaffinity(thread.native_id))


def wait_until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)
