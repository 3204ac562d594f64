"""The scheduler without a model: who runs in a step, with how many tokens, in which slot, and what is copied there."""

import itertools
import re
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tinygpt.engine import scheduler as scheduling
from tinygpt.engine.part import Part
from tinygpt.engine.prompt_scorer import PromptScorer
from tinygpt.engine.scheduler import SINGLE_USE_IDS, Scheduler, SlotTable
from tinygpt.engine.sequence import Sample, SampledToken, Sequence, common_prefix
from tinygpt.sampling_params import SamplingParams

EOS = 0
FRESH = itertools.count(1000)


def new_sequence(prompt_len: int, max_tokens: int = 3, begin: int | None = None) -> Sequence:
    """One whose prompt begins like no other, or like those with the same `begin`."""
    prompt = [next(FRESH) if begin is None else begin] + [1] * (prompt_len - 1)
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(Sample(prompt, params, 0, frozenset({EOS})))


class Cache:
    """A KV cache that holds the token of each position, and the copies that were made in it."""

    def __init__(self, slots: int):
        self.slots = [{} for _ in range(slots)]
        self.copies = []

    def copy_positions(self, source: int, target: int, start: int, stop: int) -> None:
        assert 0 <= start < stop
        self.copies.append((source, target, start, stop))
        for position in range(start, stop):
            self.slots[target][position] = self.slots[source][position]

    def write(self, sequence: Sequence, count: int) -> None:
        """What a step does; the positions before the new ones must be the sequence's own by then."""
        start = sequence.num_cached
        slot = self.slots[sequence.slot]
        assert [slot[position] for position in range(start)] == sequence.token_ids[:start]
        slot.update(enumerate(sequence.next_token_ids(count), start))


def run_step(scheduler: Scheduler, token_id: int = 1) -> list[tuple[Sequence, int]]:
    chunks = scheduler.schedule()
    for chunk in chunks:
        reaches_end = chunk.reaches_end
        cache_of(scheduler).write(chunk.sequence, chunk.count)
        chunk.sequence.num_cached += chunk.count
        if reaches_end:
            chunk.sequence.append(SampledToken(token_id))
    for sequence in scheduler.finished:
        scheduler.remove(sequence)
    return [(chunk.sequence, chunk.count) for chunk in chunks]


def cache_of(scheduler: Scheduler) -> Cache:
    return scheduler._copy_positions.__self__


def scheduler_of(*sequences: Sequence, slots: int = 4, tokens: int = 100, kept: int = 0) -> Scheduler:
    scheduler = Scheduler(SlotTable(slots, kept), tokens, Cache(slots + kept).copy_positions)
    for sequence in sequences:
        scheduler.add(sequence)
    return scheduler


# Slots, tokens of a step; sequences, as prompt+new and ~ if they begin alike; then steps, with slot and tokens of each
# chunk, and a point if a token is drawn. A sequence may come between two steps.
LOADS = """
first come, first served, and each slot is used again
    2 100 | a=2+2 b=2+1 c=2+3 d=2+1 | a0:2. b1:2. | a0:1. c1:2. | c1:1. d0:2. | c1:1. |
a long prompt is cut, and a token is drawn once at its end
    4 10 | a=25+2 | a0:10 | a0:10 | a0:5. | a0:1. |
decoding comes before prompts, however old, and these in their order, as far as it goes
    3 10 | s=2+5 | s0:2. | l=30+5 e=3+5 | s0:1. l1:9 | s0:1. l1:9 | s0:1. l1:9 | s0:1. l1:3. e2:3. | l1:1. e2:1.
a prompt of 16 tokens is not worth waiting for
    4 100 | a=16+3~ b=16+3~ | a0:16. b1:16.
one of 17 is
    4 100 | a=17+3~ b=17+3~ | a0:17. | a0:1. b1:1.
others pass one that waits
    4 25 | a=40+3~ b=50+3~ c=5+3 | a0:25 | a0:15. c2:5. | a0:1. c2:1. b1:10.
"""


