"""Where ranks run, and what is slow about that: said once, before anything is computed."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tinygpt.hardware import logical_cores


@dataclass(frozen=True)
class Place:
    """A rank's host and how many cores that has, the numbers of those that the rank may use, and its threads."""

    host: str
    num_cores: int
    cores: frozenset[int]
    threads: int

    @classmethod
    def of_this_process(cls, host: str, threads: int) -> "Place":
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = frozenset(os.sched_getaffinity(0) if has_affinity else range(logical_cores()))
        return cls(host, os.cpu_count() or len(cores), cores, threads)


def advice(places: Sequence[Place], tensor_size: int) -> list[str]:
    """What could be faster, a sentence each. places: by rank."""
    hosts = [place.host for place in places]
    crowded = (_crowded(host, places) for host in dict.fromkeys(hosts))
    return list(filter(None, [_torn(hosts, tensor_size), *crowded]))


def _torn(hosts: list[str], tensor_size: int) -> str | None:
    """Where other orders of the hosts leave more groups whole: neighbours share layers, and send one another most."""
    counts = Counter(hosts)  # in the order in which they come
    orders = [list(counts), sorted(counts, key=lambda host: counts[host] % tensor_size)]
    ordered = max(orders, key=lambda order: _whole([host for host in order for _ in range(counts[host])], tensor_size))
    best = [host for host in ordered for _ in range(counts[host])]
    if _whole(hosts, tensor_size) >= _whole(best, tensor_size):
        return None
    listed = ",".join(f"{host}:{counts[host]}" for host in ordered)
    return (
        f"ranks that share layers lie on several hosts and need not, which is slow ({', '.join(hosts)}): start them "
        f"with mpiexec -hosts {listed} -n {len(hosts)}"
    )


def _whole(hosts: list[str], tensor_size: int) -> int:
    """Groups that lie on one host."""
    return sum(len(set(hosts[i : i + tensor_size])) == 1 for i in range(0, len(hosts), tensor_size))


def _crowded(host: str, places: Sequence[Place]) -> str | None:
    """Where ranks of a host have fewer cores than threads: they wait busily, for one another."""
    here = {rank: place for rank, place in enumerate(places) if place.host == host}
    everywhere = frozenset().union(*(place.cores for place in here.values()))
    for cores in sorted({everywhere, *(place.cores for place in here.values())}, key=len, reverse=True):
        ranks = [rank for rank, place in here.items() if place.cores <= cores]
        threads = sum(here[rank].threads for rank in ranks)
        if threads > len(cores):
            fewer = "fewer threads or ranks" if threads > len(ranks) else "fewer ranks"
            unbind = ", or mpiexec -bind-to none" * (threads <= here[ranks[0]].num_cores)
            return (
                f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))} on {host}: {threads} threads "
                f"for {len(cores)} {'cores' if len(cores) > 1 else 'core'}, which is slow: give "
                f"{fewer}{unbind}"
            )
    return None
