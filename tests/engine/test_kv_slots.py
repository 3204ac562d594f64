"""The rows of the KV cache by themselves: taken, given back, kept and forgotten."""

import pytest

from tinygpt.engine.kv_slots import SINGLE_USE_IDS, RowTable, common_prefix


def kept(rows: RowTable) -> list[list[int]]:
    """What is kept, the least recently used first."""
    return [token_ids for _, token_ids in rows.kept]


def take_all(rows: RowTable, *prompts: list[int]) -> list[int]:
    return [rows.take(prompt)[0] for prompt in prompts]


def test_rows_are_taken_in_order_and_the_last_given_back_is_next():
    rows = RowTable(3, 0)
    assert (rows.num_free, take_all(rows, [1], [2], [3]), rows.num_free) == (3, [0, 1, 2], 0)
    rows.release(1, [2])
    assert (rows.num_free, kept(rows), rows.take([2, 3])) == (1, [], (1, 0))


def test_a_prompt_that_goes_on_takes_the_kept_row():
    rows = RowTable(2, 2)
    a, b = take_all(rows, [1, 2], [5])
    rows.release(a, [1, 2, 3])
    rows.release(b, [1, 9])
    assert rows.take([1, 2, 3, 4]) == (a, 3)
    assert (kept(rows), rows.num_free) == ([[1, 9]], 1)


@pytest.mark.parametrize("prompt", [[1, 2, 3], [1, 2], [1, 2, 4, 5], [7]])
def test_any_other_prompt_takes_an_empty_row_and_nothing_is_lost(prompt):
    rows = RowTable(2, 1)
    rows.release(rows.take([1])[0], [1, 2, 3])
    row, num_held = rows.take(prompt)
    assert (row, num_held, kept(rows)) == (1, 0, [[1, 2, 3]])


def test_the_least_recently_used_goes_first():
    rows = RowTable(4, 2)
    a, b, c = take_all(rows, [1], [2], [3])
    rows.release(a, [1, 1])
    rows.release(b, [2, 2])
    rows.touch(a)
    rows.release(c, [3, 3])
    assert kept(rows) == [[1, 1], [3, 3]]
    assert rows.num_free == 4


def test_what_another_row_covers_is_not_kept_twice():
    rows = RowTable(4, 3)
    a, b, c, d = take_all(rows, [1], [1], [1], [9])
    rows.release(d, [9])
    rows.release(a, [1, 2])
    rows.release(b, [1, 2, 3])  # all of the row before, and more
    assert kept(rows) == [[9], [1, 2, 3]]
    rows.touch(d)
    rows.release(c, [1, 2, 3])
    assert kept(rows) == [[9], [1, 2, 3]]  # and the row that holds it has been of use
    assert rows.num_free == 4


@pytest.mark.parametrize("token_ids", [[], [SINGLE_USE_IDS, 5]])
def test_a_row_of_no_use_is_empty(token_ids):
    rows = RowTable(1, 1)
    rows.release(rows.take([1])[0], token_ids)
    assert (kept(rows), rows.num_free) == ([], 1)


@pytest.mark.parametrize(
    ("a", "b", "count"),
    [([], [], 0), ([1], [], 0), ([1], [2], 0), ([1, 2], [1], 1), ([1], [1, 2], 1), ([1, 2, 3], [1, 2, 4], 2)],
)
def test_common_prefix(a, b, count):
    assert common_prefix(a, b) == count