@pytest.mark.parametrize("load", re.findall(r"^ +(.*)", LOADS, re.MULTILINE))
def test_who_runs_in_a_step(load):
    sizes, *parts = (part.split() for part in load.split("|"))
    slots, tokens = map(int, sizes)
    scheduler, names = scheduler_of(slots=slots, tokens=tokens), {}
    for part in parts:
        if any("=" in word for word in part):
            for name, prompt, new, alike in re.findall(r"(\w)=(\d+)\+(\d+)(~?)", " ".join(part)):
                sequence = new_sequence(int(prompt), int(new), 7 if alike else None)
                names[sequence] = name
                scheduler.add(sequence)
        else:
            chunks = [(c.sequence.slot, c.count, "." * c.reaches_end) for c in scheduler.schedule()]
            found = zip(run_step(scheduler), chunks, strict=True)
            assert [f"{names[s]}{slot}:{count}{end}" for (s, _), (slot, count, end) in found] == part


def asked(prompt_len: int, first: int, begin: int | None = None) -> Sequence:
    """One whose prompt's logits are wanted from position `first` on."""
    sequence = new_sequence(prompt_len, begin=begin)
    sequence.parts = (PromptScorer(first, sequence.prompt_token_ids[first + 1 :], 0),)
    return sequence


def logits_of_steps(scheduler: Scheduler, steps: int) -> list[list[tuple[int, int, int]]]:
    """For each chunk its tokens, the logits that are computed, and those for the prompt's own sake."""
    seen = []
    for _ in range(steps):
        seen.append(
            [(chunk.count, chunk.num_logits, chunk.num_part_logits) for chunk in scheduler.schedule()]
        )
        run_step(scheduler)
    return seen


def test_a_chunk_computes_the_logits_that_are_wanted_and_no_others():
    assert logits_of_steps(scheduler_of(new_sequence(25), tokens=10), 4) == [
        [(10, 0, 0)], [(10, 0, 0)], [(5, 1, 0)], [(1, 1, 0)],
    ]  # fmt: skip
    assert logits_of_steps(scheduler_of(asked(25, first=12), tokens=10), 3) == [
        [(10, 0, 0)],
        [(10, 8, 8)],
        [(5, 5, 5)],
    ]


def test_prompts_of_a_step_share_its_rows_of_logits():
    a, b = asked(60, first=0), asked(90, first=20)
    assert logits_of_steps(scheduler_of(a, b, tokens=200), 1) == [[(60, 60, 60), (24, 4, 4)]]


def test_what_is_kept_is_not_taken_over_where_logits_are_wanted():
    scheduler = scheduler_of(new_sequence(20, max_tokens=1, begin=7), kept=1)
    finish(scheduler)
    late = asked(40, first=19, begin=7)
    scheduler.add(late)
    run_step(scheduler)
    assert late.num_reused == 19


def finish(scheduler: Scheduler) -> int:
    """Run all that is there; the tokens that were computed for it."""
    total = 0
    while scheduler.waiting or scheduler.running:
        total += sum(count for _, count in run_step(scheduler))
    return total


@pytest.mark.parametrize("tokens", [8, 30, 100])
@pytest.mark.parametrize("max_tokens", [1, 3])
def test_one_prompt_pass_for_equal_prompts(tokens, max_tokens):
    sequences = [new_sequence(40, max_tokens, begin=7) for _ in range(4)]
    scheduler = scheduler_of(*sequences, tokens=tokens)
    assert finish(scheduler) == 40 + 3 + 4 * (
        max_tokens - 1
    )  # the last token of each is computed for its logits
    assert [s.num_reused for s in sequences] == [0, 39, 39, 39]


