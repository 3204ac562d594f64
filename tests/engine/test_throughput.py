"""What is said of how fast requests ran: tokens that were read and made, and no second in which kernels compiled."""

import pytest

from tinygpt import LLM, SamplingParams
from tinygpt.engine.throughput import Throughput, side_by_side
from tinygpt.kernels.compiling import begin_wait, end_wait


class SlowRunner:
    """A runner whose passes take a second each. Those of these numbers wait 100 more for a kernel."""

    has_multi_step = False

    def __init__(self, runner, monkeypatch, compiles_in=()):
        self._runner, self._compiles_in = runner, compiles_in
        self.now, self.num_passes = 0.0, 0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def choose_num_steps(self, num_sequences, num_in_time):
        return 1

    def forward(self, batch):
        if self.num_passes in self._compiles_in:
            begin_wait()
            self.now += 100
            end_wait()
        self.now += 1
        self.num_passes += 1
        return self._runner.forward(batch)


@pytest.fixture
def run(monkeypatch):
    """The outputs of greedy prompts that are each continued by 4 tokens, and the throughput."""

    def run(prompts, compiles_in=(), max_num_seqs=8, **params):
        params = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **params})
        with (
            LLM("demo", threads=1, max_num_seqs=max_num_seqs) as llm,
            llm.engine.wrapped(lambda runner: SlowRunner(runner, monkeypatch, compiles_in)),
        ):
            return llm.generate(prompts, params), llm.engine.throughput

    return run


def test_times_of_a_request_leave_out_what_compiles(run):
    (output,), _ = run([[1, 2, 3]], compiles_in=(0, 2))
    metrics = output.metrics
    assert (metrics.first_token - metrics.arrival, metrics.finished - metrics.arrival) == (101, 204)
    assert (metrics.queue_time, metrics.prefill_time, metrics.decode_time) == (0, 1, 3)
    assert (metrics.time_to_first_token, metrics.time_per_output_token, metrics.time_to_finish) == (1, 1, 4)
    assert (metrics.prefill_compile_time, metrics.decode_compile_time, metrics.compile_time) == (100, 100, 200)


def test_a_request_that_waits_its_turn_while_kernels_compile(run):
    outputs, _ = run([[1, 2, 3], [4, 5]], compiles_in=(0, 2), max_num_seqs=1)
    metrics = outputs[1].metrics
    assert (metrics.queue_compile_time, metrics.queue_time, metrics.time_to_first_token) == (200, 4, 5)
    assert (metrics.prefill_compile_time, metrics.decode_compile_time) == (0, 0)


def test_reading_and_going_on_are_told_apart(run):
    _, throughput = run([[1, 2, 3]])
    assert throughput == Throughput(prompt_tokens=3, prompt_seconds=1, new_tokens=3, new_seconds=3)


def test_no_rate_contains_what_compiles(run):
    assert run([[1, 2, 3]], compiles_in=(0, 1, 3))[1] == run([[1, 2, 3]])[1]


def test_equal_samples_and_beams_are_one_text(run):
    alone = run([[1, 2, 3]])[1]
    assert run([[1, 2, 3]], n=5)[1] == alone
    assert run([[1, 2, 3]], num_beams=3)[1] == alone
    assert run([[1, 2, 3]], n=5, temperature=1.0, seed=1)[1].new_tokens == 5 * 3


def test_engines_side_by_side_take_as_long_as_the_longest():
    together = side_by_side([Throughput(30, 2.0, 5, 1.0), Throughput(10, 1.0, 25, 4.0)])
    assert together == Throughput(40, 2.0, 30, 4.0)


def test_drafted_tokens_count_and_their_steps_take_what_they_take(run):
    params = {"max_tokens": 12, "allowed_token_ids": [3]}  # what was drafted comes true
    plain, drafted = (run([[3] * 4], prompt_lookup_num_tokens=n, **params)[1] for n in (0, 4))
    assert plain.new_tokens == drafted.new_tokens == 11
    assert drafted.new_seconds < plain.new_seconds == 11


def test_a_step_that_does_both_is_shared_out_among_its_tokens(monkeypatch):
    with (
        LLM("demo", threads=1) as llm,
        llm.engine.wrapped(lambda runner: SlowRunner(runner, monkeypatch)),
    ):
        first = llm.stream([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        next(first)
        before = llm.engine.throughput
        second = llm.stream([7, 8, 9], SamplingParams(max_tokens=1))
        next(second)  # 1 token of the first and 3 of the second
        assert llm.engine.throughput - before == Throughput(3, 0.75, 1, 0.25)
        list(first), list(second)
