"""Where the time of a run went: passes over prompts, passes that decode, choosing of tokens."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from support.bench_records import case_of, planned
from tinygpt import LLM
from tinygpt import hardware as memory
from tinygpt.bench import measure
from tinygpt.bench.measure import CHOICE, GENERATION, PROMPT, TOGETHER, HostMeter
from tinygpt.errors import RequestError


@pytest.fixture(scope="module")
def llm():
    with LLM("random:tiny", threads=1, max_num_seqs=8, prefix_cache_seqs=0) as llm:
        yield llm


SECONDS = {
    "forward": 10,
    "sample": 1,
    "process_logits": 2,
    "filter_logits": 3,
    "top_logprobs": 4,
    "trace": 100,
}


class FakeRunner:
    """Each call moves a clock on by SECONDS."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.backend = self
        monkeypatch.setattr(HostMeter, "mark", lambda meter: self.now)

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
    timed = measure.TimedRunner(FakeRunner(monkeypatch), scheduler, batch_size=2, meter=HostMeter())
    assert timed.forward(batch(2)) == "forward"
    scheduler.running = [decoding, decoding]
    for _ in range(2):
        timed.forward(batch(2))
    scheduler.running = [decoding]
    timed.forward(batch(1))
    choose = timed.backend
    assert choose.sample(1, 2) == "sample"
    assert [choose.process_logits(), choose.filter_logits(), choose.top_logprobs()] == list(SECONDS)[2:5]
    timed.trace()
    assert [timed.seconds(kind) for kind in (PROMPT, GENERATION, TOGETHER, CHOICE)] == [
        10,
        30,
        20,
        1 + 2 + 3 + 4,
    ]
    assert (timed.num_steps, timed.num_prompt_steps, timed.num_together) == (4, 1, 2)


def test_no_step_is_taken_unseen():
    """A backend that takes several steps at once is asked for one."""
    runner = SimpleNamespace(choose_num_steps=lambda num_sequences, num_in_time: 16)
    timed = measure.TimedRunner(runner, SimpleNamespace(running=[]), 1, HostMeter())
    assert timed.choose_num_steps(1, 16) == 1


def test_counts_of_one_prompt(llm):
    runs = measure.measure(llm, case_of(1, 3, 6), 3)
    assert [(run.num_steps, run.num_prompt_steps, run.num_together) for run in runs] == [(6, 1, 5)] * 3
    for run in runs:
        assert 0 < run.prompt < run.first_token < run.total
        assert run.prompt + run.generation + run.sampling < run.total
    assert HostMeter().peak_memory() > 0 or sys.platform == "win32"


def test_prompts_longer_than_a_step_are_read_in_several(llm):
    runs = measure.measure(llm, case_of(4, 300), 1)
    assert [(run.num_steps, run.num_prompt_steps, run.num_together) for run in runs] == [(3, 3, 0)]


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("new_tokens", [2, 6])
@pytest.mark.parametrize("prompt_length", [1, 16, 17, 300])
def test_a_batch_decodes_together(llm, batch_size, new_tokens, prompt_length):
    """The first prompt is read first where the others wait for it, and no pass is counted before they are read."""
    (run,) = measure.measure(llm, case_of(batch_size, prompt_length, new_tokens), 1)
    assert run.num_prompt_steps == (2 if prompt_length > 16 and batch_size > 1 else 1)
    assert run.num_together == new_tokens - 1
    assert 0 < run.together <= run.generation


def test_short_prompts_of_a_batch_are_read_in_one_step():
    """They do not wait for one another: read in several, the first would have ended before the last began."""
    found = planned(batch_sizes=[64], prompt_lengths=[16], new_tokens=[2])
    assert found.step_tokens == 64 * 16
    assert planned(batch_sizes=[64], prompt_lengths=[16], new_tokens=[0]).step_tokens == 512
    sizes = {"max_num_seqs": 64, "max_model_len": 18, "max_num_batched_tokens": found.step_tokens}
    with LLM("random:tiny", threads=1, prefix_cache_seqs=0, **sizes) as llm:
        (run,) = measure.measure(llm, found.cases[1], 1)
    assert (run.num_prompt_steps, run.num_together) == (1, 1)


def test_the_engine_gets_its_backend_back(llm):
    backend = llm.engine.runner
    with pytest.raises(RequestError):
        measure._run(llm, [[10**9]], None, HostMeter())
    assert llm.engine.runner is backend


def test_impossible_prompts_are_refused(llm):
    with pytest.raises(RequestError, match="1024"):
        measure.measure(llm, case_of(1, 1000, 25), 1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets a peak")
def test_the_peak_of_memory_is_that_of_the_time_since():
    before = memory.peak_memory()
    held = np.ones(50_000_000)
    with_held = memory.peak_memory()
    del held
    memory.forget_peak()
    assert with_held >= before + 300_000_000 or with_held >= 400_000_000
    assert memory.peak_memory() < with_held - 300_000_000