@pytest.mark.parametrize(("after", "num_reused"), [(0, 0), (1, 0), (4, 39)])
def test_one_that_waits_goes_on_when_the_other_is_removed(after, num_reused):
    """It takes over what is there once the other's logits were finite: its 4th step reaches them."""
    a, b, c = (new_sequence(40, begin=7) for _ in range(3))
    scheduler = scheduler_of(a, b, c, tokens=10)
    for _ in range(after):
        run_step(scheduler)
    scheduler.remove(a)
    assert finish(scheduler) == 40 - num_reused + 1 + 4
    assert (b.finish_reason, c.finish_reason) == ("length", "length")
    assert (b.num_reused, c.num_reused) == (num_reused, 39)


def test_of_hundreds_of_new_prompts_the_ones_that_begin_alike_are_compared(monkeypatch):
    compared = []
    monkeypatch.setattr(scheduling, "common_prefix", lambda a, b: compared.append(a) or common_prefix(a, b))
    distinct = [new_sequence(20) for _ in range(250)]
    alike = [new_sequence(20, begin=5) for _ in range(6)]
    scheduler = scheduler_of(*distinct, *alike, slots=256, tokens=8192)
    assert len(run_step(scheduler)) == 250 + 1
    assert len(compared) == 5 + 4 + 3 + 2 + 1
    run_step(scheduler)
    assert [sequence.num_reused for sequence in alike] == [0] + [19] * 5


def test_one_waits_for_the_other_that_has_most_in_common_with_it():
    little = new_sequence(20, begin=7)
    much = new_sequence(60, begin=7)
    last = new_sequence(50, begin=7)
    much.prompt_token_ids[5:] = last.prompt_token_ids[5:] = [2] * 55
    last.prompt_token_ids[50:] = []
    scheduler = scheduler_of(little, much, last)
    assert [sequence for sequence, _ in run_step(scheduler)] == [little, much]
    assert run_step(scheduler) == [(little, 1), (much, 1), (last, 1)]
    assert last.num_reused == 49


def test_nothing_of_one_that_failed_is_handed_on():
    """Numbers that are not finite may have spread to any of its positions."""
    a, b = (new_sequence(40, begin=7) for _ in range(2))
    scheduler = scheduler_of(a, b, tokens=10)
    run_step(scheduler)
    a.error = "not finite"
    scheduler.remove(a)
    assert (cache_of(scheduler).copies, b.num_reused) == ([], 0)
    assert finish(scheduler) == 40 + 2


def test_an_ended_sequence_is_kept_for_the_next():
    scheduler = scheduler_of(new_sequence(40, begin=7), kept=1)
    finish(scheduler)
    again = new_sequence(40, begin=7)
    longer = new_sequence(45, begin=7)
    scheduler.add(again)
    assert finish(scheduler) == 1 + 2
    scheduler.add(longer)
    assert finish(scheduler) == 45 - 42 + 2  # the 40, and two new tokens that were like the prompt's next
    assert (again.num_reused, longer.num_reused) == (39, 42)


def test_a_kept_slot_that_was_copied_from_is_not_the_next_to_go():
    scheduler = scheduler_of(*(new_sequence(30, begin=begin) for begin in (7, 8)), kept=2)
    finish(scheduler)
    branch = new_sequence(20, begin=7)
    branch.prompt_token_ids[10:] = [2] * 10
    scheduler.add(branch)
    finish(scheduler)
    assert branch.num_reused == 10
    assert [token_ids[0] for token_ids in scheduler.slots.prefixes.values()] == [7, 7]


@pytest.mark.parametrize(("num_steps", "num_kept"), [(1, 0), (3, 1)])
def test_a_prompt_that_was_not_read_to_its_end_is_not_kept(num_steps, num_kept):
    a = new_sequence(20)
    scheduler = scheduler_of(a, tokens=10, kept=1)
    for _ in range(num_steps):
        run_step(scheduler)
    scheduler.remove(a)
    assert len(scheduler.slots.prefixes) == num_kept
    assert scheduler.slots.num_free == 4


