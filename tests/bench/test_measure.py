"""Where the time of a run went: passes over prompts, passes that decode, choosing of tokens."""

import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from support.bench_records import ENDED, planned, setup
from tinygpt import LLM, SamplingParams
from tinygpt.bench import measure
from tinygpt.bench.measure import CHOICE, GENERATION, PROMPT, TOGETHER
from tinygpt.bench.meter import HostMeter
from tinygpt.bench.records import record_of
from tinygpt.bench.sweep import Case, run_case
from tinygpt.errors import RequestError
from tinygpt.execution.model_runner import ModelRunner
from tinygpt.hardware import memory
from tinygpt.kernels.compiling import CompileClock, begin_wait, end_wait


@pytest.fixture(scope="module")
def llm():
    with LLM("random:tiny", threads=1, max_num_seqs=8, prefix_cache_seqs=0) as llm:
        yield llm


SECONDS = {"forward": 10, "sample": 1, "process_logits": 2, "filter_logits": 3, "top_logprobs": 4, "trace": 100}


class FakeRunner:
    """Each call moves a clock on by SECONDS."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)

    def __getattr__(self, name):
        def call(*arguments):
            self.now += SECONDS[name]
            return name

        return call


def batch(num_tokens: int) -> SimpleNamespace:
    return SimpleNamespace(token_ids=np.zeros(num_tokens, np.int32))


def test_passes_and_choices_are_told_apart(monkeypatch):
    decoding, reading = (SimpleNamespace(num_cached=n, prompt_token_ids=[0] * 4) for n in (4, 3))
    scheduler = SimpleNamespace(running=[decoding, reading])
    timed = measure.TimedRunner(
        FakeRunner(monkeypatch), scheduler, batch_size=2, clock=CompileClock(), meter=HostMeter()
    )
    assert timed.forward(batch(2)) == "forward"
    scheduler.running = [decoding, decoding]
    for _ in range(2):
        timed.forward(batch(2))
    scheduler.running = [decoding]
    timed.forward(batch(1))
    assert timed.sample(1, 2) == "sample"
    assert [timed.process_logits(), timed.filter_logits(), timed.top_logprobs()] == list(SECONDS)[2:5]
    timed.trace()
    assert [timed.seconds(kind) for kind in (PROMPT, GENERATION, TOGETHER, CHOICE)] == [10, 30, 20, 1 + 2 + 3 + 4]
    assert (timed.num_steps, timed.num_prompt_steps, timed.num_together) == (4, 1, 2)


def test_kernels_that_compile_are_in_no_figure(monkeypatch):
    """Each pass of the model and each choice takes 1000 seconds longer, on a clock that the other tests' LLM must not
    remember: where a machine has just started, their seconds are among these."""
    now, forward, sample = [0.0], ModelRunner.forward, ModelRunner.sample

    def compiles(function):
        def call(*arguments):
            begin_wait()
            now[0] += 1000
            end_wait()
            now[0] += 1
            return function(*arguments)

        return call

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(ModelRunner, "forward", compiles(forward))
    monkeypatch.setattr(ModelRunner, "sample", compiles(sample))
    with LLM("random:tiny", threads=1, prefix_cache_seqs=0) as llm:
        (run,) = measure.measure(llm, [[1, 2, 3]], 6, repetitions=1, warmups=0).runs
    assert (run.prompt, run.generation, run.sampling, run.first_token, run.total) == (1, 5, 6, 2, 12)


def test_no_step_is_taken_unseen():
    """A backend that takes several steps at once is asked for one."""
    runner = SimpleNamespace(steps_at_once=lambda num_sequences, num_in_time: 16)
    timed = measure.TimedRunner(runner, SimpleNamespace(running=[]), 1, CompileClock(), HostMeter())
    assert timed.steps_at_once(1, 16) == 1


def test_counts_of_one_prompt(llm):
    measurement = measure.measure(llm, [[1, 2, 3]], 6, repetitions=3)
    assert (measurement.batch_size, measurement.prompt_length, measurement.new_tokens) == (1, 3, 6)
    assert [(run.num_steps, run.num_prompt_steps, run.num_together) for run in measurement.runs] == [(6, 1, 5)] * 3
    for run in measurement.runs:
        assert 0 < run.prompt < run.first_token < run.total
        assert run.prompt + run.generation + run.sampling < run.total
    assert measurement.peak_memory > 0 or sys.platform == "win32"


def test_every_repetition_and_warmup_is_a_generate(llm, monkeypatch):
    calls = []
    generate = llm.generate
    monkeypatch.setattr(llm, "generate", lambda *given, **names: calls.append(given) or generate(*given, **names))
    params = SamplingParams(max_tokens=2, temperature=1.0, seed=1, ignore_eos=True)
    assert len(measure.measure(llm, [[1]], 2, repetitions=2, warmups=3, params=params).runs) == 2
    assert [given[1] for given in calls] == [params] * 5


def test_no_bar_is_drawn_in_what_is_timed(llm, monkeypatch):
    """As `generate` does on a terminal, for more than one prompt."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    llm.generate([[1], [2]], SamplingParams(max_tokens=2))
    assert terminal.getvalue()
    terminal.seek(0)
    terminal.truncate()
    measure.measure(llm, [[1], [2]], 2, repetitions=1, warmups=1)
    assert terminal.getvalue() == ""


