"""The slots of the KV cache by themselves: taken, given back, kept and forgotten."""

import pytest

from tinygpt.engine.scheduler import SINGLE_USE_IDS, SlotTable
from tinygpt.engine.sequence import common_prefix


def kept(slots: SlotTable, cache_salt: str | None = None) -> list[list[int]]:
    """What is kept, the least recently used first."""
    return [token_ids for _, token_ids in slots.kept(cache_salt)]


def take_all(slots: SlotTable, *prompts: list[int]) -> list[int]:
    return [slots.take(prompt, None)[0] for prompt in prompts]


def test_slots_are_taken_in_order_and_the_last_given_back_is_next():
    slots = SlotTable(3, 0)
    assert (slots.num_free, take_all(slots, [1], [2], [3]), slots.num_free) == (3, [0, 1, 2], 0)
    slots.release(1, [2], None)
    assert (slots.num_free, kept(slots), slots.take([2, 3], None)) == (1, [], (1, 0))


def test_a_prompt_that_goes_on_takes_the_kept_slot():
    slots = SlotTable(2, 2)
    a, b = take_all(slots, [1, 2], [5])
    slots.release(a, [1, 2, 3], None)
    slots.release(b, [1, 9], None)
    assert slots.take([1, 2, 3, 4], None) == (a, 3)
    assert (kept(slots), slots.num_free) == ([[1, 9]], 1)


@pytest.mark.parametrize("prompt", [[1, 2, 3], [1, 2], [1, 2, 4, 5], [7]])
def test_any_other_prompt_takes_an_empty_row_and_nothing_is_lost(prompt):
    slots = SlotTable(2, 1)
    slots.release(slots.take([1], None)[0], [1, 2, 3], None)
    slot, num_held = slots.take(prompt, None)
    assert (slot, num_held, kept(slots)) == (1, 0, [[1, 2, 3]])


def test_the_least_recently_used_goes_first():
    slots = SlotTable(4, 2)
    a, b, c = take_all(slots, [1], [2], [3])
    slots.release(a, [1, 1], None)
    slots.release(b, [2, 2], None)
    slots.touch(a)
    slots.release(c, [3, 3], None)
    assert kept(slots) == [[1, 1], [3, 3]]
    assert slots.num_free == 4


def test_what_another_row_covers_is_not_kept_twice():
    slots = SlotTable(4, 3)
    a, b, c, d = take_all(slots, [1], [1], [1], [9])
    slots.release(d, [9], None)
    slots.release(a, [1, 2], None)
    slots.release(b, [1, 2, 3], None)  # all of the slot before, and more
    assert kept(slots) == [[9], [1, 2, 3]]
    slots.touch(d)
    slots.release(c, [1, 2, 3], None)
    assert kept(slots) == [[9], [1, 2, 3]]  # and the slot that holds it has been of use
    assert slots.num_free == 4


def test_each_cache_salt_has_slots_of_its_own():
    slots = SlotTable(4, 3)
    a, b, c = take_all(slots, [1], [1], [1])
    slots.release(a, [1, 2], "red")
    slots.release(b, [1, 2, 3], "blue")  # covers nothing of another salt, and is not covered by it
    slots.release(c, [1, 2], None)
    assert [kept(slots, salt) for salt in ("red", "blue", None, "green")] == [[[1, 2]], [[1, 2, 3]], [[1, 2]], []]
    assert [slots.find([1, 2, 3, 4], salt) for salt in ("red", "blue", "green")] == [(2, a), (3, b), (0, None)]
    assert slots.take([1, 2, 3, 4], "green") == (3, 0)
    assert slots.take([1, 2, 3, 4], "red") == (a, 2)


def test_the_least_recently_used_goes_first_whatever_its_salt():
    slots = SlotTable(3, 2)
    for slot, salt in zip(take_all(slots, [1], [1], [1]), ("red", None, "blue"), strict=True):
        slots.release(slot, [1, 2], salt)
    assert [kept(slots, salt) for salt in ("red", None, "blue")] == [[], [[1, 2]], [[1, 2]]]


def test_of_the_kept_slots_the_one_that_holds_most_is_found():
    slots = SlotTable(3, 3)
    a, b, c = take_all(slots, [1], [1], [2])
    slots.release(a, [1, 2, 9], None)
    slots.release(b, [1, 2, 3, 9], None)
    slots.release(c, [2], None)
    assert [slots.find(token_ids, None) for token_ids in ([1, 2, 3], [1, 2, 9], [2, 3])] == [(3, b), (3, a), (1, c)]


def test_what_is_put_is_in_the_slot_that_was_written():
    slots, written = SlotTable(3, 2), []
    for token_ids in ([1, 2], [3, 4], [5, 6]):  # the third takes the place of the first
        slots.put(token_ids, None, written.append)
        assert slots.take([*token_ids, 9], None) == (written[-1], 2)
        slots.release(written[-1], token_ids, None)
    assert (kept(slots), slots.num_free) == ([[3, 4], [5, 6]], 3)


@pytest.mark.parametrize("token_ids", [[], [SINGLE_USE_IDS, 5]])
def test_a_row_of_no_use_is_empty(token_ids):
    slots = SlotTable(1, 1)
    slots.release(slots.take([1], None)[0], token_ids, None)
    assert (kept(slots), slots.num_free) == ([], 1)


@pytest.mark.parametrize(
    ("a", "b", "count"),
    [([], [], 0), ([1], [], 0), ([1], [2], 0), ([1, 2], [1], 1), ([1], [1, 2], 1), ([1, 2, 3], [1, 2, 4], 2)],
)
def test_common_prefix(a, b, count):
    assert common_prefix(a, b) == count
