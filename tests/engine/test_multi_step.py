"""Several steps in one call: the same outputs, no step too many, and no caller waits longer than for single steps."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from support.engines import SAMPLED, WAYS, opened
from support.gate import noting, paused
from tinygpt import LLM, SamplingParams
from tinygpt.engine.model_runner import MAX_STEPS
from tinygpt.engine.step_loop import CALL_SECONDS, STREAM_SECONDS, StepTimer
from tinygpt.outputs import Throughput

PROMPTS = ["Once upon a time", "The old", [5], "In the morning she went to the"]
GREEDY = SamplingParams(max_tokens=30, seed=0)


llm = opened("small_demo", scope="function", max_num_seqs=8, prefix_cache_seqs=0)


@pytest.fixture
def calls(llm, monkeypatch) -> list[int]:
    """The steps of each call, by a machine on which any number of them takes no time."""
    monkeypatch.setattr(StepTimer, "num_steps", lambda timer, seconds: MAX_STEPS if seconds else 1)
    return noting(monkeypatch, llm.engine.runner, "multi_step", lambda *on: on[-2])


def outputs(llm: LLM, params) -> list:
    return [output.outputs for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_those_of_single_steps(llm, calls, monkeypatch, way):
    params = SamplingParams(**WAYS[way])
    at_once = outputs(llm, params)
    assert bool(calls) == ({*WAYS[way]} <= {*SAMPLED, "n", "overflow", "prompt_logprobs"})
    monkeypatch.setattr(llm.engine.runner, "choose_num_steps", lambda *of: 1)
    calls.clear()
    assert outputs(llm, params) == at_once
    assert not calls


def test_requests_of_all_kinds_at_once(llm, calls):
    kinds = [SamplingParams(**fields) for fields in (*WAYS.values(), SAMPLED | {"max_tokens": 1})]
    pairs = [(prompt, params) for prompt in PROMPTS for params in kinds]
    alone = [llm.generate([prompt], params)[0].outputs for prompt, params in pairs]
    together = llm.generate([prompt for prompt, _ in pairs], [params for _, params in pairs])
    assert [output.outputs for output in together] == alone
    assert calls


def test_no_step_is_taken_for_a_sequence_that_has_ended_by_its_length(llm, calls):
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (40, 5, 20, 20)]
    llm.generate([[1], [2], [3], [4]], params)
    assert calls == [4, 15, 16, 4]  # after the first step


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_no_step_is_wasted_on_those_that_have_ended(llm, calls, monkeypatch, heat):
    prompts = [[i] for i in range(30)]
    free = SamplingParams(max_tokens=40, temperature=heat, seed=1, ignore_eos=True)
    texts = [output.outputs[0].token_ids for output in llm.generate(prompts, free)]
    ends = [token_ids[7 + i % 20] for i, token_ids in enumerate(texts)]
    params = SamplingParams(max_tokens=40, temperature=heat, seed=1, ignore_eos=True, stop_token_ids=ends)
    taken = []
    monkeypatch.setattr(StepTimer, "note", lambda timer, seconds, steps: taken.append(steps))
    at_once = llm.generate(prompts, params)
    num_calls, num_steps = len(taken), sum(taken)
    monkeypatch.setattr(llm.engine.runner, "choose_num_steps", lambda *of: 1)
    taken.clear()
    single = llm.generate(prompts, params)
    assert [output.outputs for output in at_once] == [output.outputs for output in single]
    assert num_steps == len(taken) > num_calls


def test_the_context_is_never_left(llm, calls):
    prompt = [4] * (llm.max_model_len - 20)
    (output,) = llm.generate([prompt], max_tokens=20, ignore_eos=True)
    assert (len(output.outputs[0].token_ids), calls) == (20, [16, 3])


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda llm: llm.generate(PROMPTS, max_tokens=4), CALL_SECONDS),
        (lambda llm: llm.generate(PROMPTS, max_tokens=4, max_time=60), CALL_SECONDS),
        (lambda llm: llm.submit("The", max_tokens=4).result(60), CALL_SECONDS),
        (lambda llm: list(llm.stream("The", max_tokens=4)), STREAM_SECONDS),
        (lambda llm: llm.submit("The", SamplingParams(max_tokens=4), print).result(60), STREAM_SECONDS),
    ],
    ids=["generate", "max_time", "submit", "stream", "on_chunk"],
)
def test_a_caller_that_reads_single_tokens_waits_less(llm, monkeypatch, run, expected):
    asked = []
    monkeypatch.setattr(StepTimer, "num_steps", lambda timer, seconds: asked.append(seconds) or 1)
    run(llm)
    assert set(asked) == {0.0, expected}  # the first token is reported as soon as it is there


def test_a_call_ends_with_the_time_that_is_left_to_any_request(llm, monkeypatch):
    asked, now = [], [100.0]
    monkeypatch.setattr(StepTimer, "num_steps", lambda timer, seconds: asked.append(seconds) or 1)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    times = [None, 3.0, 2.0]
    requests = [
        llm._inputs.request([3], SamplingParams(max_tokens=9, ignore_eos=True, max_time=t)) for t in times
    ]

    def run() -> None:
        steps = llm.engine._steps
        for request in requests:
            steps.add(request.sequences)
        steps.step(1.75)
        for now[0] in (100.5, 101.0, 102.5):
            steps.step(1.75)
        steps.remove([sequence for request in requests for sequence in request.sequences])

    llm.engine.call(run)
    assert asked[1:] == [1.5, 1.0, 0.5]


@pytest.mark.parametrize("what", ["submit", "cancel"])
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_new_or_cancelled_request_waits_for_one_step(llm, calls, monkeypatch, what, heat):
    params = SamplingParams(max_tokens=40, temperature=heat, seed=1, ignore_eos=True)
    alone = llm.generate([[3]], params)[0].outputs
    multi_step = llm.engine.runner.multi_step
    counts = []
    other = None

    def meanwhile(*on):
        nonlocal other
        monkeypatch.setattr(llm.engine.runner, "multi_step", multi_step)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(
                lambda: llm.submit([4], params) if what == "submit" else other.cancel()
            ).result()
        counts.extend(len(sequence.new_token_ids) for sequence in llm.engine.scheduler.running)
        for token_ids in multi_step(*on):
            counts.append(1)
            yield token_ids

    if what == "cancel":
        with paused(llm):
            monkeypatch.setattr(llm.engine.runner, "multi_step", meanwhile)
            future = llm.submit([3], params)
            other = llm.submit([4], params)
    else:
        monkeypatch.setattr(llm.engine.runner, "multi_step", meanwhile)
        future = llm.submit([3], params)
    assert future.result(60).outputs == alone
    assert counts[-1:] == [1]  # one pass, although the call may take MAX_STEPS
    assert len(counts) == (2 if what == "submit" else 3)


def test_more_steps_than_a_workspace_keeps_tokens_of_are_refused(llm):
    with pytest.raises(ValueError, match="17 steps at once and a workspace keeps the tokens of 16"):
        llm.engine.runner.multi_step(*[None] * 4, MAX_STEPS + 1, None)


def test_as_many_steps_as_the_last_ones_would_have_taken_in_the_time():
    timer = StepTimer()
    assert timer.num_steps(1.0) == 1
    timer.note(0.75, 3)
    assert [timer.num_steps(seconds) for seconds in (0.0, 0.2, 0.25, 0.3, 1.0)] == [1, 1, 1, 1, 4]
    timer.note(0.0, 1)
    assert timer.num_steps(1.0) == 1


class SlowRunner:
    def __init__(self, runner, monkeypatch):
        self._runner, self.now = runner, 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def choose_num_steps(self, num_sequences, num_in_time):
        return 1

    def forward(self, batch):
        self.now += 1
        return self._runner.forward(batch)


@pytest.fixture
def run(llm, monkeypatch):
    def run(prompts, **params):
        before = llm.engine.throughput
        with llm.engine.wrapped(lambda runner: SlowRunner(runner, monkeypatch)):
            llm.generate(prompts, SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **params}))
            return llm.engine.throughput - before

    return run


def test_reading_and_decoding_are_counted_apart(run):
    assert run([[1, 2, 3]]) == Throughput(prompt_tokens=3, prompt_seconds=1, new_tokens=3, new_seconds=3)


def test_equal_samples_and_beams_are_one_text(run):
    alone = run([[1, 2, 3]])
    assert run([[1, 2, 3]], n=5) == alone
    assert run([[1, 2, 3]], num_beams=3) == alone
    assert run([[1, 2, 3]], n=5, temperature=1.0, seed=1).new_tokens == 5 * 3


def test_drafted_tokens_count_and_their_steps_take_what_they_take(run):
    params = {"max_tokens": 12, "allowed_token_ids": [3]}  # so that every draft is right
    plain, drafted = (run([[3] * 4], prompt_lookup_num_tokens=n, **params) for n in (0, 4))
    assert plain.new_tokens == drafted.new_tokens == 11
    assert drafted.new_seconds < plain.new_seconds == 11


def test_a_step_that_does_both_is_divided_among_its_tokens(llm, monkeypatch):
    one = ([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    two = ([7, 8, 9], SamplingParams(max_tokens=1))
    requests = [llm._inputs.request(*given) for given in (one, two)]

    def work():
        steps = llm.engine._steps
        steps.add(requests[0].sequences)
        steps.step()
        before = steps.throughput
        steps.add(requests[1].sequences)
        steps.step()  # one token of the first request and three of the second
        return steps.throughput - before

    with llm.engine.wrapped(lambda runner: SlowRunner(runner, monkeypatch)):
        assert llm.engine.call(work) == Throughput(3, 0.75, 1, 0.25)
