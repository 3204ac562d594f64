"""Where ranks run: what is slow about it is found, and what is said would mend it."""

import re

import pytest

from tinygpt.parallel.placement import Place, advice


def place(host: str = "a", cores=range(8), threads: int = 1, num_cores: int = 8) -> Place:
    return Place(host, num_cores, frozenset(cores), threads)


@pytest.mark.parametrize(
    ("hosts", "tensor_size", "typed"),
    [
        ("abab", 2, "-hosts a:2,b:2 -n 4"),
        ("abba", 2, "-hosts a:2,b:2 -n 4"),
        ("aabb", 2, None),
        ("abab", 1, None),
        ("abab", 4, None),  # no order has all four on a host
        ("abcabc", 2, "-hosts a:2,b:2,c:2 -n 6"),
        ("aaab", 2, None),  # one of two is whole, and more cannot be
        ("abbc", 2, "-hosts b:2,a:1,c:1 -n 4"),  # which begins with the host that has a whole group
        ("aab", 3, None),
    ],
)
def test_groups_that_need_not_lie_on_several_hosts(hosts, tensor_size, typed):
    found = advice([place(host) for host in hosts], tensor_size)
    assert len(found) == (typed is not None)
    assert not found or found[0].endswith(f": start them with mpiexec {typed}")
    if typed:
        ordered = [host for word in typed.split()[1].split(",") for host in word[0] * int(word[2])]
        assert advice([place(host) for host in ordered], tensor_size) == []


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ([place(), place()], None),
        ([place(threads=4), place(threads=4)], None),
        ([place(threads=4), place(threads=5)], "ranks 0, 1 on a: 9 threads for 8 cores, which is slow: give fewer"),
        ([place(cores=[0]), place(cores=[1])], None),
        ([place(cores=[0]), place(cores=[0])], "ranks 0, 1 on a: 2 threads for 1 core, .* or mpiexec -bind-to none"),
        ([place(cores=[0, 1], threads=2), place(cores=[1], threads=1)], "ranks 0, 1 on a: 3 threads for 2 cores"),
        ([place(cores=[0], threads=2), place(cores=[1, 2, 3])], "rank 0 on a: 2 threads for 1 core, which is slow"),
        ([place(), place("b", cores=[0], threads=2, num_cores=1)], "rank 1 on b: 2 threads for 1 core, .* ranks$"),
    ],
)
def test_threads_that_have_no_cores(places, said):
    found = advice(places, 1)
    assert len(found) == (said is not None)
    if said:
        assert re.match(said, found[0])


def test_this_process_may_use_what_the_system_lets_it(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3, 5}, raising=False)
    found = Place.of_this_process("here", 2)
    assert (found.host, found.cores, found.threads) == ("here", {3, 5}, 2)
    assert found.num_cores >= 1
