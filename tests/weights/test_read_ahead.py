"""Checksums ahead of the reader: each once, in the order of the file, and no more than is soon needed."""

from dataclasses import dataclass, field

import pytest

from tinygpt.errors import CheckpointError
from tinygpt.weights.containers.mapped_file import AHEAD, ReadAhead


@dataclass
class Part:
    name: str
    data: range
    is_damaged: bool = False
    times: list[int] = field(default_factory=list)

    def verify(self):
        self.times.append(1)
        if self.is_damaged:
            raise CheckpointError(self.name)


def parts_of(*sizes):
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [Part(str(i), range(end - size, end)) for i, (size, end) in enumerate(zip(sizes, ends, strict=True))]


def verified(parts, ahead):
    """Those that have been, once all threads are done."""
    for future in ahead._results.values():
        future.exception()
    return [part.name for part in parts if part.times]


def test_a_few_parts_behind_the_one_that_is_read():
    parts = parts_of(*[8] * (AHEAD + 3))
    ahead = ReadAhead(reversed(parts))
    ahead.verify(parts[1])
    assert verified(parts, ahead) == [str(i) for i in range(1, 1 + AHEAD)]
    for part in parts:
        ahead.verify(part)
    assert [len(part.times) for part in parts] == [1] * len(parts)


def test_damage_is_told_to_the_one_who_reads_it():
    parts = parts_of(8, 8)
    parts[1].is_damaged = True
    ahead = ReadAhead(parts)
    ahead.verify(parts[0])
    with pytest.raises(CheckpointError, match="1"):
        ahead.verify(parts[1])
