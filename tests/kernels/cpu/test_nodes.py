"""Memory nodes: how many there are, whose each thread is, and which items of a phase a thread has."""

import os

import numpy as np
import pytest

from tinygpt.kernels.cpu.jit import jit
from tinygpt.kernels.cpu.runtime.nodes import homes_among, homes_of_threads, memory_nodes, share_of
from tinygpt.kernels.cpu.runtime.team import OPEN, PHASE, claim, complete, new_teams

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


# Which items are whose.


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
