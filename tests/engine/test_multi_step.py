"""Several steps in one call: the same outputs, no step too many, and nobody waits longer than he would."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tinygpt import LLM, SamplingParams
from tinygpt.engine.multi_step import CALL_SECONDS, STREAM_SECONDS, Pace
from tinygpt.execution.model_runner import MAX_STEPS

PROMPTS = ["Once upon a time", "The old", [5], "In the morning she went to the"]
GREEDY = SamplingParams(max_tokens=30, seed=0)
KINDS = {
    "greedy": GREEDY,
    "drawn": SamplingParams(max_tokens=30, temperature=0.8, top_k=40, top_p=0.9, seed=3),
    "one token": SamplingParams(max_tokens=1, seed=0),
    "stop string": SamplingParams(max_tokens=30, seed=0, stop=[" the"]),
    "penalty": SamplingParams(max_tokens=10, seed=0, repetition_penalty=1.3),
    "logprobs": SamplingParams(max_tokens=10, seed=0, logprobs=3),
    "several": SamplingParams(max_tokens=20, temperature=1.0, seed=1, n=3),
    "lookup": SamplingParams(max_tokens=30, seed=0, prompt_lookup_num_tokens=4),
}


@pytest.fixture
def llm(small_demo):
    with LLM(small_demo, max_num_seqs=8, prefix_cache_seqs=0) as llm:
        yield llm


@pytest.fixture
def calls(llm, monkeypatch) -> list[int]:
    """The steps of each call, by a machine on which any number of them takes no time."""
    calls, multi_step = [], llm.engine.runner.multi_step
    monkeypatch.setattr(Pace, "num_steps", lambda pace, seconds: MAX_STEPS if seconds else 1)
    monkeypatch.setattr(llm.engine.runner, "multi_step", lambda *on: calls.append(on[-2]) or multi_step(*on))
    return calls


def outputs(llm: LLM, params) -> list:
    return [output.outputs for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_single_steps(llm, calls, monkeypatch, kind):
    at_once = outputs(llm, KINDS[kind])
    assert bool(calls) == (kind not in ("one token", "stop string", "penalty", "logprobs", "lookup"))
    monkeypatch.setattr(llm.engine.runner, "choose_num_steps", lambda *of: 1)
    calls.clear()
    assert outputs(llm, KINDS[kind]) == at_once
    assert not calls


def test_requests_of_all_kinds_at_once(llm, calls):
    alone = [llm.generate([prompt], params)[0].outputs for prompt in PROMPTS for params in KINDS.values()]
    pairs = [(prompt, params) for prompt in PROMPTS for params in KINDS.values()]
    together = llm.generate([prompt for prompt, _ in pairs], [params for _, params in pairs])
    assert [output.outputs for output in together] == alone
    assert calls


def test_no_step_is_taken_for_a_sequence_that_has_ended_by_its_length(llm, calls):
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (40, 5, 20, 20)]
    llm.generate([[1], [2], [3], [4]], params)
    assert calls == [4, 15, 16, 4]  # after the first step


def test_a_sequence_that_ends_before_the_last_step_takes_no_more(llm, calls):
    whole = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    last = whole[0].index(whole[0][6])
    calls.clear()
    ended, *others = llm.generate(PROMPTS, [SamplingParams(max_tokens=30, stop_token_ids=[whole[0][6]]), *[GREEDY] * 3])
    assert ended.outputs[0].token_ids == whole[0][: last + 1]
    assert ended.outputs[0].finish_reason == "stop"
    assert [output.outputs[0].token_ids for output in others] == whole[1:]
    assert calls[0] > last


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_no_step_is_wasted_on_those_that_have_ended(llm, calls, monkeypatch, heat):
    """However many steps a call might take, they are as many as of single ones: a slot is free when its text ends."""
    prompts = [[i] for i in range(30)]
    free = SamplingParams(max_tokens=40, temperature=heat, seed=1, ignore_eos=True)
    texts = [output.outputs[0].token_ids for output in llm.generate(prompts, free)]
    ends = [token_ids[7 + i % 20] for i, token_ids in enumerate(texts)]
    params = SamplingParams(max_tokens=40, temperature=heat, seed=1, ignore_eos=True, stop_token_ids=ends)
    taken = []
    monkeypatch.setattr(Pace, "note", lambda pace, seconds, steps: taken.append(steps))
    at_once = llm.generate(prompts, params)
    num_calls, num_steps = len(taken), sum(taken)
    monkeypatch.setattr(llm.engine.runner, "choose_num_steps", lambda *of: 1)
    taken.clear()
    single = llm.generate(prompts, params)
    assert [output.outputs for output in at_once] == [output.outputs for output in single]
    assert num_steps == len(taken) > num_calls


def test_the_context_is_never_left(llm, calls):
    prompt = [4] * (llm.max_model_len - 20)
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=20, ignore_eos=True))
    assert (len(output.outputs[0].token_ids), calls) == (20, [16, 3])


def test_a_step_that_is_asked_for_is_one(llm, calls):
    request = llm._inputs.request([3], SamplingParams(max_tokens=9, ignore_eos=True))
    llm.engine.add(request.sequences)
    for count in range(1, 10):
        llm.step()
        assert len(request.sequences[0].new_token_ids) == count
    assert not calls


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda llm: llm.generate(PROMPTS, SamplingParams(max_tokens=4)), CALL_SECONDS),
        (lambda llm: llm.generate(PROMPTS, SamplingParams(max_tokens=4, max_time=60)), CALL_SECONDS),
        (lambda llm: list(llm.stream("The", SamplingParams(max_tokens=4))), STREAM_SECONDS),
        (lambda llm: llm.submit("The", SamplingParams(max_tokens=4)).result(60), STREAM_SECONDS),
        (lambda llm: llm.submit("The", SamplingParams(max_tokens=4), print).result(60), STREAM_SECONDS),
    ],
    ids=["generate", "max_time", "stream", "submit", "on_chunk"],
)
def test_who_waits_for_single_tokens_waits_less(llm, monkeypatch, run, expected):
    asked = []
    monkeypatch.setattr(Pace, "num_steps", lambda pace, seconds: asked.append(seconds) or 1)
    run(llm)
    assert set(asked) == {0.0, expected}  # the first tokens are waited for


def test_a_call_ends_with_the_time_that_is_left(llm, monkeypatch):
    """Of whichever request's: one that waits for a slot is told as well."""
    asked, now = [], [100.0]
    monkeypatch.setattr(Pace, "num_steps", lambda pace, seconds: asked.append(seconds) or 1)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    times = [None, 3.0, 2.0]
    requests = [llm._inputs.request([3], SamplingParams(max_tokens=9, ignore_eos=True, max_time=t)) for t in times]
    llm.engine.add(requests[0].sequences)
    llm.step()
    for request in requests[1:]:
        llm.engine.add(request.sequences)
    llm.step()
    asked.clear()
    for now[0] in (100.5, 101.0, 102.5):
        llm.engine.step(1.75)
    assert asked == [1.5, 1.0, 0.5]
    llm.engine.remove([sequence for request in requests for sequence in request.sequences])


