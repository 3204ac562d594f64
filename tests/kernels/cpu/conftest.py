"""What tests of the CPU's kernels share."""

import os
import threading
from collections.abc import Iterable

import pytest

from support.memory_nodes import tell_cpus
from tinygpt.kernels.cpu.runtime import nodes


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


@pytest.fixture
def bound(monkeypatch) -> list[tuple[int, set[int]]]:
    """Which threads were bound to which CPUs, in place of binding them."""
    found = []
    bind = lambda thread, cpus: found.append((threading.get_ident(), cpus))  # noqa: E731
    monkeypatch.setattr(os, "sched_setaffinity", bind, raising=False)
    return found