def test_a_conversation_goes_on_in_its_slot_without_a_copy():
    scheduler = scheduler_of(new_sequence(20, begin=7), kept=2)
    finish(scheduler)
    cache = cache_of(scheduler)
    scheduler.add(new_sequence(60, begin=7))
    run_step(scheduler)
    assert (scheduler.running[0].num_reused, cache.copies) == (22, [])


@given(
    slots=st.integers(1, 4),
    kept=st.integers(0, 3),
    spare=st.integers(0, 20),
    shapes=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 6), st.sampled_from([None, 7, 8])),
        min_size=1,
        max_size=12,
    ),
    arrivals=st.lists(st.integers(0, 10), min_size=12, max_size=12),
    removals=st.dictionaries(st.integers(0, 20), st.integers(0, 11)),
)
@example(2, 0, 0, [(20, 6, 7)] * 9, [0] * 5 + [1, 2, 2, 3] + [4] * 3, {})
def test_any_load(slots, kept, spare, shapes, arrivals, removals):
    budget = slots + spare
    sequences = [new_sequence(*shape) for shape in shapes]
    arrivals = dict(zip(sequences, arrivals, strict=False))
    coming = sorted({*arrivals.values()})
    scheduler = scheduler_of(slots=slots, tokens=budget, kept=kept)
    started = []
    removed, step = set(), 0
    while coming or scheduler.waiting or scheduler.running:
        if step in coming:
            coming.remove(step)
            scheduler.add(*(s for s in sequences if arrivals[s] == step))  # of a caller
        chunks = scheduler.schedule()
        running = list(scheduler.running)
        check_rows(scheduler, slots, kept)
        assert len(running) == min(
            slots, len(running) + len(scheduler.waiting)
        )  # no slot idle while one waits
        assert bool(running) <= sum(chunk.count for chunk in chunks) <= budget  # something goes on
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
            assert gone not in (*scheduler.waiting, *scheduler.running)
    callers = [*dict.fromkeys(arrivals[s] for s in started)]
    assert callers == sorted(callers)  # each began in the order in which they came
    for s in sequences:
        assert s.slot is None
        assert s.finish_reason == "length" or id(s) in removed
        if s.finish_reason:
            assert (len(s.new_token_ids), s.num_cached) == (s.params.max_tokens, len(s) - 1)


def search(num_beams: int, max_tokens: int) -> list[Sequence]:
    params = SamplingParams(max_tokens=max_tokens, num_beams=num_beams)
    sample = Sample([next(FRESH)] * 3, params, 0, frozenset({EOS}))
    together = Part()
    together.num_together = num_beams
    together.can_pause = False
    return [Sequence(sample, i, parts=(together,)) for i in range(num_beams)]


def callers_of(scheduler: Scheduler) -> list[int]:
    """How many slots each caller has."""
    return [*Counter(s.caller for s in scheduler.running).values()]


def test_a_lone_caller_has_all_slots_and_late_ones_get_theirs_at_once():
    scheduler = scheduler_of(slots=32)
    groups = [[new_sequence(6, 9, begin) for _ in range(n)] for begin, n in ((5, 128), (6, 16), (7, 32))]
    scheduler.add(*groups[0])
    run_step(scheduler)
    assert callers_of(scheduler) == [32]
    scheduler.add(*groups[1])
    scheduler.add(*groups[2])
    late = [new_sequence(3) for _ in range(8)]
    for sequence in late:
        scheduler.add(sequence)
    assert {*late} <= {sequence for sequence, _ in run_step(scheduler)}
    assert callers_of(scheduler) == [22, *[1] * 10]
    finish(scheduler)
    assert {len(s.new_token_ids) for group in groups for s in group} == {9}


def test_a_free_slot_is_the_callers_that_has_the_fewest():
    scheduler = scheduler_of(slots=4)
    for count in (5, 9):
        scheduler.add(*(new_sequence(2, max_tokens=3) for _ in range(count)))
    assert [callers_of(scheduler) for _ in range(6) if run_step(scheduler)][3] == [2, 2]


