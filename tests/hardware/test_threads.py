"""How many threads: what is given, or the cores of this process, hyper-threads counted once."""

import os

import numpy as np
import pytest

from tinygpt.errors import RequestError
from tinygpt.hardware import threads
from tinygpt.hardware.threads import MAX_THREADS, thread_count


@pytest.mark.parametrize("given", [1, 2, 17, MAX_THREADS])
def test_a_possible_number_is_taken(given):
    assert thread_count(given) == given


@pytest.mark.parametrize(
    "given", [0, -1, MAX_THREADS + 1, True, False, 2.0, "2", "all", [1], float("nan"), np.float32(2)]
)
def test_an_impossible_number_is_refused(given):
    with pytest.raises(RequestError) as caught:
        thread_count(given)
    assert repr(given) in str(caught.value)
    assert f"from 1 to {MAX_THREADS}" in str(caught.value)


def test_default_is_one_for_each_core_that_this_process_may_use():
    assert 1 <= thread_count() == thread_count(None) <= os.cpu_count()


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A system whose cores are told by a table: core -> the text of its siblings' file, or None for no such file."""

    def build(siblings: dict[int, str | None]) -> None:
        def open_file(path):
            text = siblings[int(path.split("/")[5].removeprefix("cpu"))]
            if text is None:
                raise FileNotFoundError(path)
            file = tmp_path / "siblings"
            file.write_text(text)
            return file.open()

        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(siblings), raising=False)
        monkeypatch.setattr(threads, "open", open_file, raising=False)

    return build


def test_hyper_threads_count_once(machine):
    machine({0: "0,4\n", 1: "1,5\n", 4: "0,4\n", 5: "1,5\n"})
    assert thread_count() == 2


def test_only_allowed_cores_count(machine):
    machine({2: "2,6\n", 3: "3,7\n", 7: "3,7\n"})
    assert thread_count() == 2


def test_cores_of_a_system_that_does_not_tell_siblings(machine):
    machine({0: None, 1: None, 2: None})
    assert thread_count() == 3


@pytest.mark.parametrize(("count", "expected"), [(6, 6), (None, 1)])
def test_a_system_without_affinity(monkeypatch, count, expected):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert thread_count() == expected
