"""Shrinks what damages a file to what matters: fewer mutations, then fewer bytes that differ."""

from collections.abc import Callable
from dataclasses import replace

from .cases import Case, Input

TRIES = 200


def fewer_mutations(case: Case, is_same: Callable[[Case], bool]) -> Case:
    """Mutations left out one by one, as long as the finding stays."""
    for mutation in case.mutations:
        shorter = replace(case, mutations=tuple(kept for kept in case.mutations if kept is not mutation))
        if shorter.mutations and is_same(shorter):
            case = shorter
    return case


def fewer_bytes(given: Input, undamaged: bytes, is_same: Callable[[Input], bool]) -> Input:
    """What differs from the undamaged file, put right in ever smaller pieces, as long as the finding stays."""
    tries = TRIES
    head, tail = _common(undamaged, given.data)
    size = max(len(given.data) - head - tail, 1)
    while size and tries:
        place = head
        while place < len(given.data) - tail and tries:
            for data in _without(given.data, undamaged, place, size):
                tries -= 1
                if data != given.data and is_same(replace(given, data=data)):
                    given = replace(given, data=data)
                    break
            else:
                place += size
        size //= 2
    return given


def _without(data: bytes, undamaged: bytes, place: int, size: int) -> list[bytes]:
    """A piece as it was, where lengths are equal, or left out."""
    if len(data) == len(undamaged):
        return [data[:place] + undamaged[place : place + size] + data[place + size :]]
    return [data[:place] + data[place + size :]]


def _common(one: bytes, other: bytes) -> tuple[int, int]:
    """How many bytes are equal at the beginning and, of the rest, at the end."""
    most = min(len(one), len(other))
    head = next((i for i in range(most) if one[i] != other[i]), most)
    tail = next((i for i in range(most - head) if one[-1 - i] != other[-1 - i]), most - head)
    return head, tail