def test_the_shortest_makes_room_and_goes_on_to_the_same_tokens():
    scheduler = scheduler_of(slots=3, kept=1)
    several = [new_sequence(20 + n, 6) for n in (0, 1, 2, 3)]
    scheduler.add(*several)
    run_step(scheduler)
    scheduler.add(new_sequence(3, 1))
    run_step(scheduler)
    assert (several[0].slot, several[0].num_cached, scheduler.waiting[0]) == (None, 0, several[0])
    finish(scheduler)
    assert [(len(s.new_token_ids), s.num_reused) for s in several] == [(6, 0)] * 4


def test_others_that_never_cease_starve_nothing():
    scheduler = scheduler_of(slots=2)
    several = [new_sequence(5, 4) for _ in range(6)]
    scheduler.add(*several)
    for _ in range(60):
        scheduler.add(new_sequence(2, 2))
        run_step(scheduler)
    assert all(s.is_finished for s in several)


def test_beams_enter_together_and_are_not_interrupted():
    scheduler = scheduler_of(slots=4)
    several, beams, late = [new_sequence(4, 9) for _ in range(6)], search(3, 5), new_sequence(2)
    scheduler.add(*several)
    run_step(scheduler)
    scheduler.add(*beams)
    scheduler.add(late)
    run_step(scheduler)
    assert (scheduler.running, late.slot) == ([several[0], *beams], None)
    while not late.is_finished:
        run_step(scheduler)
    assert beams[0].is_finished
    finish(scheduler)


@pytest.mark.parametrize("first", [0, 3])
def test_the_prompts_log_probabilities_are_read_again(first):
    scheduler = scheduler_of(slots=2, tokens=10)
    long, wanting = new_sequence(50), asked(30, first)
    scheduler.add(long, wanting)
    (scorer,) = wanting.parts
    scorer.entries.append({})
    scheduler.schedule()
    scheduler.add(new_sequence(1))
    scheduler.schedule()
    assert (wanting.slot, scorer.entries) == (None, [])


def check_rows(scheduler: Scheduler, slots: int, kept: int) -> None:
    used = [s.slot for s in scheduler.running]
    held = scheduler.slots.prefixes
    assert sorted([*used, *held, *scheduler.slots._empty]) == list(range(slots + kept))
    assert len(held) <= kept
    assert scheduler.slots.num_free == slots - len(used)
    for slot, tokens in held.items():
        content = cache_of(scheduler).slots[slot]
        assert [content[position] for position in range(len(tokens))] == tokens


def kept(slots: SlotTable) -> list[list[int]]:
    return [*slots.prefixes.values()]


def take_all(slots: SlotTable, *prompts: list[int]) -> list[int]:
    return [slots.take(prompt)[0] for prompt in prompts]


def test_the_least_recently_used_goes_first():
    slots = SlotTable(4, 2)
    a, b, c = take_all(slots, [1], [2], [3])
    slots.release(a, [1, 1])
    slots.release(b, [2, 2])
    slots.touch(a)
    slots.release(c, [3, 3])
    assert kept(slots) == [[1, 1], [3, 3]]
    assert slots.num_free == 4


def test_what_another_row_covers_is_not_kept_twice():
    slots = SlotTable(4, 3)
    a, b, c, d = take_all(slots, [1], [1], [1], [9])
    slots.release(d, [9])
    slots.release(a, [1, 2])
    slots.release(b, [1, 2, 3])  # all of the slot before, and more
    assert kept(slots) == [[9], [1, 2, 3]]
    slots.touch(d)
    slots.release(c, [1, 2, 3])
    assert kept(slots) == [[9], [1, 2, 3]]  # and the slot that holds it has been of use
    assert slots.num_free == 4


@pytest.mark.parametrize("token_ids", [[], [SINGLE_USE_IDS, 5]])
def test_a_row_of_no_use_is_empty(token_ids):
    slots = SlotTable(1, 1)
    slots.release(slots.take([1])[0], token_ids)
    assert (kept(slots), slots.num_free) == ([], 1)