@pytest.mark.parametrize("what", ["add", "remove"])
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_who_comes_or_leaves_waits_for_one_step(llm, calls, monkeypatch, what, heat):
    params = SamplingParams(max_tokens=40, temperature=heat, seed=1, ignore_eos=True)
    alone = llm.generate([[3]], params)[0].outputs
    first, second = (llm._inputs.request([token_id], params) for token_id in (3, 4))
    llm.engine.add([*first.sequences, *(second.sequences if what == "remove" else [])])
    llm.step()
    multi_step = llm.engine.runner.multi_step

    def meanwhile(*on):
        monkeypatch.setattr(llm.engine.runner, "multi_step", multi_step)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(getattr(llm.engine, what), second.sequences).result()
        return multi_step(*on)

    monkeypatch.setattr(llm.engine.runner, "multi_step", meanwhile)
    llm.engine.step(1.0)
    assert len(first.sequences[0].new_token_ids) == 2
    assert llm.engine.scheduler.running == first.sequences
    calls.clear()
    llm.engine.step(1.0)
    assert calls == ([] if what == "add" else [MAX_STEPS])  # with the newcomer's prompt, or nobody waits any more
    while llm.engine.scheduler.running:
        llm.engine.step(1.0)
    assert first.sequences[0].new_token_ids == alone[0].token_ids


def test_a_stream_beside_a_call_is_waited_for(llm, monkeypatch):
    asked = []
    monkeypatch.setattr(Pace, "num_steps", lambda pace, seconds: asked.append(seconds) or 1)
    stream = llm.stream("The", SamplingParams(max_tokens=40, ignore_eos=True))
    next(stream)
    asked.clear()
    llm.generate(["It"], SamplingParams(max_tokens=4, ignore_eos=True))
    assert asked == [0.0] + [STREAM_SECONDS] * 3


def test_as_many_steps_as_the_last_ones_would_have_taken_in_the_time():
    pace = Pace()
    assert pace.num_steps(1.0) == 1
    pace.note(0.75, 3)
    assert [pace.num_steps(seconds) for seconds in (0.0, 0.2, 0.25, 0.3, 1.0)] == [1, 1, 1, 1, 4]
    pace.note(0.0, 1)
    assert pace.num_steps(1.0) == 1


def test_the_pace_is_that_of_the_steps(llm, monkeypatch):
    noted, now = [], iter(range(10**6))
    monkeypatch.setattr(Pace, "note", lambda pace, seconds, steps: noted.append((seconds, steps)))
    monkeypatch.setattr(Pace, "num_steps", lambda pace, seconds: 3 if seconds else 1)
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))
    llm.generate([[1], [2]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert [steps for _, steps in noted] == [1, 3, 3, 1]
    assert all(seconds > 0 for seconds, _ in noted)
