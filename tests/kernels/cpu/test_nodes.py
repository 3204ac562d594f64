"""Memory nodes: how many there are, whose each thread is, and which thread's node each page of the weights lies on."""

import mmap
import os
import string
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from support.golden_models import write_model
from support.kernel_tools import same_bits
from tinygpt.cli import main as cli
from tinygpt.config import ModelConfig
from tinygpt.execution.batch import Batch
from tinygpt.execution.model_source import ModelSource
from tinygpt.kernels import cpu
from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.packed import arrays_of
from tinygpt.kernels.cpu.packing import packers
from tinygpt.kernels.cpu.packing.packers import takes_huge_pages
from tinygpt.kernels.cpu.packing.weights import weight_layout
from tinygpt.kernels.cpu.params import part_of
from tinygpt.kernels.cpu.rank import load_part
from tinygpt.kernels.cpu.runtime import nodes, team_threads
from tinygpt.kernels.cpu.runtime.nodes import homes_among, homes_of_threads, memory_nodes, place, share_of
from tinygpt.kernels.cpu.runtime.team import OPEN, PHASE, claim, complete, new_teams
from tinygpt.kernels.cpu.runtime.team_threads import TeamThreads
from tinygpt.kernels.cpu.simd.memory import untouched
from tinygpt.weights.random_checkpoint import random_checkpoint

CONFIG = ModelConfig(vocab_size=333, n_positions=96, n_embd=256, n_layer=2, n_head=4)
THREADS = 5
needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no threads can be bound here")
needs_pages = pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="no pages can be looked at here")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A system that tells the CPUs of its nodes, for a process that may use CPUs 0 to 7."""

    def build(*nodes_cpus: Iterable[int]):
        for node, cpus in enumerate(nodes_cpus):
            tell_cpus(tmp_path, node, cpus)
        monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(range(8)), raising=False)
        monkeypatch.setattr(nodes, "ROOT", tmp_path)
        return tmp_path

    return build


def tell_cpus(root: Path, node: int, cpus: Iterable[int]) -> None:
    """As Linux does: an entry for each, beside others."""
    folder = root / f"sys/devices/system/node/node{node}"
    for name in ("cpulist", "cpumap", "memory0", *(f"cpu{number}" for number in cpus)):
        (folder / name).mkdir(parents=True)


@pytest.fixture
def bound(monkeypatch) -> list[tuple[int, set[int]]]:
    """Which threads were bound to which CPUs, in place of binding them."""
    found = []
    bind = lambda thread, cpus: found.append((threading.get_ident(), cpus))  # noqa: E731
    monkeypatch.setattr(os, "sched_setaffinity", bind, raising=False)
    return found


# What nodes there are.


@pytest.mark.parametrize(
    ("told", "allowed", "expected"),
    [
        ([{0, 1, 4, 5}, {2, 3, 6, 7}], range(8), [{0, 1, 4, 5}, {2, 3, 6, 7}]),
        ([{0, 1, 4, 5}, {2, 3, 6, 7}], {1, 2, 3}, [{1}, {2, 3}]),
        ([{0, 1, 4, 5}, {2, 3, 6, 7}], {0, 4}, [{0, 4}]),
        ([range(8), []], range(8), [set(range(8))]),  # memory without a CPU
        ([range(4, 8), range(4)], range(8), [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        ([[cpu] for cpu in range(12)], {1, 2, 10}, [{1}, {2}, {10}]),  # not in the order of their names
        ([], range(8), []),
    ],
)
def test_nodes_are_those_with_cpus_that_may_be_used(machine, told, allowed, expected):
    assert memory_nodes(set(allowed), machine(*told)) == expected


# Whose node each thread is on.


@pytest.mark.parametrize(
    ("cpus", "threads", "expected"),
    [
        ((4, 4), 8, "aaaabbbb"),
        ((4, 4), 2, "ab"),  # spread, though one node has room for both
        ((4, 4), 3, "aab"),
        ((6, 2), 4, "aaab"),
        ((1, 1, 1, 1), 8, "aabbccdd"),
        ((3, 1), 2, "aa"),
    ],
)
def test_neighbours_share_a_node_and_nodes_have_their_part(cpus, threads, expected):
    ends = np.cumsum(cpus)
    there = [set(range(end - count, end)) for count, end in zip(cpus, ends, strict=True)]
    assert "".join("abcd"[there.index(home)] for home in homes_among(there, threads)) == expected


def test_threads_of_one_node_stay_nowhere(machine):
    machine(range(8), range(8, 16))  # of another container
    assert homes_of_threads(4) == []


def test_one_thread_stays_nowhere(machine):
    """It is the caller's own."""
    machine(range(4), range(4, 8))
    assert homes_of_threads(1) == []
    assert homes_of_threads(2) == [{0, 1, 2, 3}, {4, 5, 6, 7}]


def test_a_system_that_binds_no_threads(machine, monkeypatch):
    machine(range(4), range(4, 8))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert homes_of_threads(2) == []


