"""On which node's memory each page of the weights comes to lie, and how large pages are."""

import mmap
import os
import string
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tinygpt.kernels.cpu.packing.packers import takes_huge_pages
from tinygpt.kernels.cpu.packing.weights import weight_layout
from tinygpt.kernels.cpu.runtime import nodes
from tinygpt.kernels.cpu.runtime.nodes import homes_among, place, share_of
from tinygpt.kernels.cpu.simd.memory import untouched

needs_pages = pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="no pages can be looked at here")


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