def test_prompts_longer_than_a_step_are_read_in_several(llm):
    measurement = run_case(llm, Case(batch_size=4, prompt_length=300), 1)
    assert measurement.new_tokens == 1
    assert [(run.num_steps, run.num_prompt_steps, run.num_together) for run in measurement.runs] == [(3, 3, 0)]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("new_tokens", [2, 6])
@pytest.mark.parametrize("prompt_length", [1, 10, 16, 17, 300])
def test_a_batch_decodes_together(llm, batch_size, new_tokens, prompt_length):
    """The first prompt is read first where the others wait for it, and no pass is counted before they are read."""
    measurement = run_case(llm, Case(batch_size, prompt_length, new_tokens), 1)
    (run,) = measurement.runs
    assert run.num_prompt_steps == (2 if prompt_length > 16 and batch_size > 1 else 1)
    assert run.num_together == new_tokens - 1
    assert 0 < run.together <= run.generation
    assert (measurement.prompt_length, measurement.new_tokens) == (prompt_length, new_tokens)


def test_a_pass_beside_a_prompt_is_no_time_between_tokens(llm):
    """2 x 32 + 2: the first sequence gets a token while the second reads its prompt; both get the next in one pass."""
    measurement = run_case(llm, Case(2, 32, 2), 1)
    (run,) = measurement.runs
    record = record_of(setup(), measurement, True, ENDED)
    assert (run.num_steps, run.num_prompt_steps, run.num_together) == (3, 2, 1)
    assert record["ms_per_token"] == pytest.approx(1e3 * run.together)
    assert record["samples_ts"] == pytest.approx([2 / run.together])


def test_short_prompts_of_a_batch_are_read_in_one_step():
    """They do not wait for one another: read in several, the first would have ended before the last began."""
    found = planned(batch_sizes=[64], prompt_lengths=[16], new_tokens=[2])
    assert found.step_tokens == 64 * 16
    assert planned(batch_sizes=[64], prompt_lengths=[16], new_tokens=[0]).step_tokens == 512
    sizes = {"max_num_seqs": 64, "max_model_len": 18, "max_num_batched_tokens": found.step_tokens}
    with LLM("random:tiny", threads=1, prefix_cache_seqs=0, **sizes) as llm:
        (run,) = run_case(llm, found.cases[1], 1).runs
    assert (run.num_prompt_steps, run.num_together) == (1, 1)


def test_the_engine_gets_its_backend_back(llm):
    backend = llm.engine.runner
    with pytest.raises(RequestError):
        measure._run(llm, [[10**9]], None, HostMeter())
    assert llm.engine.runner is backend


def test_impossible_prompts_are_refused(llm):
    with pytest.raises(RequestError, match="1024"):
        measure.measure(llm, [[1] * 1000], 25, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets a peak")
def test_the_peak_of_memory_is_that_of_the_time_since():
    before = memory.peak_memory()
    held = np.ones(50_000_000)
    with_held = memory.peak_memory()
    del held
    memory.forget_peak()
    assert with_held >= before + 300_000_000 or with_held >= 400_000_000
    assert memory.peak_memory() < with_held - 300_000_000