# Which thread touches a page, and which reads it.


@jit
def claim_own(team, items, found):
    """A thread's own share, and no more: found (items of the share,)."""
    for i in range(found.size):
        found[i] = claim(team, items)
        complete(team, items)


@pytest.mark.parametrize("items", [1, 3, 12, 36, 97])
@pytest.mark.parametrize("threads", [1, 2, 7, 16])
def test_shares_are_those_that_the_team_has(items, threads):
    members = new_teams(np.zeros((threads, 16), np.float32))
    for i, member in enumerate(members[1:] + members[:1]):  # not the leader first: nobody is to begin others' shares
        share = share_of((i + 1) % threads, threads, items)
        member.own[PHASE], found = member.board[OPEN], np.empty(len(share), np.int64)
        if share:
            claim_own(member, items, found)
        assert list(found) == list(share)


def state_of_pages(array: np.ndarray) -> np.ndarray:
    """Of each page of an array that begins with one: whether it is there."""
    first, count = array.ctypes.data // mmap.PAGESIZE, -(-array.nbytes // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(first * 8)
        entries = np.frombuffer(pages.read(count * 8), np.uint64)
    return entries >> 63 == 1


@pytest.fixture
def in_turns(monkeypatch):
    """Have threads touch their shares one after another; what `look` has seen when each begins."""
    seen = []

    def begin(look):
        monkeypatch.setattr(nodes, "ThreadPoolExecutor", lambda threads: ThreadPoolExecutor(1))
        monkeypatch.setattr(nodes, "stay_on", lambda home: seen.append((home, look())))
        return seen

    return begin


@needs_pages
@pytest.mark.parametrize(("layers", "items", "pages"), [(3, 12, 2), (2, 7, 4), (1, 3, 1)])
def test_a_page_is_touched_first_on_the_node_of_the_thread_that_has_its_items(in_turns, layers, items, pages):
    """Panels of whole pages, fewer than there are threads, and more."""
    array, threads = untouched((layers, items, pages * mmap.PAGESIZE), np.uint8), 5
    homes = homes_among([{0, 1}, {2, 3}], threads)
    assert not state_of_pages(array).any()
    seen = in_turns(lambda: state_of_pages(array))
    place(array, homes)
    seen.append((None, state_of_pages(array)))
    assert [home for home, _ in seen[:-1]] == homes
    for thread in range(threads):
        (_, before), (_, after) = seen[thread : thread + 2]
        touched = (after & ~before).reshape(layers, items, pages)
        expected = np.zeros_like(touched)
        expected[:, share_of(thread, threads, items)] = True
        np.testing.assert_array_equal(touched, expected)
    assert not array.any()


@needs_pages
def test_panels_that_share_a_page(in_turns):
    """One of the threads that have a part of it touches it."""
    array, threads = untouched((2, 10, 1500), np.uint8), 4
    seen = in_turns(lambda: state_of_pages(array))
    place(array, homes_among([{0}, {1}], threads))
    seen.append((None, state_of_pages(array)))
    for thread, share in enumerate(share_of(thread, threads, 10) for thread in range(threads)):
        touched = np.flatnonzero(seen[thread + 1][1] & ~seen[thread][1])
        own = {
            at // mmap.PAGESIZE
            for layer in range(2)
            for at in range((layer * 10 + share.start) * 1500, (layer * 10 + share.stop) * 1500)
        }
        assert {*touched} <= own
    assert np.count_nonzero(state_of_pages(array)) >= 30000 // mmap.PAGESIZE


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="there are no huge pages here")
@pytest.mark.parametrize(("huge_pages", "asked"), [(False, "nh"), (True, "hg")])
def test_the_size_of_pages_is_asked_for(huge_pages, asked):
    array = untouched((8, 1 << 20), np.uint8, huge_pages)
    flags = next(line for line in lines_about(array) if line.startswith("VmFlags"))
    assert asked in flags.split()


def lines_about(array: np.ndarray) -> list[str]:
    """What Linux tells of the mapping that an array lies in."""
    found, is_there = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[0] in string.hexdigits.lower() and "-" in line.split()[0]:
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            is_there = first <= array.ctypes.data < last
        found += [line] if is_there else []
    return found


@pytest.mark.parametrize(
    ("matrix", "dtype", "count", "expected"),
    [
        ((768, 3072), "float32", 2, False),  # a layer of 124M has 4.7 MB on each of two nodes
        ((50257, 768), "int8", 2, True),  # 19 MB
        ((50257, 768), "int8", 4, True),
        ((50257, 768), "int8", 8, False),
        ((6400, 1600), "float32", 2, True),  # of gpt2-xl, 20 MB
        ((6400, 1600), "int8", 2, False),
    ],
)
def test_pages_of_2_mb_are_for_parts_of_many(matrix, dtype, count, expected):
    shape, kind = weight_layout(dtype, 48, *matrix)[0]
    assert takes_huge_pages(shape, kind, count) == expected


# Models on several nodes.


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
