"""The scheduler without a model: who runs in a step, with how many tokens, in which row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinygpt.sampling_params import SamplingParams
from tinygpt.scheduler import Scheduler
from tinygpt.sequence import Sequence

EOS = 0


def new_sequence(prompt_len: int, max_tokens: int = 3) -> Sequence:
    return Sequence([1] * prompt_len, SamplingParams(max_tokens=max_tokens), 0, 0, frozenset({EOS}), text=None)


def run_step(scheduler: Scheduler, token_id: int = 1) -> list[tuple[Sequence, int]]:
    """What the engine does, with `token_id` for every token drawn; each sequence of the step and its tokens."""
    chunks = scheduler.schedule()
    for chunk in chunks:
        is_sampled = chunk.is_sampled
        chunk.sequence.num_cached += chunk.count
        if is_sampled:
            chunk.sequence.append(token_id)
    scheduler.finish_step()
    return [(chunk.sequence, chunk.count) for chunk in chunks]


def scheduler_of(*sequences: Sequence, rows: int = 4, tokens: int = 100) -> Scheduler:
    scheduler = Scheduler(rows, tokens)
    for sequence in sequences:
        scheduler.add(sequence)
    return scheduler


def test_nothing_to_do():
    assert Scheduler(2, 8).schedule() == []


def test_first_come_first_served_and_each_row_is_used_again():
    a, b, c, d = (new_sequence(2, max_tokens) for max_tokens in (2, 1, 3, 1))
    scheduler = scheduler_of(a, b, c, d, rows=2)
    assert run_step(scheduler) == [(a, 2), (b, 2)]
    assert (a.row, b.row, c.row, b.finish_reason) == (0, None, None, "length")
    assert run_step(scheduler) == [(a, 1), (c, 2)]
    assert (a.row, c.row) == (None, 1)
    assert run_step(scheduler) == [(c, 1), (d, 2)]
    assert run_step(scheduler) == [(c, 1)]
    assert (scheduler.running, list(scheduler.waiting), scheduler.schedule()) == ([], [], [])


def test_a_long_prompt_is_cut_and_is_sampled_once_at_its_end():
    a = new_sequence(25, 2)
    scheduler = scheduler_of(a, tokens=10)
    sampled = []
    while scheduler.waiting or scheduler.running:
        chunk = scheduler.schedule()[0]
        sampled.append((chunk.count, chunk.is_sampled))
        run_step(scheduler)
    assert sampled == [(10, False), (10, False), (5, True), (1, True)]


def test_chunks_carry_the_tokens_in_order():
    a = Sequence(list(range(10, 17)), SamplingParams(max_tokens=3), 0, 0, frozenset(), text=None)
    scheduler, seen = scheduler_of(a, tokens=3), []
    while scheduler.waiting or scheduler.running:
        chunk = scheduler.schedule()[0]
        seen.append(a.next_token_ids(chunk.count))
        run_step(scheduler, token_id=90 + len(seen))
    assert seen == [[10, 11, 12], [13, 14, 15], [16], [93], [94]]


def test_decoding_comes_before_prompts_however_old():
    long, short = new_sequence(30, 5), new_sequence(2, 5)
    scheduler = scheduler_of(short, rows=3, tokens=10)
    run_step(scheduler)
    scheduler.add(long)
    late = new_sequence(3, 5)
    scheduler.add(late)
    assert run_step(scheduler) == [(short, 1), (long, 9)]
    assert run_step(scheduler) == [(short, 1), (long, 9)]
    assert run_step(scheduler) == [(short, 1), (long, 9)]
    assert run_step(scheduler) == [(short, 1), (long, 3), (late, 3)]  # the prompts in their order, as far as it goes
    assert run_step(scheduler) == [(long, 1), (late, 1)]


def test_a_prompt_of_one_token_is_as_short_as_decoding_and_overtakes_long_ones():
    long, short = new_sequence(30, 5), new_sequence(1, 3)
    scheduler = scheduler_of(long, short, tokens=10)
    assert [run_step(scheduler) for _ in range(4)] == [[(short, 1), (long, 9)]] * 3 + [[(long, 3)]]


def test_one_that_ends_early_leaves_its_row():
    a, b = new_sequence(2, 10), new_sequence(2, 10)
    scheduler = scheduler_of(a, b, rows=1)
    run_step(scheduler, EOS)
    assert (a.finish_reason, a.row) == ("stop", None)
    assert run_step(scheduler) == [(b, 2)]
    assert b.row == 0


@pytest.mark.parametrize("removed", [0, 1, 2, 3])
def test_remove_wherever_it_is(removed):
    sequences = [new_sequence(2, 4) for _ in range(4)]
    scheduler = scheduler_of(*sequences, rows=2)
    run_step(scheduler)
    scheduler.remove(sequences[removed])
    scheduler.remove(sequences[removed])  # a second time does nothing
    assert sequences[removed].row is None
    others = [s for i, s in enumerate(sequences) if i != removed]
    assert [s for s, _ in run_step(scheduler)] == others[:2]
    assert {s.row for s in others[:2]} == {0, 1}
    while scheduler.waiting or scheduler.running:
        run_step(scheduler)
    assert all(s.finish_reason == "length" for s in others)
    assert sequences[removed].finish_reason is None


def test_remove_of_one_never_added():
    scheduler = scheduler_of(new_sequence(1), rows=1)
    scheduler.remove(new_sequence(1))
    assert len(scheduler.schedule()) == 1


@given(
    rows=st.integers(1, 4),
    spare=st.integers(0, 20),
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=12),
    removals=st.dictionaries(st.integers(0, 20), st.integers(0, 11)),
)
def test_any_load(rows, spare, shapes, removals):
    """Whatever arrives and whatever is removed: the budget, the rows and the order hold, and all is served."""
    budget = rows + spare
    sequences = [new_sequence(*shape) for shape in shapes]
    scheduler, started = scheduler_of(*sequences, rows=rows, tokens=budget), []
    removed, step = set(), 0
    while scheduler.waiting or scheduler.running:
        chunks = scheduler.schedule()
        running = list(scheduler.running)
        used = [s.row for s in running]
        assert len(set(used)) == len(used)
        assert set(used) <= set(range(rows))
        assert len(running) == min(rows, len(running) + len(scheduler.waiting))  # no row idle while one waits
        assert 1 <= sum(chunk.count for chunk in chunks) <= budget
        assert all(1 <= chunk.count <= chunk.sequence.num_uncached for chunk in chunks)
        decoding = {id(s) for s in running if s.num_uncached == 1}
        assert decoding <= {id(chunk.sequence) for chunk in chunks}  # none that decodes is ever left out
        started += [s for s in running if s not in started]
        run_step(scheduler)
        step += 1
        if step in removals:
            gone = sequences[removals[step] % len(sequences)]
            removed.add(id(gone))
            scheduler.remove(gone)
    assert started == [s for s in sequences if s in started]  # in the order in which they came
    for s in sequences:
        assert s.row is None
        assert s.finish_reason == "length" or id(s) in removed
        if s.finish_reason:
            assert (len(s.new_token_ids), s.num_cached) == (s.params.max_tokens, len(s) - 1)
