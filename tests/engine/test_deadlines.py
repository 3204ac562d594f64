"""Whose time is over: from the list of deadlines, and as users see it."""

import time
from types import SimpleNamespace

import pytest

from tinygpt import LLM, SamplingParams
from tinygpt.engine.deadlines import Deadlines
from tinygpt.request.sequence import Sequence

pytestmark = pytest.mark.usefixtures("single_steps")  # they are counted

LONG = {"max_tokens": 100, "ignore_eos": True, "seed": 0}


def sequence_until(deadline: float | None) -> Sequence:
    return Sequence([1], SamplingParams(), 0, 0, frozenset(), None, deadline)


def test_each_expires_once_and_in_order():
    deadlines = Deadlines()
    sequences = [sequence_until(deadline) for deadline in (3.0, None, 1.0, 2.0, 2.0)]
    for sequence in sequences:
        deadlines.add(sequence)
    assert deadlines.pop_expired(0.5) == []
    assert deadlines.pop_expired(2.0) == [sequences[2], sequences[3], sequences[4]]
    assert deadlines.pop_expired(2.5) == []
    assert deadlines.pop_expired(9.0) == [sequences[0]]


def test_one_that_has_ended_does_not_expire():
    deadlines, sequence = Deadlines(), sequence_until(1.0)
    deadlines.add(sequence)
    sequence.fail("enough")
    assert deadlines.pop_expired(2.0) == []


def test_those_that_have_ended_do_not_pile_up():
    deadlines, living = Deadlines(), sequence_until(1e9)
    deadlines.add(living)
    for _ in range(1000):
        sequence = sequence_until(1e9)
        deadlines.add(sequence)
        deadlines.pop_expired(0.0)
        sequence.fail("enough")
    assert len(deadlines._heap) <= 65
    assert deadlines.pop_expired(2e9) == [living]


@pytest.fixture(scope="module")
def llm(small_demo):
    with LLM(small_demo, max_num_seqs=1) as llm:
        yield llm


@pytest.fixture
def later(monkeypatch):
    """Called, it moves the engine's clock on by 1000 seconds."""
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + 1000)
    return lambda: monkeypatch.setattr("tinygpt.engine.engine.time", clock)


def test_a_running_sample_keeps_what_it_has(llm, later):
    whole = llm.generate("Once upon a time", SamplingParams(**LONG))[0].outputs[0]
    stream = llm.stream("Once upon a time", SamplingParams(max_time=500, **LONG))
    chunks = [next(stream) for _ in range(5)]
    later()
    chunks += stream
    assert [chunk.token_id for chunk in chunks] == [*whole.token_ids[:5], None]
    assert [chunk.finish_reason for chunk in chunks] == [None] * 5 + ["length"]
    assert whole.text.startswith("".join(chunk.text for chunk in chunks))
    assert llm.engine.scheduler.slots.num_free == 1


def test_one_that_waits_ends_without_a_token(llm, later):
    running = llm.stream("a", SamplingParams(**LONG))
    next(running)  # and holds the only row
    waiting = llm.generate_as_finished(["b", "c"], [SamplingParams(max_time=500, **LONG), SamplingParams(**LONG)])
    later()
    i, output = next(waiting)
    (sample,) = output.outputs
    assert (i, sample.token_ids, sample.text) == (0, [], "")
    assert (sample.finish_reason, sample.stop_reason) == ("length", "max_time")
    metrics = output.metrics
    assert (metrics.scheduled, metrics.first_token, metrics.time_to_first_token) == (None, None, None)
    assert (metrics.prefill_time, metrics.time_per_output_token) == (None, None)
    assert metrics.queue_time == metrics.finished - metrics.arrival
    waiting.close()
    running.close()
    assert not llm.engine.scheduler.waiting


def test_logprobs_of_a_prompt_that_was_not_read_to_its_end(llm, later):
    running = llm.stream("a", SamplingParams(**LONG))
    next(running)  # and holds the only row
    waiting = llm.generate_as_finished([[5, 6, 7]], SamplingParams(max_time=500, prompt_logprobs=0, **LONG))
    later()
    _, output = next(waiting)
    assert (output.prompt_logprobs, output.prompt_cumulative_logprob) == ([None], None)
    running.close()


def test_time_enough_changes_nothing(llm):
    params = SamplingParams(**LONG)
    assert llm.generate("a", SamplingParams(max_time=500, **LONG))[0].outputs == llm.generate("a", params)[0].outputs


def test_times_of_a_request(llm):
    outputs = llm.generate(["a", "b"], SamplingParams(max_tokens=4, ignore_eos=True))
    for metrics in (output.metrics for output in outputs):
        assert metrics.arrival <= metrics.scheduled <= metrics.first_token <= metrics.finished
        assert metrics.queue_time + metrics.prefill_time == pytest.approx(metrics.time_to_first_token)
        assert 3 * metrics.time_per_output_token == pytest.approx(metrics.finished - metrics.first_token)
    assert outputs[1].metrics.scheduled >= outputs[0].metrics.finished  # there is one row
